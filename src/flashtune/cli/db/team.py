"""`flashtune db push`, `pull` and `team`: what a team measures, on a PostgreSQL server that all can reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune import settings
from flashtune.cli.common.options import database_option, existing_database, new_database_option
from flashtune.files import shown_path

from .forget import chosen, forgetting, print_forgotten, take_back_option
from .past import collecting, print_arrivals, print_collected

if TYPE_CHECKING:
    from flashtune.tuned_db.sharing.merge import Added

PATIENCE = 600.0
"""Seconds that a push waits for others that write."""
PAUSE = 2.0
"""Seconds between lines that say how far it is."""

team_option = click.option(
    "--team",
    metavar="ADDRESS",
    help="The team's database, such as postgresql://me@host/tuned. Others on this machine can see what a command is "
    "given: keep a password in ~/.pgpass. [default: $FLASHTUNE_TEAM_DB]",
)


@click.command()
@team_option
@click.option("--create", is_flag=True, help="Make the tables first if the team's database is empty.")
@take_back_option
@database_option
def push(team: str | None, create: bool, take_back: bool, database: Path | None) -> None:
    """Send the team what was measured here.

    Only rows that the team lacks are sent, all of them or none, so that a push that was cut off is just repeated. A row
    that the team has with other values is refused, and nothing is added then. Predictions are not sent.

    \b
    Examples:
      flashtune db push                                       to $FLASHTUNE_TEAM_DB
      flashtune db push --team postgresql://me@host/tuned --create
      flashtune db push --db node7.db
    """
    from flashtune.tuned_db.sharing.team import create_team
    from flashtune.tuned_db.sharing.transfer import carry
    from flashtune.tuned_db.store.store import Store

    address = _address(team)
    with Store.open(existing_database(database), create=False, readonly=True) as local:
        if create and create_team(address, timeout=PATIENCE):
            click.echo("Made the tables of the team's database")
        shared = Store.on_server(address, timeout=PATIENCE)
        _report(carry(local, shared, _ticker(), take_back=take_back))
        click.echo(f"Stored in {shared.backend}")


@click.command()
@team_option
@take_back_option
@new_database_option
def pull(team: str | None, take_back: bool, database: Path | None) -> None:
    """Fetch what the team has measured.

    Only rows that are missing here are fetched, all of them or none, so that a pull that was cut off is just repeated.
    Each row is checked as those of an export are. attention() then finds the winners here; it never asks the server.

    \b
    Examples:
      flashtune db pull                                       from $FLASHTUNE_TEAM_DB
      flashtune db pull --team postgresql://me@host/tuned --db team.db
    """
    from flashtune.tuned_db.sharing.transfer import carry
    from flashtune.tuned_db.store.store import Store

    shared = Store.on_server(_address(team), readonly=True)
    with Store.open(database or settings.database_path()) as local:
        _report(carry(shared, local, _ticker(), take_back=take_back))
        click.echo(f"Stored in {shown_path(local.path)}")


@click.group()
def team() -> None:
    """Make, upgrade and look into the team's database.

    \b
    Examples:
      flashtune db team create              its tables, in an empty PostgreSQL database
      flashtune db team info                what it holds
      flashtune db team log                 who has pushed, and when
      flashtune db team gc                  make it small: without times that nothing depends on
      flashtune db team forget --arrival 3  take out again what should not have been pushed
      flashtune db team upgrade             after an update of flashtune that changed the schema
      flashtune db team grants ada          SQL that gives a role the rights to push, and no others
    """


@team.command()
@team_option
def create(team: str | None) -> None:
    """Make the tables in an empty PostgreSQL database.

    A database that holds anything of another program is left alone. Its user needs the right to create tables; what
    others need flashtune db team grants prints.

    \b
    Examples:
      createdb -h host tuned && flashtune db team create --team postgresql://me@host/tuned
    """
    from flashtune.tuned_db.sharing.team import create_team

    made = create_team(_address(team))
    click.echo(
        "Made the tables of the team's database" if made else "The tables are there already: nothing was changed"
    )


@team.command()
@team_option
def upgrade(team: str | None) -> None:
    """Bring the tables to the schema of this flashtune.

    All of it happens or nothing. Older versions of flashtune refuse the database from then on, so let all update first.

    \b
    Examples:
      flashtune db team upgrade
    """
    from flashtune.tuned_db.sharing.team import upgrade_team

    before, after = upgrade_team(_address(team))
    click.echo(f"Schema version {after}, as it was" if before == after else f"Schema version {before} became {after}")


@team.command()
@click.argument("role")
@click.option(
    "--may",
    type=click.Choice(["pull", "push", "gc"]),
    default="push",
    show_default=True,
    help="What the role is for. Each includes the ones before it.",
)
def grants(role: str, may: str) -> None:
    """Print SQL that gives ROLE its rights in the team's database.

    It asks no server: whoever owns the tables gives it to psql, and again after an upgrade. What else the role may do
    with the tables it may not any more. A role that may push adds rows; it changes none, and removes none.

    \b
    Examples:
      flashtune db team grants ada | psql -h host tuned
      flashtune db team grants dashboard --may pull
    """
    from flashtune.tuned_db.backends.postgres import rights

    click.echo(rights.grants(role, may), nl=False)


@team.command()
@team_option
def info(team: str | None) -> None:
    """Say what the team's database holds.

    \b
    Examples:
      flashtune db team info
      flashtune db team info --team postgresql://me@host/tuned
    """
    from flashtune.tuned_db.sharing.team import team_summary
    from flashtune.values import plain

    found = team_summary(_address(team))
    click.echo(f"address       {found.address} ({found.bytes / 1e6:.1f} MB, PostgreSQL {plain(found.server)})")
    click.echo(f"id            {plain(found.origin)}")
    click.echo(f"schema        {found.schema}")
    click.echo(f"measurements  {found.measurements} of {_counted(found.sessions, 'session')}")
    for each in found.shares:
        problems, cards = _counted(each.problems, "problem"), _counted(each.cards, "card")
        dates = f"{plain(each.first[:10])} to {plain(each.last[:10])}"
        click.echo(f"              {plain(each.gpu_name)}: {each.measurements} for {problems} on {cards}, {dates}")
    click.echo(f"predictions   {found.predictions}")


@team.command()
@team_option
def log(team: str | None) -> None:
    """List what was pushed to the team's database, oldest first.

    \b
    Examples:
      flashtune db team log
    """
    from flashtune.tuned_db.store.store import Store

    store = Store.on_server(_address(team), readonly=True)
    print_arrivals(store.arrivals(), store.arrived())


@team.command()
@collecting
@team_option
def gc(days: int, dry_run: bool, team: str | None) -> None:
    """Make the team's database small: remove times that nothing depends on.

    As flashtune db gc does with the local one, whose help says what goes. What is removed does not come back with a
    push; those who have it keep it. Its user needs the right to delete measurements.

    \b
    Examples:
      flashtune db team gc --older-than 90 --dry-run
    """
    from flashtune.tuned_db.store.store import Store
    from flashtune.tuned_db.upkeep.gc import collect

    found = collect(Store.on_server(_address(team), readonly=dry_run, timeout=PATIENCE), days=days, dry_run=dry_run)
    print_collected(found.removed, found.left, days, dry_run)


@team.command()
@forgetting
@team_option
def forget(
    arrival: int | None, session: str | None, source: str | None, copy: Path | None, dry_run: bool, team: str | None
) -> None:
    """Take out of the team's database what should not have been pushed.

    As flashtune db forget does with the local one, whose help says more. The copy goes to the working directory. What
    is removed does not come back with a push; those who have pulled it keep it until they forget it. Its user needs
    the right to delete measurements and device models.

    \b
    Examples:
      flashtune db team log
      flashtune db team forget --arrival 12 --dry-run
    """
    from flashtune.tuned_db.store.store import Store
    from flashtune.tuned_db.upkeep.forgetting import forget as run

    which = chosen(arrival, session, source)
    found = run(Store.on_server(_address(team), readonly=dry_run, timeout=PATIENCE), which, copy=copy, dry_run=dry_run)
    print_forgotten(found, which, dry_run, ", then flashtune db push --take-back")


def _address(given: str | None) -> str:
    return given if given is not None else settings.team_database()


def _report(added: Added) -> None:
    click.echo(added.summary)
    if added.refused.rows:
        click.echo(f"  passed over: {added.refused}", err=True)


def _ticker() -> Callable[[str], None]:
    """Says how far it is on stderr, but not so often that it fills the screen, and not at all in the first seconds."""
    last = time.monotonic()

    def tick(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PAUSE:
            last = time.monotonic()
            click.echo(text, err=True)

    return tick


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
