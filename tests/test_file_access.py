"""Files are opened and written in one place, `src/flashtune/files.py`, and in a short list of others with reasons."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_import_direction import own_files

ROOT = Path(__file__).parents[1]
FILES = own_files()

METHODS = (
    "open",
    "read_bytes",
    "read_text",
    "write_bytes",
    "write_text",
    "touch",
    "rename",
    "symlink_to",
    "hardlink_to",
)
"""Of paths."""
FUNCTIONS = ("open", "fdopen", "link", "symlink", "rename", "renames", "replace", "truncate", "mkfifo", "mknod")
"""Of ``os``, or built in."""
MODULES = ("tempfile", "shutil", "gzip", "bz2", "lzma", "zipfile", "tarfile", "mmap", "fileinput")
"""All they do is with files, but for `HARMLESS`."""
HARMLESS = {"tempfile.gettempdir", "shutil.which", "shutil.get_terminal_size"}

ALLOWED: dict[str, dict[str, str]] = {
    "src/flashtune/files.py": {
        "open": "it is the one place",
        "os.open": "it is the one place",
        "os.link": "it is the one place",
        "os.replace": "it is the one place",
    },
    "src/flashtune/cli/common/output.py": {"open": "/dev/null", "os.open": "/dev/null"},
    "codegen/cache/private_folder.py": {"os.open": "a folder, by descriptor and without links"},
    "codegen/cache/cache_folder.py": {
        ".open": "a folder of the cache, by descriptor",
        "tempfile.mkdtemp": "a cache for one process",
        "shutil.rmtree": "its removal",
    },
    "codegen/gpu/devices.py": {".read_text": "/proc"},
    "emulator/source.py": {".read_text": "a part of the package"},
    "emulator/build.py": {
        ".read_text": "a part of the package; /proc",
        ".read_bytes": "what the compiler wrote into a private folder",
        ".write_bytes": "what the compiler reads there",
        ".open": "what it wrote there, where it can't be kept",
        "tempfile.TemporaryDirectory": "that folder",
    },
    "emulator/job.py": {
        "tempfile.mkstemp": "arrays for a program of the emulator",
        "open": "the same",
        ".read_bytes": "what the program wrote there",
    },
    "emulator/program.py": {
        "tempfile.TemporaryDirectory": "a private copy of a program, where one that is open can't be run",
        ".write_bytes": "that copy",
    },
    "tuned_db/backends/sqlite/copying.py": {
        "open": "a new file, in a private folder or under a random name",
        "os.open": "the same",
        ".open": "a copy of its own, to be put on the disk",
    },
    "tuned_db/backends/sqlite/private_copy.py": {
        "tempfile.mkdtemp": "copies of databases",
        "shutil.rmtree": "their removal",
    },
    "tuned_db/backends/sqlite/disks.py": {".read_text": "/proc"},
    "tuned_db/backends/sqlite/opening.py": {".touch": "a new database under a random name, never over another file"},
    "tuned_db/upkeep/restoring.py": {
        ".rename": "a database and what belongs to it, moved aside to a name that is free"
    },
    "tuned_db/backends/sqlite/expected_tables.py": {".read_text": "a part of the package"},
    "tuned_db/lookup/captured.py": {"os.open": "appended to, by descriptor and without links", "os.fdopen": "the same"},
    "tuned_db/sharing/transfer.py": {"tempfile.TemporaryFile": "it has no name"},
    "tuner/processes/capacity.py": {".read_text": "/proc and /sys"},
    "tuner/commands/noise.py": {".open": "a device"},
    "tuner/cluster/ray_actor.py": {".open": "a device"},
    "tuner/workers/process_worker.py": {".open": "a device"},
}
"""By file: calls that it may have, and why. What writes a file for others uses `write_whole`; what reads one that
somebody else may have made uses `open_regular`, `read_regular` or `read_given`."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def access(tree: ast.AST) -> set[str]:
    """Calls that open, make or move files, as they are written but for what a method is called on."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id="open" | "FileIO" as called):
                found.add(called)
            case ast.Attribute(value=ast.Name(id=module), attr=called) if module in MODULES:
                found.add(f"{module}.{called}")
            case ast.Attribute(value=ast.Name(id="os" | "io" as module), attr=called):
                found |= {f"{module}.{called}"} if called in FUNCTIONS else set()
            case ast.Attribute(value=ast.Name(id="Store"), attr="open"):
                pass
            case ast.Attribute(attr=called) if called in METHODS:
                found.add(f".{called}")
            case ast.Attribute(attr="replace") if len(node.args) == 1 and not node.keywords:  # of a text it has two
                found.add(".replace")
    return found - HARMLESS


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_opened_and_written_in_one_place(path: Path) -> None:
    """C3, m3, m5, the kind: each place of its own used a name to be foreseen, waited for a pipe, or left parts."""
    found = access(ast.parse(path.read_text(encoding="utf-8")))
    assert found == ALLOWED.get(name(path), {}).keys(), "see ALLOWED; what is no longer there is to be removed from it"


def test_the_list_names_files_that_there_are() -> None:
    assert ALLOWED.keys() <= set(map(name, FILES))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("open(path)", "open"),
        ("with path.open('rb') as file: pass", ".open"),
        ("Path(x).write_text(y)", ".write_text"),
        ("os.open(x, os.O_CREAT)", "os.open"),
        ("os.replace(a, b)", "os.replace"),
        ("a.replace(b)", ".replace"),
        ("made.touch()", ".touch"),
        ("tempfile.NamedTemporaryFile()", "tempfile.NamedTemporaryFile"),
        ("shutil.copy(a, b)", "shutil.copy"),
        ("gzip.open(a)", "gzip.open"),
        ("io.open(a)", "io.open"),
    ],
)
def test_the_check_sees_what_it_looks_for(text: str, call: str) -> None:
    assert access(ast.parse(text)) == {call}


@pytest.mark.parametrize(
    "text",
    [
        "Store.open(path)",
        "text.replace(a, b)",
        "date.replace(tzinfo=None)",
        "dataclasses.replace(a, b=c)",
        "shutil.which(a)",
    ],
)
def test_the_check_passes_over_what_is_no_file(text: str) -> None:
    assert access(ast.parse(text)) == set()
