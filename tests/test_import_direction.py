"""Who may import whom: each part has rooms, which are folders, and a room knows those above it in this list alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("codegen", "emulator", "templates", "tuned_db", "tuner")
"""Folders at the root that are packages of flashtune; the rest of it is in src/flashtune."""
ROOMS = (
    "ground",
    "templates",
    "codegen/problem", "codegen/cache", "codegen/gpu", "codegen/compiler", "codegen/plan", "codegen/families",
    "codegen",
    "emulator",
    "tuned_db/records", "tuned_db/policy", "tuned_db/schema", "tuned_db/backends", "tuned_db/backends/sqlite",
    "tuned_db/backends/postgres", "tuned_db/exchange", "tuned_db/store", "tuned_db/lookup", "tuned_db/sharing",
    "tuned_db/upkeep", "tuned_db",
    "tuner/processes", "tuner/trial", "tuner/results", "tuner/bench", "tuner/search", "tuner/workers", "tuner/run",
    "tuner/cluster", "tuner/tune", "tuner/commands", "tuner",
    "call",
    "cli/common", "cli/tune", "cli/db", "cli",
    "face",
)  # fmt: skip
"""The lowest first. ``ground`` and ``face`` are the modules of src/flashtune itself."""
GROUND = ("errors", "files", "settings", "values")
OWNERS = {"optuna": "tuner", "sqlalchemy": "tuned_db", "alembic": "tuned_db"}
MOST_ENTRIES = 12
"""Of a folder with modules, beside its ``__init__.py``."""


def own_files() -> list[Path]:
    found = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    package = ROOT / "src" / "flashtune"
    found += [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in PARTS]
    return sorted(found)


FILES = own_files()
TESTS = sorted(path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """``codegen/gpu/gpu`` or ``cli/main``: as below the package flashtune, with slashes."""
    return name(path).removeprefix("src/flashtune/").removesuffix(".py").removesuffix("/__init__")


def room_of(module: str) -> str:
    """The room of a module or a package, by the longest name that fits."""
    if module.partition("/")[0] in GROUND:
        return "ground"
    return next((each for each in sorted(ROOMS, key=len, reverse=True) if f"{module}/".startswith(f"{each}/")), "face")


def part_of(path: Path) -> str:
    return module_of(path).partition("/")[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted module) of each import in the file, in functions too."""
    inside = module_of(path).split("/")
    package = ["flashtune", *(inside if path.name == "__init__.py" else inside[:-1])]
    if path == ROOT / "src" / "flashtune" / "__init__.py":
        package = ["flashtune"]
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


def target_room(module: str) -> str | None:
    """The room that an import reaches, or None for what is not flashtune's."""
    first, _, rest = module.partition(".")
    return room_of(rest.replace(".", "/")) if first == "flashtune" and rest else None


def test_there_is_something_to_check() -> None:
    files = {room_of(module_of(path)) for path in FILES}
    assert files == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_downwards(path: Path) -> None:
    mine = room_of(module_of(path))
    upwards = [
        f"line {line}: {module}"
        for line, module in imports(path)
        if (room := target_room(module)) is not None
        and ROOMS.index(room) > ROOMS.index(mine)
        and not holds(module, mine)
    ]
    assert not upwards, f"{name(path)} ({mine}) imports from above: {upwards}"


def holds(module: str, room: str) -> bool:
    """Whether ``module`` is a package around ``room``: ``from flashtune.codegen.gpu import cuda`` goes through it."""
    return f"flashtune.{room}/".replace("/", ".").startswith(f"{module}.")


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=name)
def test_a_folder_can_be_seen_at_once(folder: Path) -> None:
    entries = [each for each in folder.iterdir() if not each.name.startswith(("__", "."))]
    parts = [each for each in entries if each.is_symlink()]
    assert len(entries) - len(parts) <= MOST_ENTRIES, f"{name(folder)} has {len(entries)} entries"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_optuna_and_sqlalchemy_have_one_owner_each(path: Path) -> None:
    foreign = [
        f"line {line}: {module}"
        for line, module in imports(path)
        if (owner := OWNERS.get(module.split(".")[0])) is not None and owner != part_of(path)
    ]
    assert not foreign


@pytest.mark.parametrize("path", FILES, ids=name)
def test_cupy_is_imported_by_the_one_module_that_knows_how(path: Path) -> None:
    """F1: it needs a folder that can be made. codegen/gpu/cuda.py imports it by a call."""
    bare = [f"line {line}: {module}" for line, module in imports(path) if module.split(".")[0].startswith("cupy")]
    assert not bare


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=name)
def test_folders_are_imported_as_parts_of_flashtune(path: Path) -> None:
    """From the root of a checkout ``import codegen`` works and makes a second copy of each module."""
    bare = [f"line {line}: {module}" for line, module in imports(path) if module.split(".")[0] in PARTS]
    assert not bare


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_are_relative_inside_a_folder_and_absolute_across(path: Path) -> None:
    own = ".".join(["flashtune", *module_of(path).split("/")[:-1]])
    if path.name == "env.py":  # Alembic runs it as a script
        return
    wrong = [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.level > 1 or (own != "flashtune" and path.name != "__init__.py" and node.module == own))
    ]
    assert not wrong


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
    path.write_text(
        "def f():\n    from flashtune import tuner\n    from .family import Family\n    import codegen.gpu\n"
    )
    found = {module for _, module in imports(path)}
    assert {"flashtune.tuner", "flashtune.codegen.families.family.Family", "codegen.gpu"} <= found
    reached = (
        "flashtune.tuner.run.finals",
        "flashtune.errors",
        "numpy",
        "flashtune.cli.main",
        "flashtune.codegen.launch",
    )
    assert [target_room(each) for each in reached] == ["tuner/run", "ground", None, "cli", "codegen"]
    assert [target_room(each) for each in ("flashtune.tuner", "flashtune.api.tune")] == ["tuner", "face"]


def test_no_two_classes_have_one_name() -> None:
    """A name that two things have needs a second look wherever it is read."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name(path))
    assert {each: paths for each, paths in found.items() if len(paths) > 1} == {}
