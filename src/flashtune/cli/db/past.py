"""`flashtune db gc|log`: what may go from a tuning database, and what came to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.cli.common.options import database_option, existing_database
from flashtune.files import shown_path

if TYPE_CHECKING:
    from flashtune.tuned_db.store.arrivals import Arrival


def collecting(command: Callable[..., None]) -> Callable[..., None]:
    """The options of what removes rows."""
    older = click.option(
        "--older-than",
        "days",
        type=click.IntRange(min=0),
        default=30,
        show_default=True,
        metavar="DAYS",
        help="Only rows that are at least so old.",
    )
    dry = click.option("--dry-run", is_flag=True, help="Change nothing, and say what would go.")
    return older(dry(command))


@click.command()
@collecting
@database_option
def gc(days: int, dry_run: bool, database: Path | None) -> None:
    """Make the tuning database small: remove times that nothing depends on.

    Most rows are times of configs that were tried on the way to a final. Where a session had its final, these can go:
    attention() chooses as before. Finals and failures stay, and what no session has finished, and times that
    attention() goes by as no final can be used, and one time in a hundred. A later tune of the same problems measures
    such configs again.

    What is removed does not come back with a merge, an import or a pull. Databases of others keep it. It takes as much
    room on the disk again as the file does, until it is done.

    \b
    Examples:
      flashtune db gc --dry-run
      flashtune db gc --older-than 7 --db team.db
    """
    from flashtune.tuned_db.store.store import Store
    from flashtune.tuned_db.upkeep.gc import collect

    path = existing_database(database)
    with Store.open(path, create=False, readonly=dry_run) as store:
        found = collect(store, days=days, dry_run=dry_run)
    print_collected(found.removed, found.left, days, dry_run)
    if found.removed and not dry_run:
        click.echo(f"{shown_path(path)}: {found.bytes_before / 1e6:.1f} MB became {found.bytes_after / 1e6:.1f} MB")
    if found.note:
        click.echo(f"The file was not made smaller: {found.note}", err=True)


def print_collected(removed: int, left: int, days: int, dry_run: bool) -> None:
    """What was removed, or would be."""
    if not removed:
        what = f"none is a time of a finished search, {days} days old, that can go"
        click.echo(f"Nothing to remove: of {left} measurements {what}")
        return
    did = "Would remove" if dry_run else "Removed"
    click.echo(f"{did} {removed} of {removed + left} measurements: times of finished searches older than {days} days")


@click.command()
@database_option
def log(database: Path | None) -> None:
    """List what came to the tuning database from elsewhere: imports, merges and pulls, oldest first.

    Each has a number, by which flashtune db forget takes out what it brought. Source is the database that rows came
    from, as it said; names are those of trusted keys, or what FLASHTUNE_AUTHOR said where the command ran. The list
    stays in this database.

    \b
    Examples:
      flashtune db log
      flashtune db log --db team.db
    """
    from flashtune.tuned_db.store.store import Store

    with Store.open(existing_database(database), create=False, readonly=True) as store:
        print_arrivals(store.arrivals(), store.arrived())


def print_arrivals(arrivals: Sequence[Arrival], here: Mapping[int, int]) -> None:
    """One a line, with its number and how many of its rows are ``here``. Texts may be of others."""
    from flashtune.values import plain

    if not arrivals:
        click.echo("Nothing came from elsewhere")
    for each in arrivals:
        numbered = isinstance(each.number, int)
        left = here.get(each.number, 0) if isinstance(each.number, int) else each.new
        more = [
            f"{left} of them here" if numbered and left != each.new else "",
            f"signed by {plain(each.signer)}" if each.signer else "",
            f"digest {plain(each.digest)[:12]}" if each.digest else "",
            f"by {plain(each.author)}" if each.author else "",
        ]
        tail = "".join(f", {text}" for text in more if text)
        what = f"{plain(each.kind):6}  {plain(each.new):>7} new from {plain(each.source)}"
        name = plain(each.number) if numbered else ""
        click.echo(f"{name:>3}  {plain(each.created)[:16]}  {what}{tail}")
