"""`flashtune db forget`: what should not have come is taken out again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.cli.common.options import FileName, database_option, existing_database
from flashtune.files import shown_path

if TYPE_CHECKING:
    from flashtune.tuned_db.records.measurement import Measurement
    from flashtune.tuned_db.upkeep.forgetting import Forgotten, Which

take_back_option = click.option("--take-back", is_flag=True, help="Let in again what was removed, by gc or forget.")


def forgetting(command: Callable[..., None]) -> Callable[..., None]:
    """The options of what takes out rows that are named."""
    options = (
        click.option(
            "--arrival", type=click.IntRange(1, 2**31 - 1), metavar="N", help="What it brought; the log numbers them."
        ),
        click.option("--session", metavar="ID", help="What this tuning session measured, here or elsewhere."),
        click.option("--source", metavar="UUID", help="What came from this database, by any arrival."),
        click.option("--copy", type=FileName(), metavar="FILE", help="Where the copy goes. [default: a new file]"),
        click.option("--dry-run", is_flag=True, help="Change nothing, and say what would go."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@forgetting
@database_option
def forget(
    arrival: int | None,
    session: str | None,
    source: str | None,
    copy: Path | None,
    dry_run: bool,
    database: Path | None,
) -> None:
    """Take out of the tuning database what should not have come to it.

    By what brought it, by the session that measured it, or by the database that it came from. flashtune db log numbers
    what came; flashtune db check names sessions and arrivals of rows that can't be right.

    What goes is written to an export first, beside the database, and does not come back with a merge, an import or a
    pull, unless with --take-back. Databases of others keep it.

    \b
    Examples:
      flashtune db forget --arrival 3 --dry-run
      flashtune db forget --session 01a22b4d-25b3-7dc1-ac10-a1d55edff8c3
      flashtune db import tuned.db.forgotten-20261201T101500.jsonl.gz --take-back
    """
    from flashtune.tuned_db.store.store import Store
    from flashtune.tuned_db.upkeep.forgetting import forget as run

    which = chosen(arrival, session, source)
    with Store.open(existing_database(database), create=False, readonly=dry_run) as store:
        print_forgotten(run(store, which, copy=copy, dry_run=dry_run), which, dry_run)


def chosen(arrival: int | None, session: str | None, source: str | None) -> Which:
    """What one of the three options says."""
    from flashtune.tuned_db.upkeep.forgetting import Which

    if [arrival, session, source].count(None) != 2:
        raise click.UsageError("one of --arrival, --session and --source says what to forget")
    return Which(arrival=arrival, session=session, source=source)


def way_out(row: Measurement, arrivals: Mapping[str, int]) -> str:
    """The option by which ``row`` is taken out, with what came with it or was measured with it."""
    from flashtune.values import plain

    number = arrivals.get(row.id)
    return f"--session {shlex.quote(row.session)}" if number is None else f"--arrival {plain(number)}"


def print_forgotten(found: Forgotten, which: Which, dry_run: bool, further: str = "") -> None:
    """What was taken out, or would be, and the way back, of which there may be more than one step."""
    did = "Would remove" if dry_run else "Removed"
    click.echo(f"{did} {found.removed} of {found.removed + found.left} measurements: those {which}")
    if found.lost:
        click.echo(f"{found.lost} of them can't be read by this version, so no copy can hold them", err=True)
    if found.copy is not None:
        path = shown_path(found.copy)
        back = f"flashtune db import {shlex.quote(path)} --take-back"
        click.echo(f"They are kept in {path}. To take them back: {back}{further}")
