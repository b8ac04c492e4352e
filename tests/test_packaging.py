"""What is installed is what is in the repository, whichever way it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import flashtune
from flashtune.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("codegen", "emulator", "templates", "tuned_db", "tuner")
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git checkout")


def load_script(path: str) -> ModuleType:
    """A module of the repository that is not part of the package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path, cwd: Path | None = None, **extra: str) -> str:
    """Output of a command that must succeed; pytest's own PYTHONPATH stays out of it."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | extra
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_sources(target: Path) -> Path:
    """The files that a build needs, with their links."""
    target.mkdir()
    for name in (*LINKED, "src"):
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_folder_is_a_relative_link_to_the_root(name: str) -> None:
    link = ROOT / "src" / "flashtune" / name
    if not link.is_symlink() and (ROOT / "PKG-INFO").exists():
        pytest.skip("an sdist holds real folders")
    assert os.readlink(link) == f"../../{name}"


@needs_git
@pytest.mark.parametrize("name", LINKED)
def test_git_stores_the_link_as_a_link(name: str) -> None:
    assert run("git", "ls-files", "--stage", f"src/flashtune/{name}", cwd=ROOT).startswith("120000 ")


@pytest.mark.parametrize("name", LINKED)
def test_the_build_stops_where_a_link_became_a_plain_file(name: str, tmp_path: Path) -> None:
    copy = copy_sources(tmp_path / "zip")
    link = copy / "src" / "flashtune" / name
    link.unlink()
    link.write_text(f"../../{name}", encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert built.returncode != 0
    assert f"src/flashtune/{name} is a plain file" in built.stderr
    assert "Clone with git" in built.stderr


def test_the_build_stops_where_a_link_leads_nowhere_or_to_nothing(tmp_path: Path) -> None:
    setup = load_script("setup.py")
    copy = copy_sources(tmp_path / "broken")
    assert setup.missing_folders(copy) == []
    shutil.rmtree(copy / "tuner")
    (copy / "codegen" / "__init__.py").unlink()
    (copy / "src" / "flashtune" / "templates").unlink()
    assert setup.missing_folders(copy) == [
        "src/flashtune/codegen has no __init__.py",
        "src/flashtune/templates is missing",
        "src/flashtune/tuner leads nowhere",
    ]


def test_real_folders_build_as_links_do(tmp_path: Path) -> None:
    """An sdist holds folders in place of the links."""
    copy = copy_sources(tmp_path / "sdist")
    for name in LINKED:
        (copy / "src" / "flashtune" / name).unlink()
        shutil.copytree(ROOT / name, copy / "src" / "flashtune" / name)
    assert load_script("setup.py").missing_folders(copy) == []


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_changelog_knows_the_version() -> None:
    assert f"\n## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_installed_version_is_that_of_the_project() -> None:
    try:
        importlib.metadata.distribution("flashtune")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashtune is not installed (make dev)")
    assert flashtune.__version__ == PROJECT["version"]


def test_extras_of_both_cuda_versions_hold_the_same_parts() -> None:
    extras = PROJECT["optional-dependencies"]
    for parts in (extras["cuda12"], extras["cuda13"]):
        names = [part.split(">")[0].removesuffix("-cu12") for part in parts]
        assert [name.replace("12x", "").replace("13x", "") for name in names] == [
            "cupy-cuda",
            "nvidia-cuda-nvrtc",
            "nvidia-cuda-runtime",
            "cuda-bindings",
            "nvidia-ml-py",
        ]


def build(source: Path, into: Path, *what: str) -> Path:
    """Builds one archive in an isolated environment."""
    run(sys.executable, "-m", "build", *what, "--outdir", into, source)
    (archive,) = into.iterdir()
    return archive


def copy_tracked(target: Path) -> Path:
    """The working tree as git would store it."""
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)
    return target


@needs_git
@pytest.mark.slow
def test_wheel_and_sdist_hold_every_file_and_so_does_the_wheel_of_the_sdist(tmp_path: Path) -> None:
    checker = load_script(".ci/check_dist.py")
    tree = copy_tracked(tmp_path / "tree")
    wheel = build(tree, tmp_path / "wheel", "--wheel")
    sdist = build(tree, tmp_path / "sdist", "--sdist")
    assert checker.missing(wheel) == set()
    assert checker.missing(sdist) == set()
    with tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        archive.extractall(tmp_path / "unpacked", **safe)
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build(unpacked, tmp_path / "again", "--wheel")
    assert checker.contents(again) == checker.contents(wheel)


@needs_git
def test_the_archive_check_sees_a_lost_file(tmp_path: Path) -> None:
    checker = load_script(".ci/check_dist.py")
    archive = tmp_path / "flashtune.whl"
    kept = checker.expected_in_wheel() - {"flashtune/templates/lib/ptx.cuh"}
    with zipfile.ZipFile(archive, "w") as wheel:
        for name in kept:
            wheel.writestr(name, "")
    assert checker.missing(archive) == {"flashtune/templates/lib/ptx.cuh"}


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize("way", ["git", "editable"])
def test_an_install_finds_its_code_and_its_templates(way: str, tmp_path: Path) -> None:
    """Without dependencies: what is looked at is which files arrive."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    source = [f"git+file://{ROOT}"] if way == "git" else ["--editable", str(copy_sources(tmp_path / "checkout"))]
    run(python, "-m", "pip", "install", "--no-deps", *source, cwd=tmp_path)
    script = (
        "import importlib.util, pathlib;"
        "root = pathlib.Path(importlib.util.find_spec('flashtune').origin).parent;"
        "wanted = ['codegen/problem/problem.py', 'templates/lib/ptx.cuh', 'tuner/__init__.py', 'tuned_db/__init__.py'];"
        "print([name for name in wanted if not (root / name).is_file()])"
    )
    assert run(python, "-c", script, cwd=tmp_path).strip() == "[]"


def test_readme_examples_run_from_numpy_data() -> None:
    readme = load_script(".ci/readme.py")
    found = readme.examples((ROOT / "README.md").read_text(encoding="utf-8"))
    assert any("from flashtune import attention" in example for example in found)
    for example in found:
        exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})


def test_examples_that_need_a_gpu_are_left_out() -> None:
    readme = load_script(".ci/readme.py")
    markdown = "text\n\n```python\na = 1\n```\n\n<!-- needs a GPU -->\n```python\nb = 2\n```\n\n```sh\nmake\n```\n"
    assert readme.examples(markdown) == ["a = 1\n"]


def test_readme_lists_every_environment_variable() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {each.name for each in SETTINGS} == set(re.findall(r"`(FLASHTUNE_[A-Z_]+)`", readme))


def test_links_in_the_documents_lead_to_files() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"
