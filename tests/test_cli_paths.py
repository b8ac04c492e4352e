"""Paths in what commands print: whatever bytes a name has, they end in a report, and it is one word of a line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from all_commands import NAMELESS, PROBLEM, commands
from command_line import run
from fake_tuner import Tuner

from flashtune.cli.common import tables
from flashtune.files import shown_path
from flashtune.tuner.tune import session

NAME = os.fsdecode(b"caf\xe9\nError: \x1b[31m\xe2\x80\xae")
"""A name in Latin-1, in two lines, with a colour, that turns the direction of text."""


def placed(folder: Path, sound: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database in a folder of that name, beside all that is named after it."""
    path = folder / name / f"{name}.db"
    path.parent.mkdir()
    shutil.copy(sound, path)
    monkeypatch.setenv("FLASHTUNE_DB", str(path))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(path.with_name("cache")))
    monkeypatch.setenv("FLASHTUNE_CAPTURE", str(path.with_name("captured")))
    monkeypatch.setattr(session, "tune", Tuner())
    return path


def lines(output: str) -> int:
    """How many that are not of a table, where what is long has several."""
    return sum(not any("\u2500" <= each <= "\u257f" for each in line) for line in output.splitlines())


def test_any_name_is_one_word_of_a_line(tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """m2: `db merge`, `info` and `backup` ended in a UnicodeEncodeError after the work was done."""
    monkeypatch.setattr(tables, "PLAIN_WIDTH", 1000)  # no line ends for want of room, wherever temporary files are
    plain, odd = (placed(tmp_path, sound, name, monkeypatch) for name in ("plain" * 8, NAME))
    wanted = {name: run(*words).output for name, words in commands(plain).items()}
    for name, words in commands(odd).items():
        output = run(*words).output
        assert all(line.isprintable() for line in output.splitlines()), (name, output)
        assert lines(output) == lines(wanted[name]), (name, output)
        if name not in (*NAMELESS, "info", "list", "db log"):
            assert shown_path(NAME) in output, (name, output)


REFUSED = {
    "no database to merge": (["db", "merge", "FILE"], 1),
    "no place for a copy": (["db", "backup", "FILE"], 1),
    "no folder for a copy": (["db", "backup", "FOLDER/NAME/x.db"], 1),
    "another program's": (["list", "--db", "FILE"], 1),
    "a pipe for a database": (["list", "--db", "PIPE"], 1),
    "no database": (["list", "--db", "NAME"], 1),
    "no database to back up": (["db", "backup", "new", "--db", "NAME"], 1),
    "no export": (["db", "import", "FILE"], 1),
    "no file": (["db", "import", "NAME"], 2),
    "no file to compare": (["db", "diff", "NAME", "NAME"], 2),
    "nothing to compare": (["db", "diff", "FILE", "FILE"], 2),
    "no place for an export": (["db", "export", "FILE"], 1),
    "no folder for an export": (["db", "export", "FOLDER/NAME/x.jsonl"], 1),
    "no place for studies": (["export-optuna", "FILE"], 1),
    "no folder for studies": (["export-optuna", "FOLDER/NAME/x.db"], 1),
    "no key": (["db", "export", "x.jsonl", "--sign", "FILE"], 1),
    "no list of keys": (["db", "import", "FILE", "--trusted", "FILE"], 1),
    "no problems": (["tune", "--gpu", "h100", "--problems", "FILE"], 1),
    "a pipe of problems": (["tune", "--gpu", "h100", "--problems", "PIPE"], 1),
    "nothing captured": (["tune", "--gpu", "h100", "--captured"], 1),
    "a folder for a database": (["db", "check", "--db", "FOLDER"], 2),
}


@pytest.mark.parametrize("which", REFUSED)
def test_an_error_is_one_line_whatever_name_it_has(
    tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """m2."""
    if "key" in which:
        pytest.importorskip("cryptography", reason="needs the extra sign")
    folder = placed(tmp_path, sound, NAME, monkeypatch).parent
    monkeypatch.chdir(folder)
    (folder / f"{NAME}.txt").write_text("text")
    os.mkfifo(folder / f"{NAME}.pipe")
    places = {"FILE": f"{NAME}.txt", "PIPE": f"{NAME}.pipe", "FOLDER": str(folder), "NAME": NAME}
    words, code = REFUSED[which]
    given = [
        each
        if not any(place in each for place in places)
        else "/".join(places.get(part, part) for part in each.split("/"))
        for each in words
    ]
    shown = run(*given, code=code).stderr.splitlines()
    error = next(place for place, line in enumerate(shown) if line.startswith("Error: "))
    assert len(shown) == error + 1, shown
    assert all(line.isprintable() for line in shown)


@pytest.mark.parametrize(
    "words", [["explain", "--gpu", "h100", *PROBLEM], ["list"], ["tune", "--gpu", "h100", *PROBLEM]]
)
def test_an_empty_database_path_is_named_as_one(words: list[str]) -> None:
    """m2."""
    assert "Invalid value for '--db': must be a path of a file system" in run(*words, "--db", "", code=2).output
