"""`flashtune explain`: how far a claim can be trusted, and what would improve it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashtune.cli import explain
from flashtune.cli.explain import next_step, problem_flags
from flashtune.cli.main import main
from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.lookup.sources import bundled
from flashtune.tuned_db.records.measurement import Choice, Measurement, new_id
from flashtune.tuned_db.store.store import Store

H200 = gpu_by_alias("h200")
PROBLEM = Problem(
    dtype="float16", head_dim=64, batch=3, seqlen_q=777, seqlen_k=1333, num_heads=6, num_heads_kv=2, causal=True
)
"""None ships for it."""
DEFAULT = default_config(PROBLEM, H200)
CONFIG = dataclasses.replace(DEFAULT, num_stages=3)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of one's own, with a space in its name."""
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "none.db"))
    made = tmp_path / "my tuned.db"
    Store.open(made)
    return made


def row(ratio: float = 0.9, **changes: Any) -> Measurement:
    config = changes.get("config", CONFIG)
    base: dict[str, Any] = {
        "id": new_id(),
        "created": "2026-11-29T12:00:00.000Z",
        "session": "01935f6e-0000-7000-8000-000000000000",
        "problem": PROBLEM,
        "gpu_key": H200.key,
        "gpu_name": H200.name,
        "config": config,
        "source_digest": source_digest(PROBLEM.spec, config),
        "status": "ok",
        "stage": "final",
        "median_us": 90.0,
        "samples": 25,
        "baseline_us": 100.0,
        "paired_ratio": ratio,
        "ratio_low": ratio - 0.002,
        "ratio_high": ratio + 0.002,
        "rounds": 25,
        "unit": "GPU-one",
    }
    return Measurement(**(base | changes))


def later(ratio: float, **changes: Any) -> Measurement:
    """Another session, of the next day."""
    session = "01935f6e-0000-7000-8000-000000000001"
    return row(ratio, created="2026-11-30T12:00:00.000Z", session=session, **changes)


DEFAULT_ROW = row(config=DEFAULT, paired_ratio=1.0, ratio_low=1.0, ratio_high=1.0, median_us=100.0)


def explained(path: Path, *rows: Measurement) -> tuple[dict[str, Any], str]:
    """The JSON document and the table for `PROBLEM` with these rows."""
    with Store.open(path) as store:
        store.add(rows)
    command = ["explain", "--gpu", "h200", *shlex.split(" ".join(problem_flags(PROBLEM))), "--db", str(path)]
    answers = [CliRunner().invoke(main, [*command, *more]) for more in (["--json"], [])]
    for each in answers:
        assert each.exit_code == 0, each.output
    document = json.loads(answers[0].stdout)
    assert document["problem"] == dataclasses.asdict(PROBLEM)
    return document, answers[1].stdout


def test_a_candidate_names_the_command_that_verifies_it(path: Path) -> None:
    document, table = explained(path, row(), DEFAULT_ROW)
    assert (document["level"], document["origin"], document["trust"]) == ("exact", "user", "candidate")
    assert (document["ratio"], document["ratio_low"], document["ratio_high"]) == (0.9, 0.898, 0.902)
    assert (document["sessions"], document["units"]) == (1, ["GPU-one"])
    assert (document["first"], document["last"]) == ("2026-11-29", "2026-11-29")
    with Store.open(path) as store:
        assert store.origin in document["author"]
        assert store.origin in table
    words = shlex.split(document["next"])
    assert words[:5] == ["flashtune", "db", "verify", "--gpu", "h200"]
    assert words[-2:] == ["--db", str(path)]
    assert "candidate" in table
    assert "flashtune db verify" in table
    assert "GPU-one" in table


def test_a_name_says_whom_to_ask(path: Path) -> None:
    document, table = explained(path, row(author="Ada Ä."), DEFAULT_ROW)
    assert document["author"] == "Ada Ä."
    assert "Ada Ä." in table


def test_the_command_is_about_the_same_problem(path: Path) -> None:
    words = shlex.split(explained(path, row())[0]["next"])
    again = CliRunner().invoke(main, ["explain", *words[3:], "--json"])
    assert json.loads(again.stdout)["problem"] == dataclasses.asdict(PROBLEM)


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem(dtype="bfloat16", head_dim=128, batch=1, seqlen_q=64, seqlen_k=64, num_heads=4, num_heads_kv=4),
        Problem(
            dtype="bfloat16",
            head_dim=192,
            batch=1,
            seqlen_q=1,
            seqlen_k=64,
            num_heads=4,
            num_heads_kv=1,
            head_dim_v=128,
        ),
    ],
    ids=str,
)
def test_flags_describe_the_whole_problem(problem: Problem, path: Path) -> None:
    flags = shlex.split(" ".join(problem_flags(problem)))
    done = CliRunner().invoke(main, ["explain", "--gpu", "h200", *flags, "--json"])
    assert json.loads(done.stdout)["problem"] == dataclasses.asdict(problem)


def test_what_is_verified_needs_nothing(path: Path) -> None:
    document, table = explained(path, row(), later(0.901, unit="GPU-two"), DEFAULT_ROW)
    assert (document["trust"], document["agreeing"], document["others"]) == ("verified", 1, 1)
    assert (document["sessions"], document["units"]) == (2, ["GPU-one", "GPU-two"])
    assert (document["first"], document["last"]) == ("2026-11-29", "2026-11-30")
    assert (document["next"], document["next_why"]) == (None, "nothing: it is verified")
    assert "2026-11-29 to 2026-11-30, on GPU-one, GPU-two" in table


def test_a_dispute_is_for_another_session_to_decide(path: Path) -> None:
    document, table = explained(path, row(), later(0.95), DEFAULT_ROW)
    assert (document["trust"], document["agreeing"], document["others"]) == ("disputed", 0, 1)
    assert document["next"].startswith("flashtune db verify")
    assert "which of those before was right" in document["next_why"]
    assert "disputed" in table


@pytest.mark.parametrize(
    ("made", "level", "command"),
    [
        ([], "default", "flashtune tune --gpu h200 --seqlen-q 777"),
        (
            [row(stage="measure", baseline_us=None, paired_ratio=None, ratio_low=None, ratio_high=None)],
            "exact",
            "flashtune tune --gpu h200",
        ),
        ([row(source_digest="0" * 64)], "older_source", "flashtune tune --gpu h200"),
        ([DEFAULT_ROW], "exact", "--effort full"),
    ],
    ids=["nothing", "no final", "older source", "the default"],
)
def test_what_has_no_claim_is_to_be_tuned(path: Path, made: list[Measurement], level: str, command: str) -> None:
    document, _ = explained(path, *made)
    assert document["level"] == level
    assert command in document["next"]
    assert document["trust"] == ("candidate" if level == "older_source" else None)


def test_what_ships_is_tuned_and_says_who_made_it(path: Path) -> None:
    """`db verify` is about the rows of one's own database."""
    shipped = bundled("9.0a")
    problem = Problem(
        dtype="bfloat16", head_dim=128, batch=1, seqlen_q=1024, seqlen_k=1024, num_heads=16, num_heads_kv=16
    )
    assert shipped.measurements(problem=problem, gpu_key=H200.key, status="ok", stage="final")
    flags = shlex.split(" ".join(problem_flags(problem)))
    document = json.loads(CliRunner().invoke(main, ["explain", "--gpu", "h200", *flags, "--json"]).stdout)
    assert (document["origin"], document["author"]) == ("bundled", "ships with flashtune")
    assert document["next"].startswith("flashtune tune")


def test_a_card_of_a_strange_name_is_shown_as_text(path: Path) -> None:
    _, table = explained(path, row(unit="[bold]GPU[/bold]"))
    assert "'[bold]GPU[/bold]'" in table


def test_every_key_of_the_document_is_documented(path: Path) -> None:
    documented = explain._document.__doc__ or ""
    assert not [key for key in explained(path, row())[0] if f"``{key}``" not in documented]


def test_a_gpu_that_is_not_in_the_table_is_not_named() -> None:
    here = dataclasses.replace(H200, name="some card")
    choice = Choice(config=DEFAULT, level="default", evidence="")
    command, _ = next_step(choice, PROBLEM, here, None)
    assert command is not None
    assert "--gpu" not in command
    assert "--db" not in command
