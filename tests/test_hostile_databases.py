"""Databases that somebody made to do harm, each by all commands and by the look-up of `attention()`.

No command hangs, takes much memory, writes anything but what it was asked to, ends in a traceback or moves a cursor.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hostile_files  # noqa: F401
import hostile_rows  # noqa: F401
import pytest
from hostile_databases import MADE, Hostile
from turns import by_turns
from warm import Ended, Warm

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

SEED = 20261201
SECONDS, MEGABYTES = 2.0, 200.0
"""Most that a command may take: of a core, and beyond what it has imported."""
LONGEST = 200_000
"""Bytes that it may print."""
PROBLEM = ("--gpu", "h200", "--seqlen", "1024", "--heads", "16", "--head-dim", "128")
READERS: dict[str, tuple[str, ...]] = {
    "look-up": ("@look_up", "{db}"),
    "list": ("list", "--db", "{db}"),
    "explain": ("explain", *PROBLEM, "--db", "{db}"),
    "explain --json": ("explain", *PROBLEM, "--json", "--db", "{db}"),
    "source": ("source", *PROBLEM, "--db", "{db}"),
    "info": ("db", "info", "--db", "{db}"),
    "check": ("db", "check", "--gpu", "h200", "--db", "{db}"),
    "diff": ("db", "diff", "{db}", "{sound}"),
    "history": ("db", "history", *PROBLEM, "--db", "{db}"),
    "digest": ("db", "digest", "--gpu", "h200", "--db", "{db}"),
    "log": ("db", "log", "--db", "{db}"),
    "backup": ("db", "backup", "{out}/copy.db", "--db", "{db}"),
    "export": ("db", "export", "{out}/rows.jsonl", "--db", "{db}"),
    "export-optuna": ("export-optuna", "{out}/studies.db", "--db", "{db}"),
    "gc --dry-run": ("db", "gc", "--older-than", "0", "--dry-run", "--db", "{db}"),
    "merge": ("db", "merge", "{db}", "--db", "{own}"),
    "restore": ("db", "restore", "{db}", "--db", "{own}"),
    "forget --dry-run": ("db", "forget", "--arrival", "1", "--dry-run", "--db", "{db}"),
}
WRITERS: dict[str, tuple[str, ...]] = {
    "record": ("@record", "{db}"),
    "import": ("db", "import", "{export}", "--db", "{db}"),
    "merge into": ("db", "merge", "{sound}", "--db", "{db}"),
    "gc": ("db", "gc", "--older-than", "0", "--db", "{db}"),
    "forget": ("db", "forget", "--arrival", "1", "--copy", "{out}/gone.jsonl", "--db", "{db}"),
    "restore into": ("db", "restore", "{sound}", "--db", "{db}"),
    "upgrade": ("db", "upgrade", "--db", "{db}"),
}


class Place:
    """Folders of one database: what it is, what it might harm, what commands may write."""

    def __init__(self, folder: Path, sound: Path) -> None:
        self.folder = folder
        self.sound = sound
        for name in ("case", "victims", "out"):
            (folder / name).mkdir(parents=True)
        self.path = folder / "case" / "tuned.db"
        (folder / "victims" / "thesis.tex").write_text("years of work")
        self.names = {
            "db": str(self.path),
            "sound": str(sound),
            "export": str(sound.with_name("rows.jsonl")),
            "own": str(folder / "out" / "own.db"),
            "out": str(folder / "out"),
        }

    def make(self, hostile: Hostile) -> None:
        shutil.rmtree(self.path.parent)
        self.path.parent.mkdir()
        shutil.copy(self.sound, self.path)
        hostile.make(self.path, random.Random(SEED ^ zlib.crc32(hostile.name.encode())))

    def words(self, template: tuple[str, ...]) -> list[str]:
        shutil.rmtree(self.folder / "out")
        (self.folder / "out").mkdir()
        return [each.format(**self.names) for each in template]

    def victims(self) -> dict[str, str]:
        return states(self.folder / "victims") | states(self.sound.parent)


def states(folder: Path) -> dict[str, str]:
    """What each file is, without opening what is none or reading terabytes."""
    found = {}
    for each in sorted(folder.rglob("*")):
        facts = each.lstat()
        content = b""
        if each.is_symlink():
            content = os.fsencode(os.readlink(each))
        elif each.is_file() and facts.st_size < 2**30:
            content = each.read_bytes()
        found[str(each)] = f"{facts.st_mode} {facts.st_size} {facts.st_mtime_ns} {hashlib.sha256(content).hexdigest()}"
    return found


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound database without a log, and an export of it."""
    import hostile_steps

    from flashtune.tuned_db.sharing.merge import export_database
    from flashtune.tuned_db.store.store import Store

    path = tmp_path_factory.mktemp("sound") / "sound.db"
    hostile_steps.make(str(path))
    with Store.open(path, readonly=True) as store:
        export_database(store, path.with_name("rows.jsonl"))
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("PRAGMA journal_mode = DELETE")
    return path


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, sound: Path) -> Iterator[Warm]:
    folder = tmp_path_factory.mktemp("warm")
    own = {"HOME": str(folder), "FLASHTUNE_DB": str(folder / "none.db"), "FLASHTUNE_CACHE_DIR": str(folder / "cache")}
    process = Warm(Path(__file__).with_name("hostile_steps.py"), folder, own)
    place = Place(folder / "first", sound)
    for template in (READERS | WRITERS).values():
        shutil.copy(sound, place.path)
        process.warm(*place.words(template))
    yield process
    process.close()


def faults(ended: Ended) -> list[str]:
    """What a command must not do."""
    text = ended.shown.text
    found = []
    if ended.shown.code not in (0, 1, 2):
        found.append(f"exit code {ended.shown.code}: {text[-2000:]}")
    if "Traceback" in text or text.count("Error: ") > 1:
        found.append(f"no one line: {text[-2000:]}")
    if ended.shown.controls:
        found.append(f"controls {ended.shown.controls[:5]}")
    if not all(each.isprintable() or each == "\n" for each in text):
        found.append(f"what can't be printed: {sorted({each for each in text if not each.isprintable()})}")
    if len(text) > LONGEST:
        found.append(f"{len(text)} characters")
    if ended.seconds > SECONDS:
        found.append(f"{ended.seconds:.1f} s")
    if ended.megabytes > MEGABYTES:
        found.append(f"{ended.megabytes:.0f} MB")
    return found


def test_there_are_enough_of_them() -> None:
    assert len(MADE) >= 60
    assert len({each.kind for each in MADE.values()}) >= 20


def test_a_sound_database_passes_all_of_it(sound: Path, warm: Warm, tmp_path: Path) -> None:
    """Else a refusal of everything would pass, too."""
    place = Place(tmp_path, sound)
    place.make(Hostile("", lambda path, draw: None))
    before = states(place.path.parent)
    for name, template in READERS.items():
        ended = warm.run(*place.words(template), folder=place.path.parent)
        assert faults(ended) == []
        assert ended.shown.code == 0, name
        assert states(place.path.parent) == before, name
    levels = warm.run(*place.words(READERS["look-up"]), folder=place.path.parent).shown.text.split()
    assert levels[:3] == ["exact", "exact", "neighbour"]
    for name, template in WRITERS.items():
        place.make(Hostile("", lambda path, draw: None))
        ended = warm.run(*place.words(template), folder=place.path.parent)
        assert faults(ended) == []
        assert ended.shown.code == 0, name


@pytest.mark.parametrize("hostile", by_turns(MADE.values(), 4, lambda each: each.kind, lambda each: each.name))
def test_it_does_no_harm(hostile: Hostile, sound: Path, warm: Warm, tmp_path: Path) -> None:
    """C1, M1, F4, M2, F5, M3, M4 and m8, and whatever else a file can hold."""
    place = Place(tmp_path, sound)
    place.make(hostile)
    victims, before = place.victims(), states(place.path.parent)
    found: dict[str, list[str]] = {}
    codes: Counter[int] = Counter()
    for name, template in READERS.items():
        ended = warm.run(*place.words(template), folder=place.path.parent)
        codes[ended.shown.code] += 1
        found[name] = faults(ended)
        if states(place.path.parent) != before:
            found[name].append("the database was changed")
            place.make(hostile)
            before = states(place.path.parent)
        if place.victims() != victims:
            found[name].append("a file of somebody else was changed")
    assert codes[0] >= 1, "attention() never fails for want of tuning data"
    for name, template in WRITERS.items():
        place.make(hostile)
        ended = warm.run(*place.words(template), folder=place.path.parent)
        found[name] = faults(ended)
        if place.victims() != victims:
            found[name].append("a file of somebody else was changed")
    assert {name: each for name, each in found.items() if each} == {}
