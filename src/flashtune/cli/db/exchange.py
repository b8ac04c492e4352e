"""`flashtune db`: what a tuning database holds, and how its rows travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.cli.common.options import STDIN, FileName, database_option, existing_database, new_database_option
from flashtune.cli.common.output import OutputError
from flashtune.files import is_stream, shown_path

from .compare import diff, digest, history
from .forget import forget, take_back_option
from .keep import backup, check, restore, upgrade
from .past import gc, log
from .team import pull, push, team

if TYPE_CHECKING:
    from flashtune.tuned_db.exchange.export_file import ExportHeader
    from flashtune.tuned_db.sharing.merge import Added
    from flashtune.tuned_db.store.store import Store

STDOUT = Path("/dev/stdout")
SHOWN = 20
"""Refused rows that are named one by one."""


@click.group(name="db")
def db() -> None:
    """Look into tuning databases, and share what they hold.

    \b
    Examples:
      flashtune db info                     what is in the tuning database here
      flashtune db export h100.jsonl        its measurements, as text that travels and diffs well
      flashtune db import h100.jsonl        what a colleague has exported
      flashtune db merge node7/tuned.db     another database, as it is
      flashtune db verify                   time some of its winners again, on the GPU here
      flashtune db check                    is it sound, and does it serve the GPU here
      flashtune db backup safe.db           a copy, also while others write
      flashtune db restore safe.db          put a backup in the place of one that is damaged or lost
      flashtune db gc                       make it small: without times that nothing depends on
      flashtune db log                      what came from elsewhere, and when
      flashtune db forget --arrival 3       take out again what should not have come
      flashtune db diff a.db b.jsonl        what differs, in rows and in winners
      flashtune db pull                     what the team has on its PostgreSQL server
      flashtune db push                     what was measured here, for the team
    """


for command in (backup, check, diff, digest, forget, gc, history, log, pull, push, restore, team, upgrade):
    db.add_command(command)


@db.command()
@database_option
def info(database: Path | None) -> None:
    """Say what the tuning database holds.

    \b
    Examples:
      flashtune db info
      flashtune db info --db team.db
    """
    from collections import Counter

    from flashtune.tuned_db.store.queries import count_unreadable

    with _existing(database) as store, count_unreadable() as unreadable:
        rows = store.measurements()
        predictions, removed, arrivals = len(store.predictions()), store.count_removed(), len(store.arrivals())
        click.echo(f"path          {shown_path(store.path)} ({store.path.stat().st_size / 1e6:.1f} MB)")
        click.echo(f"id            {store.origin}")
    sessions = len({row.session for row in rows})
    click.echo(f"measurements  {len(rows)} of {_counted(sessions, 'session')}")
    for key, count in sorted(Counter(row.gpu_key for row in rows).items()):
        own = [row for row in rows if row.gpu_key == key]
        problems = _counted(len({row.problem for row in own}), "problem")
        units = _counted(len({row.unit for row in own}), "card")
        dates = f"{own[0].created[:10]} to {own[-1].created[:10]}"
        click.echo(f"              {own[0].gpu_name}: {count} for {problems} on {units}, {dates}")
    click.echo(f"predictions   {predictions}")
    if removed:
        click.echo(f"removed       {removed} by gc or forget, which stay so")
    if arrivals:
        click.echo(f"arrivals      {arrivals}: flashtune db log lists what came from elsewhere")
    if unreadable.rows:
        click.echo(f"not readable  {unreadable}")


@db.command()
@click.argument("file", type=FileName(dash=STDOUT))
@click.option("--gpu", help="Only what was measured on this GPU, such as h100. [default: all]")
@click.option(
    "--sign",
    "key",
    type=FileName(exists=True),
    metavar="KEYFILE",
    help="Sign it with this private key (Ed25519, PEM): writes FILE.sig, and prints the public key.",
)
@database_option
def export(file: Path, gpu: str | None, key: Path | None, database: Path | None) -> None:
    """Write all measurements to FILE, one a line; - is standard output.

    The same rows give the same bytes, so that the file diffs well under version control. An export that is there is
    replaced, any other file is left alone. Predictions are not written. A name that ends in .gz gives the same text as
    gzip, a small part of the size; import and diff take either.

    \b
    Examples:
      flashtune db export tuned/h100.jsonl --gpu h100
      flashtune db export all.jsonl.gz --db team.db
      flashtune db export - | ssh node7 flashtune db import -
      openssl genpkey -algorithm ed25519 -out mine.pem
      flashtune db export h100.jsonl --sign mine.pem
    """
    from flashtune.codegen.gpu.table import gpu_by_alias
    from flashtune.tuned_db.sharing.merge import export_database
    from flashtune.tuned_db.store.queries import count_unreadable

    target = gpu_by_alias(gpu) if gpu is not None else None
    sign, public = _signing(file, key)
    with _existing(database) as store, count_unreadable() as passed, _output_named(file):
        count = export_database(store, file, gpu_key=target.key if target else None, sign=sign)
    if passed.rows:
        click.echo(f"{_counted(passed.rows, 'row')} passed over, which nobody could read: flashtune db check", err=True)
    of = f", all of {target}" if target else ""
    click.echo(f"{count} measurements written to {shown_path(file)}{of}", err=is_stream(file))
    if public:
        click.echo(f"Signed in {shown_path(file)}.sig by the key {public}")


@db.command(name="import")
@click.argument("files", nargs=-1, required=True, type=FileName(exists=True, dash=STDIN))
@click.option("--skip-invalid", is_flag=True, help="Pass over rows that this version can't take, and list the first.")
@click.option(
    "--trusted",
    type=FileName(exists=True),
    metavar="KEYS",
    help="A file of public keys that are trusted, each a line of 64 hexadecimal digits and a name.",
)
@click.option("--require-signature", is_flag=True, help="Refuse files that no trusted key has signed.")
@take_back_option
@new_database_option
def import_(
    files: tuple[Path, ...],
    skip_invalid: bool,
    take_back: bool,
    trusted: Path | None,
    require_signature: bool,
    database: Path | None,
) -> None:
    """Add the measurements of exports to the tuning database; - is standard input.

    All rows of a file are added, or none. What is there already stays as it is, so that a file may be imported again,
    and the order of files makes no difference. Files are data: known names, listed words and numbers in range.

    A file that has a signature beside it, FILE.sig, must be what was signed, whoever signed it. One without, or by a
    key that is not trusted, is taken with a notice, unless a trusted signature is required.

    \b
    Examples:
      flashtune db import h100.jsonl
      flashtune db import tuned/*.jsonl --db team.db
      flashtune db import h100.jsonl --trusted team.keys --require-signature
    """
    from flashtune.tuned_db.exchange.signing import check_signature, read_trusted
    from flashtune.tuned_db.sharing.merge import add_file

    if require_signature and trusted is None:
        raise click.UsageError("--require-signature needs --trusted: a file of the keys that may sign")
    keys = read_trusted(trusted) if trusted is not None else {}

    def add(store: Store, path: Path) -> Added:
        def check(header: ExportHeader) -> str:
            found = check_signature(path, header, keys, required=require_signature)
            click.echo(f"{shown_path(path)}: {found.sentence}", err=True)
            return found.signer

        return add_file(store, path, skip_invalid=skip_invalid, take_back=take_back, check=check)

    _add(files, database, add)


@db.command()
@click.argument("databases", nargs=-1, required=True, type=FileName(exists=True))
@take_back_option
@new_database_option
def merge(databases: tuple[Path, ...], take_back: bool, database: Path | None) -> None:
    """Add the measurements of other tuning databases.

    They are only read. Winners are derived from all measurements, so nothing has to be reconciled: merging again, or
    in another order, comes to the same. Predictions are not merged.

    \b
    Examples:
      flashtune db merge /mnt/node7/tuned.db
      flashtune db merge node*/tuned.db --db team.db
    """
    from flashtune.tuned_db.sharing.merge import add_database

    _add(databases, database, lambda store, path: add_database(store, path, take_back=take_back))


def _signing(file: Path, key: Path | None) -> tuple[Callable[[ExportHeader], object], str]:
    """What signs the export at ``file``, and its public key; before anything is written, whether it can."""
    from flashtune.errors import InvalidInput
    from flashtune.tuned_db.exchange.signing import Signer, read_signature, signature_path

    if is_stream(file):
        if key is not None:
            raise InvalidInput(f"--sign writes its signature beside a file, and {shown_path(file)} is none")
        return lambda header: None, ""
    there = read_signature(file)
    if key is not None:
        signer = Signer.read(key)
        return lambda header: signer.write(file, header), signer.public
    if there is not None:
        path = shown_path(signature_path(file))
        raise InvalidInput(f"{path} signs the export that is there: give --sign, remove it, or choose another name")
    return lambda header: None, ""


@contextmanager
def _output_named(file: Path) -> Iterator[None]:
    """A reader of standard output that has seen enough is no trouble with a file."""
    try:
        yield
    except BrokenPipeError as error:
        if file != STDOUT:
            raise
        raise OutputError(error.errno, error.strerror, "standard output") from error


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _existing(database: Path | None) -> Store:
    from flashtune.tuned_db.store.store import Store

    return Store.open(existing_database(database), create=False, readonly=True)


def _add(sources: tuple[Path, ...], database: Path | None, add: Callable[[Store, Path], Added]) -> None:
    from flashtune import settings
    from flashtune.tuned_db.store.store import Store

    with Store.open(database or settings.database_path()) as store:
        for path in sources:
            click.echo(f"{shown_path(path)}: reading and checking each row", err=True)
            added = add(store, path)
            click.echo(f"{shown_path(path)}: {added.summary}")
            reasons = added.refused.reasons[:SHOWN]
            for reason in reasons:
                click.echo(f"  passed over: {reason}", err=True)
            if added.refused.rows > len(reasons):
                click.echo(f"  and {added.refused.rows - len(reasons)} more", err=True)
    click.echo(f"Stored in {shown_path(store.path)}")
