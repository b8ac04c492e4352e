"""`flashtune db history|digest|diff`: what was chosen over time, on each machine, and by each database."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.common.group import in_words, is_unread
from flashtune.cli.common.options import (
    STDIN,
    FileName,
    database_option,
    existing_database,
    gpu_from,
    gpu_option,
    new_database_option,
    problem_from,
    problem_options,
    take_problem,
)
from flashtune.errors import FlashtuneError
from flashtune.files import shown_path

if TYPE_CHECKING:
    from flashtune.tuned_db.policy.ranked import Ranked
    from flashtune.tuned_db.records.measurement import Measurement
    from flashtune.tuned_db.sharing.diff import ChangedWinner, Difference, Side
    from flashtune.tuned_db.upkeep.history import Session

SHOWN = 20
"""Rows of each kind that `diff` names, unless all are asked for."""


class _Trouble(click.ClickException):
    """`diff` could not compare: the exit code is that of diff(1)."""

    exit_code = 2


@click.command()
@gpu_option
@problem_options
@database_option
def history(gpu: str | None, database: Path | None, **flags: Any) -> None:
    """Show all tuning sessions of one problem, the newest last, and which one wins today.

    Each has its best config by its own rows alone, with the time relative to the default config and the 95 % interval
    of that. What attention() runs is decided by all sessions together: the last line says what that is and why, and a
    star stands by the session that it is from.

    \b
    Examples:
      flashtune db history --gpu h100 --seqlen 4096 --heads 16 --head-dim 128 --causal
      flashtune db history --db team.db --seqlen 4096 --heads 16 --head-dim 128
    """
    from flashtune.tuned_db.lookup.lookup import find_in
    from flashtune.tuned_db.lookup.sources import bundled
    from flashtune.tuned_db.records.measurement import capability
    from flashtune.tuned_db.store.store import Store
    from flashtune.tuned_db.upkeep.history import sessions

    problem, target = problem_from(take_problem(flags)), gpu_from(gpu)
    path = existing_database(database)
    with Store.open(path, create=False, readonly=True).snapshot() as store:
        barred = store.rejected(problem.spec, target.key)
        found = sessions(store.measurements(problem=problem, gpu_key=target.key), barred)
        choice = find_in(problem, target, [store, bundled(capability(target.key))])
    winner = choice.measurement.session if choice.measurement and choice.origin == store.label else None
    click.echo(
        f"{problem} on {target}, {shown_path(path)}: {f'{len(found)} sessions' if len(found) != 1 else '1 session'}"
    )
    for each in found:
        _print_session(each, "*" if each.session == winner else " ")
    source = f" ({choice.origin})" if choice.origin else ""
    click.echo(f"today{source}: {choice}")


@click.command()
@gpu_option
@problem_options
@click.option(
    "--problems",
    "problem_file",
    type=FileName(exists=True, dash=STDIN),
    metavar="FILE",
    help="Problems from a file, as flashtune tune --problems takes it. [default: all that something is known of]",
)
@new_database_option
def digest(gpu: str | None, problem_file: Path | None, database: Path | None, **flags: Any) -> None:
    """Print one number that says which kernels attention() chooses here.

    It covers the GPU model and, for each problem, the family, config and source that the tuning database and the
    measurements that ship with flashtune lead to. Two machines with the same digest run the same kernels; rows that
    change no choice change no digest. In Python: flashtune.choices_digest().

    \b
    Examples:
      flashtune db digest                              all problems that something is known of, on the GPU here
      flashtune db digest --gpu h100 --problems model.json
      flashtune db digest --gpu h100 --seqlen 4096 --heads 16 --head-dim 128 --causal
    """
    from flashtune import settings
    from flashtune.tuned_db.lookup.choices import choices

    given = take_problem(flags)
    if given and problem_file is not None:
        raise click.UsageError("give --problems or the flags of one problem, not both")
    problems = [problem_from(given)] if given else None
    if problem_file is not None:
        from flashtune.tuner.tune.problem_file import read_problem_file

        problems = list(read_problem_file(problem_file))
    target = gpu_from(gpu)
    path = existing_database(database) if database is not None else settings.database_path()
    where = shown_path(path) if path.exists() else "no database of your own"
    click.echo(f"{where}: looking up each problem", err=True)
    found = choices(target, problems, database=path)
    count = "1 problem" if len(found.chosen) == 1 else f"{len(found.chosen)} problems"
    click.echo(f"{count} on {target.key}, from {where} and what ships with flashtune", err=True)
    click.echo(found.digest)


@click.command()
@click.argument("first", metavar="A", type=FileName())
@click.argument("second", metavar="B", type=FileName())
@click.option("--all", "everything", is_flag=True, help=f"Name all rows, not {SHOWN} of each kind.")
def diff(first: Path, second: Path, everything: bool) -> None:
    """Say how two databases or exports differ: in rows, and in what wins.

    A row that only A has begins with <, one that only B has with >. Winners follow from the rows alone, so this machine
    and its templates make no difference. The exit code is 0 if A and B hold the same, 1 if they differ, 2 on trouble.

    \b
    Examples:
      flashtune db diff tuned.db team.db
      flashtune db diff before.jsonl after.jsonl.gz --all
    """
    from flashtune.tuned_db.sharing.diff import compare, read_side

    try:
        sides = []
        for path in (first, second):
            click.echo(f"{shown_path(path)}: reading and checking each row", err=True)
            sides.append(read_side(path))
        for side in sides:
            if side.unreadable.rows:
                click.echo(f"{shown_path(side.path)}: {side.unreadable}, which take no part", err=True)
        found = compare(sides[0].measurements, sides[1].measurements)
        _print_difference(found, sides, everything)
    except FlashtuneError as error:
        raise _Trouble(str(error)) from error
    except OSError as error:
        if is_unread(error):
            raise click.exceptions.Exit(_Trouble.exit_code) from error
        raise _Trouble(in_words(error)) from error
    if found:
        raise click.exceptions.Exit(1)


def _print_session(each: Session, mark: str) -> None:
    from flashtune.cli.common.tables import config_text

    best = "nothing that may win"
    if each.best is not None:
        ratio = "" if each.best.ratio is None else f", {_ratio(each.best)} of the default's time"
        best = f"{config_text(each.best.config)}{ratio}"
    click.echo(f"{mark} {each.began[:16].replace('T', ' ')}  session {each.session}: {_counts(each)}")
    click.echo(f"    card      {', '.join([each.gpu_name, *each.units])}")
    if each.authors:
        click.echo(f"    author    {', '.join(each.authors)}")
    for environment in each.software:
        click.echo(f"    software  {environment}")
    click.echo(f"    best      {best}")


def _counts(session: Session) -> str:
    """How many rows, and what came of them where not all are ok."""
    if set(session.statuses) == {"ok"}:
        return f"{session.measurements} ok"
    return ", ".join(f"{count} {status}" for status, count in sorted(session.statuses.items()))


def _ratio(best: Ranked) -> str:
    if best.ratio is None:
        return "-"
    interval = "" if best.low is None or best.high is None else f" [{best.low:.3f}, {best.high:.3f}]"
    return f"{best.ratio:.3f}{interval}"


def _print_difference(found: Difference, sides: Sequence[Side], everything: bool) -> None:
    for mark, side, rows in zip("<>", sides, (found.only_first, found.only_second), strict=True):
        click.echo(f"only in {shown_path(side.path)}: {len(rows)} of {len(side.measurements)} measurements")
        _print_some([f"{mark} {_row(each)}" for each in rows], everything)
    if found.changed:
        click.echo(f"in both with other values under one id, so that one of them was altered: {len(found.changed)}")
        _print_some([f"! {_row(first)}" for first, _ in found.changed], everything)
    click.echo(f"other winners: {len(found.winners)}")
    lines = [line for changed in found.winners for line in _winners(changed)]
    _print_some(lines, everything, each=3)


def _print_some(lines: Sequence[str], everything: bool, each: int = 1) -> None:
    """The lines, of which ``each`` make one entry."""
    most = len(lines) if everything else SHOWN * each
    for line in lines[:most]:
        click.echo(line)
    if len(lines) > most:
        click.echo(f"  and {(len(lines) - most) // each} more, which --all shows")


def _row(row: Measurement) -> str:
    time = "" if row.median_us is None else f" {row.median_us:.4g} us"
    return f"{row.id} {row.created[:10]} {row.gpu_name} {row.problem}: {row.config} {row.stage} {row.status}{time}"


def _winners(changed: ChangedWinner) -> tuple[str, str, str]:
    def text(best: Ranked | None) -> str:
        if best is None:
            return "nothing that may win"
        same_config = changed.first and changed.second and changed.first.config == changed.second.config
        source = f", source {best.variant[2][:12]}" if same_config else ""
        ratio = "no ratio" if best.ratio is None else f"{_ratio(best)} of the default's time"
        return f"{best.config}, {ratio}{source}"

    head = f"  {changed.problem} on {changed.gpu_name}"
    return head, f"  < {text(changed.first)}", f"  > {text(changed.second)}"
