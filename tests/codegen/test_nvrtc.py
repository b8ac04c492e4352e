from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashtune.codegen.compiler import nvrtc as compiling
from flashtune.codegen.compiler.nvrtc import Compiled, buildable_arch, compile_source, nvrtc_version
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.gpu.table import GPUS
from flashtune.errors import CompileError, MissingDependency

ARCHS = sorted({gpu.arch for gpu in GPUS.values()})
INSTALL = re.escape('pip install "flashtune[cuda13]"')

REVERSE = Source(
    "reverse.cu",
    """extern "C" __global__ void reverse(float* data) {
  __shared__ float tile[128];
  tile[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = tile[127 - threadIdx.x];
}
""",
)
SPILLING = Source(
    "spilling.cu",
    """extern "C" __global__ void __launch_bounds__(1024, 1) spilling(float* data, int count) {
  float kept[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) kept[i] = data[i * 1024 + threadIdx.x];
  for (int turn = 0; turn < count; ++turn) {
#pragma unroll
    for (int i = 0; i < 128; ++i) kept[i] = kept[i] * kept[(i + 7) % 128] + data[turn];
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) data[i * 1024 + threadIdx.x] = kept[i];
}
""",
)
WRONG = Source(
    "wrong.cu",
    'extern "C" __global__ void wrong(float* data) {\n#line 12 "templates/blocks/mask.cuh"\n'
    + "".join(f"  data[{number}] = missing_{number};\n" for number in range(20))
    + "}\n",
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache é 内核"))


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)


class FakeNvrtcError(RuntimeError):
    pass


def fake_nvrtc(*, log: str = "", refuse: str = "", archs: tuple[int, ...] = (75, 80, 90, 120)) -> Any:
    """An NVRTC that logs ``log``, and refuses any compile whose options hold ``refuse``."""
    runs: list[tuple[str, ...]] = []

    def run(program: int, options: tuple[str, ...]) -> None:
        runs.append(options)
        if refuse and any(refuse in option for option in options):
            raise FakeNvrtcError("NVRTC_ERROR_INVALID_OPTION (5)")

    def program_log(program: int) -> str:
        if refuse and any(refuse in option for option in runs[-1]):
            return f"nvrtc: error: unrecognized option {refuse} found\n\0"
        return log + "\0"

    return SimpleNamespace(
        NVRTCError=FakeNvrtcError,
        getVersion=lambda: (12, 8),
        getSupportedArchs=lambda: list(archs),
        createProgram=lambda text, name, headers, names: 1,
        destroyProgram=lambda program: None,
        compileProgram=run,
        getProgramLog=program_log,
        getCUBIN=lambda program: b"cubin",  # CuPy drops the last byte, a 0
        runs=runs,
    )


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     48 bytes stack frame, 100 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 360 bytes cmem[0]
ptxas info    : Function properties for helper
    8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_facts_are_read_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_nvrtc", lambda: fake_nvrtc(log=LOG))
    built = compile_source(REVERSE, "sm_90a")
    assert built == Compiled(
        cubin=b"cubin\0",
        arch="sm_90a",
        nvrtc="12.8",
        registers=168,
        spill_bytes=123,
        stack_bytes=48,
        static_shared_bytes=1024,
        seconds=built.seconds,
        log=LOG.strip(),
    )


def test_a_log_without_facts_is_an_error_and_not_a_kernel_of_no_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_nvrtc", fake_nvrtc)
    with pytest.raises(CompileError, match="reported no kernel"):
        compile_source(REVERSE, "sm_90a")


def test_an_nvrtc_that_does_not_know_no_cache_is_asked_without(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = fake_nvrtc(log=LOG, refuse="-no-cache")
    monkeypatch.setattr(compiling, "_nvrtc", lambda: nvrtc)
    assert compile_source(REVERSE, "sm_90a").registers == 168
    assert [("-no-cache" in options) for options in nvrtc.runs] == [True, False]


@pytest.mark.parametrize(("arch", "built"), [("sm_90a", "sm_90a"), ("sm_121", "sm_120"), ("sm_89", "sm_80")])
def test_a_gpu_newer_than_nvrtc_gets_what_runs_on_it(monkeypatch: pytest.MonkeyPatch, arch: str, built: str) -> None:
    monkeypatch.setattr(compiling, "_nvrtc", fake_nvrtc)
    assert buildable_arch(arch) == built


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("sm_70", r"7\.0 \(sm_70\) is too old: flashtune needs 7\.5"),
        (
            "sm_130",
            r"NVRTC 12\.8 can't build for compute capability 13\.0 \(sm_130\)\. It knows 7\.5, 8\.0, 9\.0, 12\.0",
        ),
        ("sm_121a", r"NVRTC 12\.8 can't build for compute capability 12\.1"),
        ("compute_90", "'compute_90' is not an architecture"),
        ("sm_90a --dump", "is not an architecture"),
    ],
)
def test_an_arch_that_can_not_be_built_says_why(monkeypatch: pytest.MonkeyPatch, arch: str, message: str) -> None:
    monkeypatch.setattr(compiling, "_nvrtc", fake_nvrtc)
    with pytest.raises(CompileError, match=message):
        compile_source(REVERSE, arch)


def test_no_cupy_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependency, match=f"needs CuPy.*{INSTALL}"):
        compile_source(REVERSE, "sm_90a")


def test_no_nvrtc_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    stub = SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=missing)))
    monkeypatch.setitem(sys.modules, "cupy", stub)
    monkeypatch.setitem(sys.modules, "cupy.cuda", stub.cuda)
    with pytest.raises(MissingDependency, match=rf"needs NVRTC.*libnvrtc\.so\.13.*{INSTALL}"):
        nvrtc_version()


def elf_bytes(cubin: bytes) -> int:
    """Size of a 64-bit ELF file by its own header: the last of its program headers, section headers and sections."""
    programs, sections = struct.unpack_from("<QQ", cubin, 32)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<HHHH", cubin, 54)
    ends: list[int] = [programs + program_bytes * program_count, sections + section_bytes * section_count]
    for number in range(section_count):
        kind, offset, size = struct.unpack_from("<4xI16xQQ", cubin, sections + section_bytes * number)
        ends.append(offset + (0 if kind == 8 else size))  # 8: a section without content
    return max(ends)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ARCHS)
def test_every_gpu_of_the_table_can_be_built_for(arch: str) -> None:
    if int(re.findall(r"\d+", arch)[0]) not in compiling._nvrtc().getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc_version()} does not know {arch}")
    built = compile_source(REVERSE, arch)
    assert built.cubin.startswith(b"\x7fELF")
    assert len(built.cubin) == elf_bytes(built.cubin)
    assert built.arch == arch
    assert built.nvrtc == nvrtc_version()
    assert 4 <= built.registers <= 32
    assert built.static_shared_bytes == 512
    assert built.spill_bytes == 0
    assert built.seconds > 0


@pytest.mark.nvrtc
@pytest.mark.usefixtures("nvrtc")
def test_spills_are_seen() -> None:
    built = compile_source(SPILLING, "sm_80")
    assert built.registers == 64
    assert built.spill_bytes > 0
    assert built.stack_bytes > 0


@pytest.mark.nvrtc
@pytest.mark.usefixtures("nvrtc")
def test_facts_are_there_each_time_the_same_source_is_compiled() -> None:
    first, second = (compile_source(REVERSE, "sm_90a") for _ in range(2))
    assert (first.registers, first.cubin) == (second.registers, second.cubin)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("nvrtc")
def test_an_error_names_the_template_and_keeps_the_source(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_source(WRONG, "sm_90a")
    error = caught.value
    lines = str(error).splitlines()
    assert lines[0].startswith(f"NVRTC {nvrtc_version()} refused wrong.cu for sm_90a")
    assert lines[1].strip().startswith('templates/blocks/mask.cuh(12): error: identifier "missing_0"')
    assert len(lines) < 12
    assert "missing_19" in error.log
    assert error.source_path is not None
    assert error.source_path.parent == tmp_path / "cache é 内核" / "failed"
    assert error.source_path.read_text(encoding="utf-8") == WRONG.text
    assert str(error.source_path) in lines[-1]


@pytest.mark.nvrtc
@pytest.mark.usefixtures("nvrtc")
def test_an_error_is_told_where_the_source_can_not_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_bytes(b"")
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(occupied))
    with pytest.raises(CompileError, match="could not be saved") as caught:
        compile_source(WRONG, "sm_90a")
    assert caught.value.source_path is None
    assert "missing_0" in str(caught.value)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("nvrtc")
def test_nothing_is_written_where_the_compile_works(tmp_path: Path) -> None:
    compile_source(REVERSE, "sm_90a")
    assert os.listdir(tmp_path) == []
