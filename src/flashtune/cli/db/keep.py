"""`flashtune db check|backup|restore|upgrade`: keeping a tuning database."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.cli.common.options import FileName, database_option, existing_database, new_database_option
from flashtune.files import shown_path

from .forget import way_out

if TYPE_CHECKING:
    from flashtune.codegen.gpu.gpu import Gpu
    from flashtune.tuned_db.upkeep.health import Content, FileHealth, Service

SHOWN = 20
"""Rows that can't be read, or are doubtful, that are named one by one."""
WAYS = 5
"""Commands to take rows out that are named."""


@click.command()
@click.option("--gpu", "gpu_name", help="Say what serves this GPU, such as h100. [default: the first here, if any]")
@database_option
def check(gpu_name: str | None, database: Path | None) -> None:
    """Say whether the tuning database is sound, and what it is good for.

    Reads all of it and changes nothing. The exit code is 1 if the file is damaged, else 0: rows that this version can't
    read, or whose kernels have changed since, are no damage and stay as history.

    \b
    Examples:
      flashtune db check
      flashtune db check --db team.db --gpu h100     does anything in it serve an H100?
    """
    from flashtune.codegen.gpu.table import gpu_by_alias
    from flashtune.tuned_db.store.store import Store
    from flashtune.tuned_db.upkeep.health import inspect_file, inspect_rows, serves

    gpu = gpu_by_alias(gpu_name) if gpu_name is not None else _first_gpu()
    path = existing_database(database)
    click.echo(f"{shown_path(path)}: reading every page and rendering every config", err=True)
    health = inspect_file(path)
    _print_file(path, health)
    if health.faults:
        click.echo("Its rows were not judged. Import an export of it anew, or put a backup in its place:")
        click.echo(f"flashtune db restore BACKUP --db {shlex.quote(shown_path(path))}")
        raise click.exceptions.Exit(1)
    with Store.open(path, create=False, readonly=True) as store:
        content = inspect_rows(store)
        _print_rows(content)
        _print_doubts(content, path)
        if gpu is None:
            click.echo("serves        no GPU is here; name one with --gpu")
        else:
            _print_service(serves(store, gpu))


@click.command()
@click.argument("file", type=FileName())
@database_option
def backup(file: Path, database: Path | None) -> None:
    """Copy the tuning database to the new file FILE.

    Also while others write: the copy is the database of one moment, has no side files, and is there under its name only
    when it is whole, checked and on the disk. A file that exists is never replaced. Use it as any database, with --db.

    \b
    Examples:
      flashtune db backup tuned-2026-11-30.db
      flashtune db backup /mnt/safe/team.db --db team.db
    """
    from flashtune.tuned_db.upkeep.health import back_up

    path = existing_database(database)
    click.echo(f"{shown_path(path)}: copying {_megabytes(path)}", err=True)
    back_up(path, file)
    click.echo(f"Copied to {shown_path(file)} ({_megabytes(file)})")


@click.command()
@database_option
def upgrade(database: Path | None) -> None:
    """Bring a tuning database of an older flashtune to the schema of this one.

    A copy of it as it was is kept beside it first, as NAME.schema-N.backup. Whatever opens an older database to write,
    such as flashtune tune, does the same by itself; an upgraded one can't be read by the older flashtune any more.

    \b
    Examples:
      flashtune db upgrade
      flashtune db upgrade --db team.db
    """
    from flashtune.tuned_db.schema.version import SCHEMA_VERSION
    from flashtune.tuned_db.upkeep.health import upgrade_file

    path = existing_database(database)
    click.echo(f"{shown_path(path)}: copying and upgrading what is older ({_megabytes(path)})", err=True)
    done = upgrade_file(path)
    if done is None:
        newest = f"schema version {SCHEMA_VERSION}, the newest that this flashtune knows"
        click.echo(f"Nothing to do: {shown_path(path)} has {newest}")
        return
    click.echo(f"Upgraded {shown_path(path)} from schema version {done.old} to {done.new}")
    click.echo(f"As it was: {shown_path(done.backup)}")


@click.command()
@click.argument("backup", type=FileName(exists=True))
@new_database_option
def restore(backup: Path, database: Path | None) -> None:
    """Put a copy of BACKUP in the place of a tuning database that is damaged or lost.

    BACKUP is any tuning database: of flashtune db backup, or what an upgrade has kept. It is checked first, and stays.
    What is there, and what SQLite keeps beside it, gets another name, NAME.replaced-1; nothing is deleted. An older
    schema is upgraded when the database is next written.

    \b
    Examples:
      flashtune db restore tuned-2026-11-30.db
      flashtune db restore /mnt/safe/team.db --db team.db
    """
    from flashtune import settings
    from flashtune.tuned_db.upkeep.restoring import restore as run

    path = database or settings.database_path()
    click.echo(f"{shown_path(backup)}: checking and copying {_megabytes(backup)}", err=True)
    done = run(backup, path)
    click.echo(f"Restored {shown_path(done.path)}: {done.measurements} measurements")
    for each in done.aside:
        click.echo(f"What was there is {shown_path(each)}")


def _first_gpu() -> Gpu | None:
    from flashtune.codegen.gpu.devices import visible_gpus

    return next(iter(visible_gpus()), None)


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def _print_file(path: Path, health: FileHealth) -> None:
    from flashtune.tuned_db.schema.version import SCHEMA_VERSION
    from flashtune.values import printable

    older = "" if health.schema == SCHEMA_VERSION else f", older than {SCHEMA_VERSION}: flashtune db upgrade"
    shared = (
        "yes: SQLite's locks are unreliable there, write into a local file and merge it" if health.network else "no"
    )
    click.echo(f"path          {shown_path(path)} ({_megabytes(path)})")
    click.echo(f"schema        {health.schema}{older}")
    click.echo(f"journal       {health.journal}")
    click.echo(f"network mount {shared}")
    click.echo(f"file          {'damaged' if health.faults else 'sound'}")
    for fault in health.faults:
        for line in fault.splitlines():
            click.echo(f"              {printable(line)}")
    for left in health.leftovers:
        click.echo(f"left over     {shown_path(left)}, of a run that was killed; it may be deleted")


def _print_rows(content: Content) -> None:
    from flashtune.values import printable

    click.echo(f"measurements  {content.measurements}")
    for each in content.sources.values():
        parts = [f"{each.current} with today's source"]
        parts += [f"{each.older} with an older source, kept as history"] if each.older else []
        parts += [f"{each.refused} of configs that are refused today, kept as history"] if each.refused else []
        parts += [f"{each.none} without a source (nothing was rendered)"] if each.none else []
        click.echo(f"              {each.gpu_name}: {each.rows}: {', '.join(parts)}")
    unreadable = content.unreadable
    click.echo(f"not readable  {unreadable if unreadable.rows else 'none'}")
    for reason in unreadable.reasons[:SHOWN]:
        click.echo(f"              {printable(reason)}")
    if unreadable.rows > SHOWN:
        click.echo(f"              and {unreadable.rows - SHOWN} more")


def _print_doubts(content: Content, path: Path) -> None:
    """How many for each reason, the first of them by name, and what to do."""
    from collections import Counter

    from flashtune.tuned_db.upkeep.doubts import CONTRADICTED
    from flashtune.values import plain, printable

    if not content.doubts:
        click.echo("doubtful      none")
        return
    for place, (reason, count) in enumerate(Counter(each.reason for each in content.doubts).items()):
        click.echo(f"{'' if place else 'doubtful':13} {count} {reason}")
    for each in content.doubts[:SHOWN]:
        number = content.arrivals.get(each.row.id)
        came = "measured into this database" if number is None else f"arrival {plain(number)}"
        click.echo(f"              {each.row.id}, session {each.row.session}, {came}: {printable(each.why)}")
    if len(content.doubts) > SHOWN:
        click.echo(f"              and {len(content.doubts) - SHOWN} more")
    where = f"--db {shlex.quote(shown_path(path))}"
    if any(each.reason == CONTRADICTED for each in content.doubts):
        click.echo(f"              on such a GPU: flashtune db verify --failures {where} tries what is said to fail")
    ways = Counter(way_out(each.row, content.arrivals) for each in content.doubts)
    for way, count in ways.most_common(WAYS):
        click.echo(f"              to take out {count} of them: flashtune db forget {way} {where} --dry-run")


def _print_service(service: Service) -> None:
    if service.levels:
        parts = ", ".join(f"{count} {level.replace('_', ' ')}" for level, count in service.levels.items())
        click.echo(f"serves        {service.gpu}: {service.levels.total()} problems ({parts})")
        return
    click.echo(f"serves        nothing for {service.gpu}: {service.why}")
    click.echo(f"              measure on it: flashtune tune --gpu {service.gpu}")
