"""Who may import whom: src/flashtune -> tuner -> tuned_db -> codegen -> templates; some of the first are leaves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("templates", "codegen", "tuned_db", "tuner", "face")
"""Lowest first; ``face`` is what lies in src/flashtune itself."""
LEAVES = ("errors", "settings", "files")
OWNERS = {"optuna": "tuner", "sqlalchemy": "tuned_db", "alembic": "tuned_db"}
FOLDERS = tuple(layer for layer in LAYERS if layer != "face")

FILES = sorted(
    path
    for folder in (*FOLDERS, "src/flashtune")
    for path in (ROOT / folder).rglob("*.py")
    if folder != "src/flashtune" or path.parent == ROOT / "src" / "flashtune"
)
TESTS = sorted(path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first if first in LAYERS else "face"


INSIDE = [path for path in FILES if layer_of(path) != "face" and path.name != "env.py"]
"""Files that others import; Alembic runs its env.py as a script."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted module) of each import in the file, in functions too."""
    layer = layer_of(path)
    package = ["flashtune"] if layer == "face" else ["flashtune", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            for alias in node.names:  # `from flashtune import codegen` imports flashtune.codegen
                yield node.lineno, f"{module}.{alias.name}"


def target_layer(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "flashtune" or len(parts) < 2 or parts[1] in LEAVES:
        return None
    return parts[1] if parts[1] in FOLDERS else "face"


def test_there_is_something_to_check() -> None:
    assert {layer_of(path) for path in FILES} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_downwards(path: Path) -> None:
    mine = LAYERS.index(layer_of(path))
    if path.parent == ROOT / "src" / "flashtune" and path.stem in LEAVES:
        mine = -1
    upwards = [
        f"line {line}: {module}"
        for line, module in imports(path)
        if (layer := target_layer(module)) is not None and LAYERS.index(layer) > mine
    ]
    assert not upwards, f"{name(path)} ({LAYERS[mine] if mine >= 0 else 'a leaf'}) imports from above: {upwards}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_optuna_and_sqlalchemy_have_one_owner_each(path: Path) -> None:
    foreign = [
        f"line {line}: {module}"
        for line, module in imports(path)
        if (owner := OWNERS.get(module.split(".")[0])) is not None and owner != layer_of(path)
    ]
    assert not foreign


@pytest.mark.parametrize("path", FILES, ids=name)
def test_cupy_is_imported_by_the_one_module_that_knows_how(path: Path) -> None:
    """F1: it needs a folder that can be made. codegen/cuda.py imports it by a call."""
    bare = [f"line {line}: {module}" for line, module in imports(path) if module.split(".")[0].startswith("cupy")]
    assert not bare


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=name)
def test_folders_are_imported_as_parts_of_flashtune(path: Path) -> None:
    """From the root of a checkout ``import codegen`` works and makes a second copy of each module."""
    bare = [f"line {line}: {module}" for line, module in imports(path) if module.split(".")[0] in FOLDERS]
    assert not bare


@pytest.mark.parametrize("path", INSIDE, ids=name)
def test_imports_inside_a_folder_are_relative(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = f"flashtune.{layer_of(path)}"
    absolute = [
        f"line {node.lineno}: {node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(f"{own}.")
    ]
    assert not absolute


def test_inline_assembly_is_where_a_host_build_replaces_it() -> None:
    """Comments may speak of it."""
    comment = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
    sources = sorted(path for suffix in ("*.cuh", "*.jinja") for path in (ROOT / "templates").rglob(suffix))
    found = [
        name(path)
        for path in sources
        if re.search(r"\b(__)?asm(__)?\b", comment.sub("", path.read_text(encoding="utf-8")))
    ]
    assert found == ["templates/lib/ptx.cuh", "templates/lib/ptx_sm90.cuh", "templates/lib/wgmma.cuh.jinja"]


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=name)
def test_no_package_binds_the_name_of_a_module_of_its_own(path: Path) -> None:
    """``from .family import family`` in a package would hide the module behind the function."""
    modules = {each.stem for each in path.parent.glob("*.py")} - {"__init__"}
    bound: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
    assert not bound & modules


def test_the_checks_see_what_they_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    below = tmp_path / "codegen" / "families"
    below.mkdir(parents=True)
    path = below / "example.py"
    path.write_text("def f():\n    from flashtune import tuner\n    from ..gpu import Gpu\n    import codegen.gpu\n")
    found = {module for _, module in imports(path)}
    assert {"flashtune.tuner", "flashtune.codegen.gpu", "codegen.gpu"} <= found
    assert [target_layer(each) for each in ("flashtune.tuner", "flashtune.errors", "numpy", "flashtune.cli")] == [
        "tuner",
        None,
        None,
        "face",
    ]
