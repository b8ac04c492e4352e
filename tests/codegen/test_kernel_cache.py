from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashtune import settings
from flashtune.codegen.cache import private_folder
from flashtune.codegen.compiler import kernel_cache
from flashtune.codegen.compiler.kernel_cache import cache_key, compiled, pack, serve_only, unpack
from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.compiler.render import Source
from flashtune.errors import CompileError

SOURCE = Source("kernel.cu", 'extern "C" __global__ void kernel() {}  // ü')
CUBIN = b"\x7fELF" + bytes(range(256)) * 20


class Compiler:
    """Stands in for NVRTC and counts."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.version = "13.5"
        self.cubin = CUBIN

    def __call__(self, source: Source, arch: str) -> Compiled:
        self.runs.append(arch)
        return Compiled(
            cubin=self.cubin + arch.encode(),
            arch=arch,
            nvrtc=self.version,
            registers=168,
            spill_bytes=8,
            stack_bytes=16,
            static_shared_bytes=1024,
            seconds=0.25,
            log="ptxas info : Used 168 registers\nü",
        )


@pytest.fixture
def compiler(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    fake = Compiler()
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "mon cache é 内核"))
    monkeypatch.setattr(kernel_cache, "compile_source", fake)
    monkeypatch.setattr(kernel_cache, "nvrtc_version", lambda: fake.version)
    return fake


def cubin_dir() -> Path:
    return settings.cache_dir() / "cubins"


def entry(arch: str = "sm_90a") -> Path:
    return cubin_dir() / f"{cache_key(SOURCE, arch)}.cubin"


def test_the_second_call_does_not_compile(compiler: Compiler) -> None:
    first = compiled(SOURCE, "sm_90a")
    assert compiled(SOURCE, "sm_90a") == first
    assert compiler.runs == ["sm_90a"]
    assert os.listdir(cubin_dir()) == [entry().name]


def test_each_architecture_has_its_own_entry(compiler: Compiler) -> None:
    for arch in ("sm_80", "sm_90a", "sm_80", "sm_90a"):
        assert compiled(SOURCE, arch).cubin == CUBIN + arch.encode()
    assert compiler.runs == ["sm_80", "sm_90a"]


def test_another_nvrtc_is_a_miss(compiler: Compiler) -> None:
    compiled(SOURCE, "sm_90a")
    compiler.version = "13.6"
    assert compiled(SOURCE, "sm_90a").nvrtc == "13.6"
    assert len(compiler.runs) == 2


def test_other_source_or_options_are_another_key(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key(SOURCE, "sm_90a")
    assert cache_key(Source("kernel.cu", SOURCE.text + "\n"), "sm_90a") != key
    assert cache_key(Source("renamed.cu", SOURCE.text), "sm_90a") == key
    monkeypatch.setattr(kernel_cache, "OPTIONS", ("--std=c++20",))
    assert cache_key(SOURCE, "sm_90a") != key


def test_refresh_compiles_and_replaces(compiler: Compiler) -> None:
    compiled(SOURCE, "sm_90a")
    compiler.cubin = b"new"
    assert compiled(SOURCE, "sm_90a", refresh=True).cubin == b"newsm_90a"
    assert compiled(SOURCE, "sm_90a").cubin == b"newsm_90a"
    assert len(compiler.runs) == 2


def test_a_process_that_is_sent_its_cubins_has_no_others(compiler: Compiler) -> None:
    made = compiled(SOURCE, "sm_90a")
    other = Source("other.cu", SOURCE.text + "\nint more;")
    commented = Source("same.cu", SOURCE.text + "\n// the compiler sees the same")
    sent = dataclasses.replace(made, nvrtc="12.8")
    try:
        serve_only({SOURCE.digest: sent})
        assert compiled(SOURCE, "sm_90a") is compiled(commented, "sm_90a", refresh=True) is sent
        with pytest.raises(CompileError, match=r"other\.cu was not sent: .* Install the same on all machines"):
            compiled(other, "sm_90a")
    finally:
        serve_only(None)
    assert compiled(SOURCE, "sm_90a") == made
    assert len(compiler.runs) == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "text": lambda good: b"hello\nworld\n",
    "binary": lambda good: bytes(range(256)) * 50,
    "half": lambda good: good[: len(good) // 2],
    "last byte missing": lambda good: good[:-1],
    "a byte more": lambda good: good + b"\0",
    "header only": lambda good: b"\n".join(good.split(b"\n")[:2]) + b"\n",
    "of another key": lambda good: pack("0" * 64, unpack(cache_key(SOURCE, "sm_90a"), good) or pytest.fail("good?")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_compiled_again_and_replaced(compiler: Compiler, damage: str) -> None:
    first = compiled(SOURCE, "sm_90a")
    good = entry().read_bytes()
    bad = DAMAGE[damage](good)
    assert bad != good
    entry().write_bytes(bad)
    assert compiled(SOURCE, "sm_90a") == first
    assert len(compiler.runs) == 2
    assert entry().read_bytes() == good


def test_any_flipped_byte_is_found(compiler: Compiler) -> None:
    compiled(SOURCE, "sm_90a")
    key, good = cache_key(SOURCE, "sm_90a"), entry().read_bytes()
    assert unpack(key, good) is not None
    for place in [*range(600), *range(600, len(good), 97), len(good) - 1]:
        bad = bytearray(good)
        bad[place] ^= 1
        assert unpack(key, bytes(bad)) is None, f"byte {place}"


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"not json",
        b"\xff",
        json.dumps({"format": kernel_cache.FORMAT}).encode(),
        json.dumps({"format": "flashtune cubin 0"}).encode(),
        json.dumps({"format": kernel_cache.FORMAT, "key": "k", "registers": "168"}).encode(),
        b"[" * 100_000,
    ],
)
def test_a_good_checksum_over_something_else_is_no_entry(header: bytes) -> None:
    body = header + b"\ncubin"
    assert unpack("k", hashlib.sha256(body).hexdigest().encode() + b"\n" + body) is None


IMPOSSIBLE = {
    "arch": ["", "sm_9", "sm_90a\n", "compute_90", "sm_90x", 90, None],
    "nvrtc": ["", "13", "13.5; rm", 13.5],
    "seconds": [math.nan, math.inf, -math.inf, -0.1, True, 1, "0.1"],
    "log": [None, 1, ["a"]],
} | {
    name: [-1, -5, True, 1.0, math.nan, 2**31, 10**400, "168", None]
    for name in ("registers", "spill_bytes", "stack_bytes", "static_shared_bytes")
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values])
def test_a_fact_that_no_compiler_says_makes_it_no_entry(compiler: Compiler, name: str, value: object) -> None:
    """C2: a cubin with -5 registers, or none that are a number, was taken."""
    built = compiler(SOURCE, "sm_90a")
    assert unpack("k", pack("k", built)) == built
    assert unpack("k", pack("k", dataclasses.replace(built, **{name: value}))) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ESTALE, errno.EACCES, errno.EIO])
def test_an_entry_that_can_not_be_read_is_a_miss(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    first = compiled(SOURCE, "sm_90a")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(private_folder, "open_regular", fail)
    for _ in range(3):
        assert compiled(SOURCE, "sm_90a") == first
    assert len(compiler.runs) == 4
    assert warnings(caplog) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EBUSY, errno.ENOENT])
@pytest.mark.parametrize("step", ["mkdir", "open", "replace"])
def test_an_entry_that_can_not_be_written_costs_a_compile_and_one_warning(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str, code: int
) -> None:
    """Nothing can be kept, neither in the cache nor in what stands in for it."""
    right = os.open

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    def fail_to_write(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            fail()
        return right(path, flags, *args, **kwargs)

    if step != "mkdir":
        cubin_dir().mkdir(parents=True, mode=0o700)
        cubin_dir().parent.chmod(0o700)
    with monkeypatch.context() as broken:
        broken.setattr(os, step, fail_to_write if step == "open" else fail)
        for arch in ("sm_80", "sm_90a", "sm_90a"):
            assert compiled(SOURCE, arch).arch == arch
    assert len(compiler.runs) == 3
    assert warnings(caplog) == 1
    assert not cubin_dir().exists() or os.listdir(cubin_dir()) == []


def test_a_file_in_the_place_of_the_cache_is_left_alone(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "mine.txt"
    occupied.write_text("mine", encoding="utf-8")
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(occupied))
    for _ in range(2):
        assert compiled(SOURCE, "sm_90a").registers == 168
    assert compiler.runs == ["sm_90a"]  # then from the folder that stands in
    assert occupied.read_text(encoding="utf-8") == "mine"
    assert warnings(caplog) == 1


def test_a_setting_that_is_no_directory_costs_a_compile_and_one_warning(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", "https://example.org/cache")
    for _ in range(2):
        assert compiled(SOURCE, "sm_90a").registers == 168
    assert compiler.runs == ["sm_90a"]
    assert warnings(caplog) == 1
    assert "FLASHTUNE_CACHE_DIR must be a path" in caplog.text


def test_a_source_that_does_not_compile_is_not_cached(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Source, arch: str) -> Compiled:
        raise CompileError("no")

    monkeypatch.setattr(kernel_cache, "compile_source", refuse)
    with pytest.raises(CompileError):
        compiled(SOURCE, "sm_90a")
    assert not cubin_dir().exists()


@pytest.mark.nvrtc
def test_a_real_kernel_survives_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path))
    first = compiled(SOURCE, "sm_90a")
    monkeypatch.setattr(kernel_cache, "compile_source", lambda source, arch: pytest.fail("compiled twice"))
    assert compiled(SOURCE, "sm_90a") == first
    assert first.cubin.startswith(b"\x7fELF")


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.levelno >= logging.WARNING and record.name == "flashtune" for record in caplog.records)
