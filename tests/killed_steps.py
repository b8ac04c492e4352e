"""Steps that are to be killed, each in a fork of one process that has all imported, so that a start is quick.

Run as a script with a folder. For each line on its input, the name of a step, it starts the step and tells its number;
after another line, when nobody will kill that number any more, it tells how the step ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import flashtune.tuned_db.backends.sqlite.upgrade  # noqa: F401
from flashtune.codegen.families.registry import families
from flashtune.tuned_db.sharing.merge import add_database, add_file
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep import forgetting
from flashtune.tuned_db.upkeep.gc import collect


def merge(folder: Path) -> None:
    with Store.open(folder / "own.db") as store:
        add_database(store, folder / "other.db")


def import_(folder: Path) -> None:
    with Store.open(folder / "own.db") as store:
        add_file(store, folder / "other.jsonl")


def upgrade(folder: Path) -> None:
    Store.open(folder / "own.db")


def push(folder: Path) -> None:
    team = Store.on_server((folder / "team.url").read_text("utf-8"))
    carry(Store.open(folder / "other.db", readonly=True), team)


def gc(folder: Path) -> None:
    with Store.open(folder / "own.db") as store:
        collect(store, days=0)


def forget(folder: Path) -> None:
    session = (folder / "session").read_text("utf-8")
    with Store.open(folder / "own.db") as store:
        forgetting.forget(store, forgetting.Which(session=session))


STEPS: dict[str, Callable[[Path], None]] = {
    "merge": merge,
    "import": import_,
    "upgrade": upgrade,
    "gc": gc,
    "forget": forget,
    "push": push,
}


def main(folder: Path) -> None:
    import alembic.command  # noqa: F401

    families()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            STEPS[line.strip()](folder)
            os._exit(0)
        print(pid, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
