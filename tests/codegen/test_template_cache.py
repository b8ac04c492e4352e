"""Templates that were compiled by an earlier process: whole or not at all, and never missed."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
import pytest

from flashtune.codegen.template_cache import TemplateCache


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


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows keeps a user's directories apart by itself")
@pytest.mark.parametrize("of", ["file", "folder"])
def test_what_others_could_have_written_is_not_read(folder: Path, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered()
    (path,) = folder.iterdir()
    (path if of == "file" else folder).chmod(0o777)
    read: list[str] = []
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self.name) or b"")
    assert rendered() == "1 and more"
    assert not read
