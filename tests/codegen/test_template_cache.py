"""Templates that were compiled by an earlier process: whole or not at all, and never missed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

import flashtune
from flashtune.codegen.compiler.template_cache import TemplateCache


def rendered(text: str = "{{x}} and more") -> str:
    environment = jinja2.Environment(loader=jinja2.DictLoader({"a.jinja": text}), bytecode_cache=TemplateCache())
    return environment.get_template("a.jinja").render(x=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path))
    return tmp_path / "templates"


def test_a_second_process_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendered() == "1 and more"
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(jinja2.Environment, "_generate", None)  # would be called
    assert rendered() == "1 and more"


def test_a_changed_template_is_compiled_anew() -> None:
    assert rendered() == "1 and more"
    assert rendered("{{x}} and less") == "1 and less"


@pytest.mark.parametrize("damage", [b"", b"garbage", b"0" * 64 + b"\nrest"])
def test_a_damaged_file_is_none_and_is_replaced(folder: Path, damage: bytes) -> None:
    rendered()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert rendered() == "1 and more"
    assert path.read_bytes() == whole


def test_a_flipped_bit_is_found(folder: Path) -> None:
    rendered()
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert rendered() == "1 and more"


def test_a_cache_that_cant_be_written_is_not_missed(tmp_path: Path, folder: Path) -> None:
    folder.write_text("a file where the directory should be")
    assert rendered() == "1 and more"


NO_COMPILE = """
import jinja2
from flashtune.codegen.compiler.render import templates
jinja2.Environment._generate = None  # would be called
templates()._environment.get_template("fma_fwd.cu.jinja")
"""


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o000, 0o077])
@pytest.mark.parametrize("named", [True, False], ids=["named", "default"])
def test_a_second_process_hits_whatever_the_umask(tmp_path: Path, mask: int, named: bool) -> None:
    """M12: with umask 002 each process compiled all templates."""
    environment = os.environ | {"PYTHONPATH": str(Path(flashtune.__file__).parents[1]), "HOME": str(tmp_path / "home")}
    for name in ("FLASHTUNE_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    if named:
        environment["FLASHTUNE_CACHE_DIR"] = str(tmp_path / "new" / "cache")
    first = NO_COMPILE.replace("jinja2.Environment._generate = None", "")
    for code in (first, NO_COMPILE):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, umask=mask, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
