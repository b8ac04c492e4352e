"""`explain`: which config would run, on what evidence, how far it can be trusted, and what would improve it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from flashtune import settings
from flashtune.cli.common.tables import config_text, console, milliseconds, table
from flashtune.cli.tune.json_report import config_json, problem_json
from flashtune.values import plain, shown

if TYPE_CHECKING:
    from flashtune.codegen.gpu.gpu import Gpu
    from flashtune.codegen.problem.problem import Problem
    from flashtune.tuned_db.records.measurement import Choice

SCHEMA = "flashtune-explain/1"
"""The number grows when a key changes its meaning or goes; keys may be added without that."""
_PLAIN_UNIT = re.compile(r"[A-Za-z0-9_.:-]{1,60}")


def show_explain(problem: Problem, gpu: Gpu, database: Path | None, as_json: bool) -> None:
    """Prints the answer, as a table or as one JSON document."""
    from flashtune.tuned_db.lookup.lookup import find

    choice = find(problem, gpu, store_path=database)
    facts = _facts(problem, gpu, choice)
    command, gain = next_step(choice, problem, gpu, database)
    author = _author(choice, database)
    if as_json:
        click.echo(_document(problem, gpu, choice, {"author": author, "next": command, "next_why": gain}, facts))
        return
    rows = [
        ("problem", str(problem)),
        ("GPU", f"{gpu} ({gpu.key})"),
        ("config", config_text(choice.config)),
        ("level", choice.level + (f", from {choice.origin}" if choice.origin else "")),
        ("evidence", choice.evidence),
        ("trust", _trust_text(choice)),
        ("author", author or "-"),
        ("next", f"{command}: {gain}" if command else gain),
        *_facts_text(problem, gpu, facts),
    ]
    grid = table("", "")
    grid.show_header = False
    for name, text in rows:
        grid.add_row(Text(name, style="bold"), Text(text))
    console().print(grid)


def next_step(choice: Choice, problem: Problem, gpu: Gpu, database: Path | None) -> tuple[str | None, str]:
    """The command that would improve what is known, and what it would change; None where nothing is missing."""
    row = choice.measurement
    if choice.level != "exact" or row is None:
        return _command("tune", problem, gpu, database), "measures it on that GPU, as nothing has with today's source"
    if row.stage != "final":
        return _command("tune", problem, gpu, database), "ends with a final against the default, which no run reached"
    if choice.trust is None:
        return _command("tune", problem, gpu, database, "--effort full"), "a longer search may find what is faster"
    if choice.trust.level == "verified":
        return None, "nothing: it is verified"
    decides = {
        "candidate": "a session on another day or another card confirms the claim or disputes it",
        "disputed": "another session says which of those before was right",
    }[choice.trust.level]
    if choice.origin == "bundled":  # verify is about the rows of one's own database
        return _command("tune", problem, gpu, database), "measures it on your own card, against the default"
    return _command("db verify", problem, gpu, database), decides


def _command(name: str, problem: Problem, gpu: Gpu, database: Path | None, *more: str) -> str:
    from flashtune.codegen.gpu.table import GPUS

    parts = [f"flashtune {name}"]
    if gpu.name in GPUS:  # another can only be the one that is here, which needs no name
        parts.append(f"--gpu {gpu.name}")
    parts += [*problem_flags(problem), *more]
    if database is not None:
        parts.append(f"--db {shlex.quote(str(database))}")
    return " ".join(parts)


def problem_flags(problem: Problem) -> list[str]:
    """The options that describe ``problem``, without those at their default."""
    lengths = (
        [f"--seqlen {problem.seqlen_q}"]
        if problem.seqlen_q == problem.seqlen_k
        else [f"--seqlen-q {problem.seqlen_q}", f"--seqlen-k {problem.seqlen_k}"]
    )
    optional = (
        (problem.dtype != "bfloat16", f"--dtype {problem.dtype}"),
        (problem.batch != 1, f"--batch {problem.batch}"),
        (problem.num_heads_kv != problem.num_heads, f"--heads-kv {problem.num_heads_kv}"),
        (problem.head_dim_v != 0, f"--head-dim-v {problem.head_dim_v}"),
        (problem.causal, "--causal"),
    )
    needed = [*lengths, f"--heads {problem.num_heads}", f"--head-dim {problem.head_dim}"]
    return needed + [text for wanted, text in optional if wanted]


def _author(choice: Choice, database: Path | None) -> str | None:
    """Whose rows they are, as far as is known: those of a database may have come to it from others.

    A name is what ``FLASHTUNE_AUTHOR`` said where they were measured, which nothing proves.
    """
    row = choice.measurement
    if row is not None and row.author:
        return plain(row.author)
    if choice.origin == "bundled":
        return "ships with flashtune"
    if choice.origin != "user":
        return None
    from flashtune.tuned_db.store.store import Store

    path = database or settings.database_path()
    with Store.open(path, create=False, readonly=True) as store:
        return f"database {store.origin}, or what was imported to it"


def _trust_text(choice: Choice) -> str:
    from flashtune.tuned_db.records.measurement import TRUST

    trust = choice.trust
    if trust is None:
        row = choice.measurement
        if row is None or row.stage != "final" or choice.ratio is None:
            return "-: no final compares it with the default"
        return "-: it is the default, which claims nothing"
    days = trust.first if trust.first == trust.last else f"{trust.first} to {trust.last}"
    units = ", ".join(each if _PLAIN_UNIT.fullmatch(each) else shown(each) for each in trust.units)
    return f"{trust.level}: {TRUST[trust.level]}; {days}, on {units or 'a card that is not known'}"


def _document(problem: Problem, gpu: Gpu, choice: Choice, told: dict[str, str | None], facts: dict[str, Any]) -> str:
    """The document of ``--json``. All keys are always there; null is what is not known.

    ======================  ============================================================================
    ``schema``              ``flashtune-explain/1``
    ``name``, ``problem``   the problem as tables print it, and all its fields
    ``gpu``                 ``name`` and ``key`` of the device model
    ``config``              ``family``, and all ``parameters`` by name
    ``level``, ``origin``   how near the evidence is (`tuned_db.lookup.lookup`); ``user``, ``bundled`` or null
    ``evidence``            a sentence for people
    ``stage``, ``seconds``  of the newest row that the choice goes by
    ``ratio``,              its time relative to the default config, and the interval that holds it with 95 %; of
    ``ratio_low``,          the problem and GPU that were measured, as all up to ``others``
    ``ratio_high``
    ``trust``               ``candidate``, ``verified``, ``disputed``; null where no final claims anything
    ``sessions``, ``units`` a count, and UUIDs of cards
    ``first``, ``last``     days (UTC) of the oldest and the newest row
    ``agreeing``,           witnesses that are independent of the median one, and how many agree with it
    ``others``
    ``author``              whose rows they are, as far as is known
    ``next``, ``next_why``  the command that would improve what is known, or null, and what it would change
    ``blocks``, ``threads`` of the launch; ``num_splits`` thread blocks share the keys of a tile
    ``registers``           per thread; ``compiled`` says whether the compiler or an estimate says so
    ``shared_memory``,      bytes, for a thread block and for a call
    ``workspace``
    ``flops``,              of the problem; bytes of device memory traffic, at the least
    ``min_bytes``
    ``balance``             FLOP a byte at which the chip's rates are in balance
    ``limit_seconds``       what the chip's rates allow at best
    ``model_seconds``,      what the time model predicts, and why
    ``model_why``
    ======================  ============================================================================
    """
    head = {"schema": SCHEMA, "name": str(problem), "problem": problem_json(problem)}
    place = {"gpu": {"name": gpu.name, "key": gpu.key}}
    return json.dumps({**head, **place, **_claim(choice), **told, **facts}, indent=2, allow_nan=False)


def _claim(choice: Choice) -> dict[str, Any]:
    trust, row = choice.trust, choice.measurement
    return {
        "config": config_json(choice.config),
        "level": choice.level,
        "origin": choice.origin or None,
        "evidence": choice.evidence,
        "stage": row.stage if row else None,
        "seconds": row.median_us / 1e6 if row and row.median_us else None,
        "ratio": choice.ratio,
        "ratio_low": choice.ratio_low,
        "ratio_high": choice.ratio_high,
        "trust": trust.level if trust else None,
        "sessions": trust.sessions if trust else None,
        "units": list(trust.units) if trust else None,
        "first": trust.first if trust else None,
        "last": trust.last if trust else None,
        "agreeing": trust.agreeing if trust else None,
        "others": trust.others if trust else None,
    }


def _facts(problem: Problem, gpu: Gpu, choice: Choice) -> dict[str, Any]:
    """What is known without measuring: launch, resources, work, limits. Bytes, seconds and counts."""
    from flashtune.codegen.families.registry import family, predict
    from flashtune.codegen.gpu.roofline import limit

    kind = family(choice.family)
    needs = kind.resources(choice.config, problem.spec)
    plan = kind.plan(problem, choice.config, gpu)
    record = choice.measurement or choice.prediction
    compiled = record.registers if record else None
    estimate = predict(problem, choice.config, gpu)
    bound = limit(problem, gpu)
    return {
        "blocks": plan.kernels[0].grid[0],
        "threads": needs.threads,
        "num_splits": plan.num_splits,
        "registers": compiled or needs.registers,
        "compiled": bool(compiled),
        "shared_memory": needs.shared_memory,
        "workspace": plan.workspace_bytes,
        "flops": problem.flops,
        "min_bytes": problem.min_bytes,
        "balance": bound.tflops * 1e3 / gpu.bandwidth_gb_s,
        "limit_seconds": bound.seconds,
        "model_seconds": estimate.seconds,
        "model_why": estimate.why,
    }


def _facts_text(problem: Problem, gpu: Gpu, facts: dict[str, Any]) -> list[tuple[str, str]]:
    shared = f", {facts['num_splits']} for each tile's keys" if facts["num_splits"] > 1 else ""
    workspace = "none: memory beyond output and LSE is not used"
    if facts["workspace"]:
        workspace = f"{facts['workspace'] / 1e6:.4g} MB, taken for each call"
    intensity = problem.flops / problem.min_bytes if problem.min_bytes else 0.0
    limited = "compute" if intensity > facts["balance"] else "memory"
    registers = f"{facts['registers']} (compiled)" if facts["compiled"] else f"about {facts['registers']}"
    return [
        ("launch", f"{facts['blocks']} blocks of {facts['threads']} threads{shared}"),
        ("registers", f"{registers} per thread"),
        ("shared memory", f"{facts['shared_memory']} B per block of {gpu.shared_memory_block} B"),
        ("workspace", workspace),
        (
            "work",
            f"{problem.flops / 1e9:.4g} GFLOP, at least {problem.min_bytes / 1e6:.4g} MB of device memory traffic",
        ),
        (
            "roofline",
            f"{intensity:.4g} FLOP/byte, the chip balances at {facts['balance']:.4g}: {limited}-limited, at best "
            f"{milliseconds(facts['limit_seconds'])}",
        ),
        ("model", f"{milliseconds(facts['model_seconds'])}: {facts['model_why']}"),
    ]
