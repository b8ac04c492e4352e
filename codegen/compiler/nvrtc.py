"""From source to cubin with NVRTC, in this process and without a GPU or driver. The only user of NVRTC.

What the assembler says about registers, spills and memory comes along, so a config can be judged before it runs.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtune.codegen.cache.cache_folder import FAILED, save_entry
from flashtune.codegen.gpu.gpu import OLDEST
from flashtune.errors import INSTALL, CompileError, InvalidInput, MissingDependency
from flashtune.files import shown_path

from .render import Source

logger = logging.getLogger("flashtune")

OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
"""Options besides the architecture. They are part of the key of a cached cubin."""
NO_CACHE = "-no-cache"
"""Newer NVRTCs keep a cache of their own, and a hit in it leaves out what ``--ptxas-options=-v`` prints."""

MAX_ERROR_LINES = 6
KEPT = "Generated source: "
"""Before the path of a refused source, in the last line of a message."""

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SLOW = re.compile(r".*(?:wgmma|setmaxnreg).*(?:serialized|ignored).*", re.IGNORECASE)
"""What ptxas says where it gives up on overlap. Numbers of messages change between versions, so the text is matched."""
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what the compiler says of it.

    ``arch`` is what it was built for, ``nvrtc`` the version that built it ('13.5'). Registers are per thread, spills
    (stores and loads) and stack in bytes per thread, static shared memory in bytes per block; of several functions the
    largest, spills summed. ``seconds`` is the compile time, also where it came from the disk cache.
    """

    cubin: bytes
    arch: str
    nvrtc: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    seconds: float
    log: str

    @property
    def complaint(self) -> str:
        """The compiler's first word that it runs matrix products one by one or keeps registers as they are, or ''."""
        found = _SLOW.search(self.log)
        return found[0].strip() if found else ""


def nvrtc_version() -> str:
    """The version of the NVRTC in use, e.g. '13.5'."""
    major, minor = _nvrtc().getVersion()
    return f"{major}.{minor}"


def compile_source(source: Source, arch: str) -> Compiled:
    """Compiles ``source`` for ``arch`` (``sm_90a``). Needs no GPU.

    Raises :class:`CompileError` with the first error lines, which name template files, and the path of the saved
    source; also where this NVRTC can't build for ``arch``. :class:`MissingDependency` without CuPy or NVRTC.
    """
    target = buildable_arch(arch)
    version = nvrtc_version()
    started = time.perf_counter()
    cubin, log, error = _run(source, (f"--gpu-architecture={target}", *OPTIONS, NO_CACHE))
    if cubin is None and "no-cache" in log:  # an NVRTC that does not know the option
        cubin, log, error = _run(source, (f"--gpu-architecture={target}", *OPTIONS))
    seconds = time.perf_counter() - started
    if cubin is None:
        raise _failure(source, target, version, log, error)
    registers = [int(found) for found in _REGISTERS.findall(log)]
    if not registers:
        raise _failure(source, target, version, log, "the compiler reported no kernel")
    frames = [tuple(int(number) for number in found) for found in _STACK.findall(log)]
    return Compiled(
        cubin=cubin,
        arch=target,
        nvrtc=version,
        registers=max(registers),
        spill_bytes=sum(stores + loads for _, stores, loads in frames),
        stack_bytes=max((stack for stack, _, _ in frames), default=0),
        static_shared_bytes=max((int(found) for found in _SHARED.findall(log)), default=0),
        seconds=seconds,
        log=log,
    )


def buildable_arch(arch: str) -> str:
    """``arch``, or what this NVRTC can build that runs on it; :class:`CompileError` where there is nothing.

    A cubin runs on later minor versions of its compute capability. So a GPU that is newer than NVRTC gets the newest
    older minor version, unless the name has a suffix (``sm_90a``), which asks for instructions of one chip.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise CompileError(f"{arch[:40]!r} is not an architecture that NVRTC can build for; one is sm_90a")
    major, minor, suffix = int(match[1]), int(match[2]), match[3]
    what = f"compute capability {major}.{minor} ({arch})"
    if (major, minor) < OLDEST:
        raise CompileError(f"{what} is too old: flashtune needs {OLDEST[0]}.{OLDEST[1]} or newer")
    known = [divmod(number, 10) for number in _nvrtc().getSupportedArchs()]
    if (major, minor) in known:
        return arch
    older = [each for each in known if each[0] == major and each[1] < minor]
    if older and not suffix:
        found = f"sm_{major}{max(older)[1]}"
        logger.info("NVRTC %s does not know %s; building for %s, which runs on it", nvrtc_version(), what, found)
        return found
    listed = ", ".join(f"{each[0]}.{each[1]}" for each in sorted(known))
    raise CompileError(
        f"NVRTC {nvrtc_version()} can't build for {what}. It knows {listed}. "
        f'For a GPU newer than these, update it: pip install -U "flashtune[cuda13]"'
    )


def _nvrtc() -> Any:
    """CuPy's NVRTC binding, once it is known to work."""
    from flashtune.codegen.gpu.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependency(f"Compiling needs NVRTC, which can't be loaded ({error}): {INSTALL}") from error
    return nvrtc


def _run(source: Source, options: tuple[str, ...]) -> tuple[bytes | None, str, str]:
    """The cubin (None if NVRTC refused), the log, and NVRTC's own word for the error."""
    nvrtc = _nvrtc()
    names, texts = [name.encode() for name, _ in source.headers], [text.encode() for _, text in source.headers]
    program = nvrtc.createProgram(source.text, source.name, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            return None, _log(nvrtc, program), str(error)
        # CuPy takes a cubin for a string and strips its last byte, always a 0: drivers don't mind, disassemblers do.
        return nvrtc.getCUBIN(program) + b"\0", _log(nvrtc, program), ""
    finally:
        nvrtc.destroyProgram(program)


def _log(nvrtc: Any, program: int) -> str:
    log: str = nvrtc.getProgramLog(program)
    return log.rstrip("\0").strip()


def _failure(source: Source, arch: str, version: str, log: str, error: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and " detected in the compil" not in line]
    errors = errors or lines or [error]
    shown = errors[:MAX_ERROR_LINES]
    if len(errors) > len(shown):
        shown.append(f"... and {len(errors) - len(shown)} more")
    path, where = _save(source, arch)
    listed = "".join(f"\n  {line}" for line in shown)
    return CompileError(
        f"NVRTC {version} refused {source.name} for {arch}:{listed}\n{where}",
        log=log or error,
        source_path=path,
    )


def _save(source: Source, arch: str) -> tuple[Path | None, str]:
    """Keeps a refused source for inspection. Returns its path (None if it can't be kept) and a line that says so."""
    name = f"{source.name.split('.')[0]}-{arch}-{source.digest[:12]}.cu"
    try:
        path = save_entry(FAILED, name, source.expanded().encode())
    except InvalidInput as error:
        return None, f"The source could not be saved: {error}"
    except OSError as error:
        where = shown_path(error.filename or name)
        return None, f"The source could not be saved as {where} ({error.strerror or error})"
    return path, f"{KEPT}{shown_path(path)}"
