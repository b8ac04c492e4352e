"""What documents say of the tree is so: paths lead to files, and the map has every room."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
from test_import_direction import PARTS, ROOMS, TESTS, name, own_files

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TOPS = (*PARTS, "call", "cli", "tests", "benchmarks", "docs", "src", ".ci", "examples")
_PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, TOPS))})/[\w./-]*)`")


def leads_somewhere(path: str) -> bool:
    return any((top / path).exists() for top in (ROOT, ROOT / "src" / "flashtune"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_lead_to_files(document: Path) -> None:
    if document.name == "CHANGELOG.md":  # it speaks of what was
        return
    found = _PATH.findall(document.read_text("utf-8"))
    assert [each for each in found if not leads_somewhere(each)] == []


def test_there_are_paths_to_look_at() -> None:
    assert len(_PATH.findall((ROOT / "docs" / "architecture.md").read_text("utf-8"))) > 60
    assert not leads_somewhere("codegen/plan.py")


def test_the_map_has_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE))
    whole = {"ground", "face", "templates", "codegen", "tuned_db", "tuner", "cli"}
    within = {"tuned_db/backends/sqlite", "tuned_db/backends/postgres", "cli/common", "cli/tune", "cli/db"}
    assert set(ROOMS) - listed == whole - listed | within
    assert listed <= set(ROOMS)


_DOTTED = re.compile(r"\bflashtune(?:\.[A-Za-z_]\w*)+")
NO_NAMES = {"flashtune.db", "flashtune.whl", "flashtune.flash", "flashtune.codegen.gpu.cuda.nothing"}
"""Names of files that begin like the package, and one that tests ask for because it is not there."""


@pytest.mark.parametrize("path", [*own_files(), *TESTS, *DOCUMENTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_dotted_names_lead_to_something(path: Path) -> None:
    """Also those in comments, documents and programs that tests start: nothing else notices that a module has moved."""
    if path.name == "CHANGELOG.md":
        return
    found = set(_DOTTED.findall(path.read_text("utf-8"))) - NO_NAMES
    assert [each for each in sorted(found) if not is_name(each)] == []


@functools.cache
def is_name(dotted: str) -> bool:
    """Whether it is a module, or something in one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("flashtune"):
                return True  # what it needs is not here
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("path", [path for path in own_files() if path.name == "__init__.py"], ids=name)
def test_a_room_says_what_is_in_it(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text("utf-8")))
