"""CuPy is imported in one place, with a home directory or without, and nothing of its user's changes by that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashtune
from flashtune.codegen.gpu import cuda

SOURCE = Path(flashtune.__file__).parents[1]

# Does what CuPy 14 does with its folder while it is imported.
CUPY = """
import os
default = os.path.expanduser("~/.cupy/kernel_cache")
folder = os.environ.get("CUPY_CACHE_DIR", default)
if not os.path.isdir(folder):
    os.makedirs(folder, exist_ok=True)
class cuda:
    runtime = "runtime"
"""
IMPORT = """
import os, sys
from flashtune.codegen.gpu import cuda
before = dict(os.environ)
try:
    from flashtune.codegen.gpu.cuda import cupy, runtime
    assert runtime == "runtime"
    print(cupy.folder)
except ImportError as error:
    print(type(error).__name__, error)
assert dict(os.environ) == before
"""
OWN = IMPORT.replace("before =", "cuda.own_process(); before =")
ONCE = """
import sys
if hasattr(sys, "tried"):
    raise AttributeError("partially initialized module 'cupy'")
sys.tried = True
{body}
"""
# Another process makes the folder right after it was not there.
MEANWHILE = """
import os
look = os.path.isdir
def isdir(path):
    there = look(path)
    if not there and str(path).endswith("kernel_cache"):
        os.makedirs(path)
    return there
os.path.isdir = isdir
"""
NO_USER = "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n"

UNUSABLE = ["/dev/null", "/dev/null/none", "/proc/none"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with a CuPy that only makes its folder."""
    (tmp_path / "library" / "cupy").mkdir(parents=True)
    (tmp_path / "library" / "cupy" / "__init__.py").write_text(CUPY)
    return tmp_path / "library"


def run(code: str, tmp_path: Path, *first: Path, home: str | None, **environment: str) -> str:
    """What a new process prints that works in an empty folder; its cache and its home directory are its own."""
    (tmp_path / "cwd").mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("HOME", "CUPY_CACHE_DIR")}
    path = {"PYTHONPATH": os.pathsep.join(map(str, (*first, SOURCE))), "FLASHTUNE_CACHE_DIR": str(tmp_path / "cache")}
    if home is not None:
        path["HOME"] = home
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "cwd", env=clean | path | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert not list((tmp_path / "cwd").iterdir()), "nothing appears in the working directory"
    return done.stdout.strip()


@pytest.mark.parametrize("own", [IMPORT, OWN], ids=["of a user", "own"])
@pytest.mark.parametrize("home", [*UNUSABLE, "", None])
def test_without_a_home_directory_cupy_gets_a_folder_that_works(
    library: Path, tmp_path: Path, own: str, home: str | None
) -> None:
    """F1."""
    code = own if home else NO_USER + own  # HOME may be empty, too
    if home == "":
        home, code = "relative", own
    folder = Path(run(code, tmp_path, library, home=home))
    assert folder.is_dir()
    assert folder == (tmp_path / "cache" / "cupy" if own == IMPORT else SOURCE / "flashtune")


def test_with_neither_home_nor_cache_a_private_folder_serves(library: Path, tmp_path: Path) -> None:
    """F1."""
    (tmp_path / "tmp").mkdir()
    nowhere = {"FLASHTUNE_CACHE_DIR": "/dev/null/cache", "TMPDIR": str(tmp_path / "tmp")}
    folder = Path(run(IMPORT, tmp_path, library, home="/dev/null", **nowhere))
    assert folder.parent.parent == tmp_path / "tmp"
    assert not folder.exists()


def test_a_home_directory_that_works_is_left_to_cupy(library: Path, tmp_path: Path) -> None:
    """F1: a process may use CuPy beside flashtune, and finds its kernels where they always are."""
    (tmp_path / "home").mkdir()
    default = tmp_path / "home" / ".cupy" / "kernel_cache"
    assert run(IMPORT, tmp_path, library, home=str(tmp_path / "home")) == str(default)
    assert run(OWN, tmp_path, library, home=str(tmp_path / "home")) == str(default), "it is there"
    assert not (tmp_path / "cache").exists()


def test_the_home_directory_is_left_to_cupy_though_another_process_makes_the_folder(
    library: Path, tmp_path: Path
) -> None:
    """A hole in the tests: of two processes that are the first, one would compile into a folder of flashtune's."""
    (tmp_path / "home").mkdir()
    default = tmp_path / "home" / ".cupy" / "kernel_cache"
    assert run(MEANWHILE + IMPORT, tmp_path, library, home=str(tmp_path / "home")) == str(default)
    assert default.is_dir()
    assert not (tmp_path / "cache").exists()


def test_a_process_of_flashtune_alone_leaves_the_home_directory_as_it_is(library: Path, tmp_path: Path) -> None:
    """F1: a folder ``.cupy`` appeared though all of flashtune's own places were named."""
    (tmp_path / "home").mkdir()
    assert run(OWN, tmp_path, library, home=str(tmp_path / "home")) == str(SOURCE / "flashtune")
    assert not list((tmp_path / "home").iterdir())
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("own", [IMPORT, OWN], ids=["of a user", "own"])
@pytest.mark.parametrize("home", ["home", "/dev/null"])
def test_a_folder_that_the_user_named_is_taken(library: Path, tmp_path: Path, own: str, home: str) -> None:
    named = str(tmp_path / "named")
    assert run(own, tmp_path, library, home=str(tmp_path / home), CUPY_CACHE_DIR=named) == named
    assert not (tmp_path / "home").exists()


def test_a_named_folder_that_can_not_be_made_is_named_in_one_error(library: Path, tmp_path: Path) -> None:
    """F1."""
    said = run(IMPORT, tmp_path, library, home="/dev/null", CUPY_CACHE_DIR="/dev/null/cupy")
    assert re.fullmatch(
        r"MissingDependency This needs CuPy, whose import fails \(NotADirectoryError: .*\)\. "
        r"CUPY_CACHE_DIR=/dev/null/cupy must be a folder, or the name of one that can be made",
        said,
    )


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (
            "raise OSError('libcudart.so.13: cannot open shared object file')",
            r"fails \(OSError: libcudart.*import cupy",
        ),
        ("raise RuntimeError('broken\\n\\x1b[2J')", r"fails \(RuntimeError: broken \?\[2J\).*import cupy"),
        ("raise ImportError('CuPy is not\\ncorrectly installed')", r"be imported \(CuPy is not correctly.*pip install"),
        ("import no_such_module", r"be imported \(No module named 'no_such_module'\): pip install"),
    ],
)
def test_whatever_its_import_raises_is_one_error_and_stays_it(
    library: Path, tmp_path: Path, body: str, shown: str
) -> None:
    """F1. What a second import of a half imported package raises says nothing."""
    (library / "cupy" / "__init__.py").write_text(ONCE.format(body=body))
    first, again = run(IMPORT + IMPORT.replace("import os, sys", ""), tmp_path, library, home="/dev/null").splitlines()
    assert re.match(f"MissingDependency This needs CuPy, .*{shown}", first)
    assert again == first


def test_a_name_that_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match="nothing"):
        from flashtune.codegen.gpu.cuda import nothing  # noqa: F401
    with pytest.raises(AttributeError, match="nothing"):
        _ = cuda.nothing


# The real one

NVRTC = "from flashtune.codegen.compiler.nvrtc import nvrtc_version; print(nvrtc_version())"


@pytest.mark.nvrtc
@pytest.mark.parametrize("home", ["/dev/null", None])
def test_nvrtc_is_there_without_a_home_directory(tmp_path: Path, home: str | None) -> None:
    """F1."""
    pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
    assert re.fullmatch(r"\d+\.\d+", run(NVRTC if home else NO_USER + NVRTC, tmp_path, home=home))


@pytest.mark.nvrtc
def test_cupy_takes_the_folder_that_it_is_given(tmp_path: Path) -> None:
    pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
    (tmp_path / "home").mkdir()
    code = "from flashtune.codegen.gpu import cuda; cuda.own_process(); cuda.cupy"
    run(code, tmp_path, home=str(tmp_path / "home"))
    assert not list((tmp_path / "home").iterdir())
    run(code.replace("cuda.own_process();", ""), tmp_path, home=str(tmp_path / "home"))
    assert list((tmp_path / "home").iterdir()) == [tmp_path / "home" / ".cupy"]
