"""`flashtune db verify`: are the claims of a tuning database reproduced on the GPU here?"""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.common.group import FAILED, INTERRUPTED
from flashtune.cli.common.options import database_option, devices_option, problem_from, problem_options, take_problem
from flashtune.files import shown_path

from .forget import way_out

if TYPE_CHECKING:
    from flashtune.tuned_db.policy.trust import Claim
    from flashtune.tuner.commands.recheck import Recheck
    from flashtune.tuner.commands.verify import Verification, Verified
    from flashtune.tuner.results.report import Progress
    from flashtune.tuner.run.run import Ran


@click.command()
@click.option("--gpu", help="GPU such as h100, which must be here. [default: the first]")
@click.option(
    "--sample", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Winners, drawn at random."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the draw.")
@click.option("--failures", is_flag=True, help="Try what is said to be wrong on this GPU, instead of winners.")
@problem_options
@devices_option
@database_option
def verify(
    gpu: str | None,
    sample: int,
    seed: int,
    failures: bool,
    devices: list[int] | None,
    database: Path | None,
    **flags: Any,
) -> None:
    """Time winners again, against the default, and say whether their claims are reproduced.

    Some of the winners for the GPU here are drawn, or the one of the problem that the flags describe. Each is checked
    for correctness, then timed together with the default config. That takes a few seconds for each, and no other
    work should be on the card. What is measured is stored as a session of its own: a claim that a session of another
    day or another card reproduces is verified, one that it does not is disputed and gives way to others.

    A config that some row says gave wrong results on this GPU model is left alone by all from then on. With --failures
    such configs are tried; what is right here is named, with the command that takes out the rows which say otherwise.

    The exit code is 1 where a claim was not reproduced, or none could be run.

    \b
    Examples:
      flashtune db verify
      flashtune db verify --gpu h200 --sample 50 --seed 1
      flashtune db verify --seqlen 4096 --heads 32 --heads-kv 8 --head-dim 128 --causal
      flashtune db verify --db team.db --devices 1
      flashtune db verify --failures --sample 200
    """
    from flashtune.tuner.commands.verify import verify as run

    given = take_problem(flags)
    problem = problem_from(given) if given else None
    told = _Told()
    asked: dict[str, Any] = {"sample": sample, "seed": seed, "problem": problem, "devices": devices}
    if failures:
        from flashtune.tuner.commands.recheck import recheck

        tried = recheck(gpu, **asked, database=database, progress=told.show)
        print_recheck(tried, database)
        if tried.ran.interrupted:
            raise click.exceptions.Exit(INTERRUPTED)
        if tried.ran.stopped or tried.count("right here") or not tried.count("wrong here too"):
            raise click.exceptions.Exit(FAILED)
        return
    found = run(gpu, **asked, database=database, progress=told.show)
    print_verification(found)
    if found.interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if found.stopped or found.count("not reproduced") or not found.count("reproduced"):
        raise click.exceptions.Exit(FAILED)


def print_verification(found: Verification) -> None:
    """The table, then what it comes to."""
    from rich.text import Text

    from flashtune.cli.common.tables import config_text, console, table
    from flashtune.tuned_db.records.measurement import THROTTLES
    from flashtune.tuner.commands.verify import WORDS

    headings = ("problem", "config", "claimed", "here", "verdict", "trust")
    shown = table(*headings, title=f"{found.gpu}: winners timed again")
    for each in found.rows:
        verdict = f"{each.word}: {each.why}" if each.why else each.word
        cells = (str(each.stored.problem), config_text(each.stored.config), ratio_text(each.stored.claim))
        shown.add_row(*(Text(cell) for cell in (*cells, ratio_text(each.here), verdict, _trust(each))))
    console().print(shown)
    counts = ", ".join(f"{found.count(word)} {word}" for word in WORDS)
    click.echo(f"{counts}, of {len(found.rows)} in {found.seconds:.0f} s. Stored as session {found.session}")
    for reason, count in found.seen.most_common():
        click.echo(f"Seen in {count} of the finals: {THROTTLES[reason]}")
    if any(each.level == "candidate" for each in found.rows if each.word == "reproduced"):
        click.echo("What stays a candidate was claimed on this card today: another day or another card can confirm it.")
    _print_end(found)


def print_recheck(found: Recheck, database: Path | None) -> None:
    """The table, what it comes to, and how to take out what is not so here."""
    from rich.text import Text

    from flashtune.cli.common.tables import config_text, console, table
    from flashtune.tuner.commands.recheck import WORDS

    shown = table("problem", "config", "said by", "verdict", title=f"{found.gpu}: said to be wrong, and tried")
    for each in found.rows:
        sessions = len({row.session for row in each.said.rows})
        verdict = f"{each.word}: {each.why}" if each.why else each.word
        cells = (str(each.said.problem), config_text(each.said.config), f"{sessions} sessions", verdict)
        shown.add_row(*map(Text, cells))
    console().print(shown)
    counts = ", ".join(f"{found.count(word)} {word}" for word in WORDS)
    ran = found.ran
    click.echo(f"{counts}, of {len(found.rows)} in {ran.seconds:.0f} s. Stored as session {ran.session}")
    rows = [row for each in found.rows if each.word == "right here" for row in each.said.rows]
    for way, count in Counter(way_out(row, found.arrivals) for row in rows).most_common():
        where = "" if database is None else f" --db {shlex.quote(shown_path(database))}"
        click.echo(f"To take out {count} that say otherwise: flashtune db forget {way}{where} --dry-run")
    _print_end(ran)


def _print_end(found: Verification | Ran) -> None:
    if found.note:
        click.echo(f"Note: {found.note}")
    if found.stopped:
        click.echo(f"Stopped: {found.stopped}")
    if found.interrupted:
        click.echo("Interrupted: all results up to here are stored.")


def ratio_text(claim: Claim | None) -> str:
    """Time relative to the default, with its interval where there is one."""
    if claim is None:
        return "-"
    interval = "" if claim.low == claim.high else f" [{claim.low:.3f}, {claim.high:.3f}]"
    return f"{claim.ratio:.3f}{interval}"


def _trust(each: Verified) -> str:
    return each.level if each.level == each.stored.level else f"{each.stored.level} -> {each.level}"


class _Told:
    """Prints a line for each problem that is done, and the first one."""

    def __init__(self) -> None:
        self._done = -1

    def show(self, progress: Progress) -> None:
        if progress.problems_done > self._done:
            self._done = progress.problems_done
            many = f"{self._done} of {progress.problems}: " if progress.problems else ""
            click.echo(f"{many}{progress.text}", err=True)
