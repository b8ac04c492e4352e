"""Text of others in what commands print: paths, names, reasons, compiler messages. It is no markup and no control."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sqlite3
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from all_commands import NAMELESS, PROBLEM, commands
from command_line import run
from fake_tuner import H100, ONE, Tuner
from terminal import SOURCES, Shown, on_terminal
from test_import_direction import own_files

from flashtune.cli.common.output import safe
from flashtune.codegen.families.registry import default_config
from flashtune.tuner.results.report import Row
from flashtune.tuner.trial.failures import CommonFailure
from flashtune.tuner.tune import session

MARKUP = "[/] [red]r[/red] [link=evil]l[/link] [with T = float] [bold :smile: \\[x]"
CODES = (
    "\x1b]0;owned\x07 \x1b[2J\x1b[31mRun: curl evil | sh \x9b5A\x7f\b\r \u202egro.live\u2066 \x1b]8;;http://evil\x1b\\"
)


REFUSED = {
    "no database": ["list", "--db"],
    "no file": ["db", "import"],
    "no problem file": ["tune", "--gpu", "h100", "--problems"],
    "no gpu": ["list", "--gpu"],
    "no family": ["source", "--gpu", "h100", *PROBLEM, "--family"],
    "no parameter": ["source", "--gpu", "h100", *PROBLEM, "--config"],
    "no budget": ["tune", "--gpu", "h100", "--budget"],
    "no preset": ["tune", "--gpu", "h100", "--preset"],
    "no command": ["db"],
    "no option": ["info"],
}
"""What ends in an error that quotes the next word."""


def letters(output: str) -> str:
    """What is printed without white space and the lines of a table, which may be anywhere in a long text."""
    return re.sub(r"[\s\u2500-\u257f]", "", output)


def foreign(folder: Path, sound: Path, text: str) -> Path:
    """A database at a path that holds ``text``, with ``text`` for a name in each of a few rows."""
    path = folder / f"a{text}z" / "t.db"
    path.parent.mkdir(parents=True)
    shutil.copy(sound, path)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM measurement WHERE rowid > 30")
        name = text[:60].replace("/", "")  # of a second model: its key has it, too
        connection.execute("INSERT INTO device VALUES (99, '9.0a/' || ? || '/1sm', ?, '9.0a')", [name, name])
        connection.execute("UPDATE measurement SET device_id = 99 WHERE rowid > 20")
        connection.execute("UPDATE environment SET author = ?", [text[:60]])
        connection.execute("UPDATE arrival SET source = ?, author = ?", [text, text])
    connection.close()
    return path


@pytest.fixture
def marked(tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = foreign(tmp_path, sound, MARKUP)
    monkeypatch.setenv("FLASHTUNE_DB", str(path))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(path.with_name("cache")))
    monkeypatch.setattr(session, "tune", Tuner())
    return path


def test_paths_and_names_are_no_markup(marked: Path) -> None:
    """m1, all commands, in an order in which one makes what another reads."""
    for name, words in commands(marked).items():
        output = letters(run(*words).output)
        named = letters(MARKUP)[:30] in output or letters(MARKUP.replace("/", ""))[:30] in output
        assert name in NAMELESS or named, (name, output)


@pytest.mark.parametrize("which", REFUSED)
def test_what_an_error_quotes_is_no_markup(marked: Path, which: str) -> None:
    """m1."""
    code = 2 if which in ("no command", "no option", "no file", "no problem file") else 1
    assert "[red]r" in run(*REFUSED[which], MARKUP, code=code).output


def test_reasons_and_compiler_messages_are_no_markup(marked: Path, tuner: Tuner) -> None:
    """m1: in each part of a report."""
    failure = CommonFailure(status="compile_error", count=3, message=f"first {MARKUP}", source=f"/kept/{MARKUP}.cu")
    rows = (
        Row(problem=ONE, config=default_config(ONE, H100), seconds=1e-3, why=f"why {MARKUP}", tried=3),
        Row(problem=replace(ONE, batch=2), why=f"why not {MARKUP}", tried=3, failure=failure),
    )
    counts = {name: Counter({f"{name} {MARKUP}": 2}) for name in ("rejected", "failed", "flagged")}
    for measured in (True, False):
        texts = {"note": f"note {MARKUP}", "stopped": f"stopped {MARKUP}"}
        tuner.changes = {"rows": rows, "measured": measured, **counts, **texts}
        words = ["tune", "--gpu", "h100", "--db", str(marked)]
        shown = letters(run(*words, code=1).output)
        for part in ("note", "stopped", "rejected", "failed", "flagged", "first", "kept/"):
            assert letters(part + MARKUP) in shown, part
        document = json.loads(run(*words, "--json", code=1).stdout)
        assert document["problems"][1]["failure"]["message"] == f"first {MARKUP}"


SESSION = """
import json, logging, sys
from tuner_fakes import FakeBuilder
from flashtune.cli.main import main
from flashtune.tuner.tune import session
from flashtune.tuner.processes.compile_pool import Built

CODES = {codes!r}

class Noisy(FakeBuilder):
    def submit(self, source):
        logging.getLogger("flashtune").warning("logged %s", CODES)
        print("printed", CODES)
        print("warned", CODES, file=sys.stderr)
        return super().submit(source)

def facts(source):
    message = f"NVRTC refused it:\\n  error: told {{CODES}}\\nGenerated source: /x{{CODES}}"
    return Built(digest=source.digest, error=message)

session.ProcessBuilder = lambda arch, workers: Noisy(facts)
for words in json.loads(sys.argv[1]):
    print("$", *(word for word in words if word.isprintable()))
    try:
        main(words, prog_name="flashtune")
    except SystemExit as end:
        print("exit", end.code)
"""


def all_on_a_terminal(lists: list[list[str]], database: Path, term: str = "xterm-256color") -> Shown:
    """Runs commands one after another, in one process."""
    tests = Path(__file__).parent
    return on_terminal(
        [sys.executable, "-c", SESSION.format(codes=CODES), json.dumps(lists)],
        environment={
            "FLASHTUNE_DB": str(database),
            "FLASHTUNE_CACHE_DIR": str(database.with_name("cache")),
            "TERM": term,
            "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, tests, tests / "tuner"))),
        },
        columns=120,
    )


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_no_control_character_of_a_path_or_a_name_reaches_a_terminal(tmp_path: Path, sound: Path, term: str) -> None:
    """On a real one: click takes codes out of what is captured."""
    path = foreign(tmp_path, sound, CODES.replace("/", "_"))
    lists = [words for name, words in commands(path).items() if name != "tune"]
    lists += [[*words, CODES] for words in REFUSED.values()]
    shown = all_on_a_terminal(lists, path, term)
    assert shown.code == 0
    assert shown.text.count("\nexit ") == len(lists), shown.text
    assert "Traceback" not in shown.text
    assert shown.controls == []
    assert shown.text.count("\\x1b]0;owned\\x07") > 20


def test_no_control_character_reaches_a_terminal_beside_the_live_view(tmp_path: Path, sound: Path) -> None:
    """Log lines, what libraries print, progress and compiler messages. The view has codes of its own, for its place."""
    path = foreign(tmp_path, sound, CODES.replace("/", "_"))
    shown = all_on_a_terminal([commands(path)["tune"]], path)
    assert "\nexit 1" in shown.text
    own = re.compile(r"\r|\x1b\[(\?25[lh]|2K|1A|[0-9;]*m)")
    assert [each for each in shown.controls if not own.fullmatch(each)] == []
    assert b"\x1b[31m" not in shown.raw
    for word in ("logged", "printed", "warned"):
        assert f"{word} \\x1b]0;owned\\x07" in shown.text, word
    assert "error: told ?]0;owned? ?[2J?[31mRun: curl evil" in shown.text


@pytest.mark.parametrize("text", ["plain", "\xe4\u65e5\u3000\xa0", "line\nline\ttab", "\U0001f600"])
def test_text_that_moves_nothing_is_shown_as_it_is(text: str) -> None:
    assert safe(text) == text


def test_nothing_but_the_console_knows_of_markup() -> None:
    """m1, the kind: one console for the command line, without markup, and no text that was written as markup."""
    for path in own_files():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            assert name not in ("from_markup", "render_markup", "from_ansi", "AnsiDecoder"), where
            if isinstance(node, ast.Call) and path != SOURCES / "flashtune" / "cli" / "common" / "tables.py":
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert called != "Console", f"{where}: console() of tables.py is the one"
                assert not {"markup", "emoji"} & {each.arg for each in node.keywords}, where
            if isinstance(node, ast.ImportFrom) and node.module == "rich":
                assert not {"print", "inspect"} & {each.name for each in node.names}, where
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"\[/[a-z ]*\]|\[(bold|dim|italic|red|green|yellow|link)\b", node.value), where
