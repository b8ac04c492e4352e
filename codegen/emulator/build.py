"""From C++ to a program: finds the host's compiler, compiles, keeps what was built in the cache directory."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashtune import settings
from flashtune.errors import CompileError, MissingDependency

from .source import HERE

NAMES = ("c++", "g++", "clang++")
"""Tried in this order where CXX is not set."""
DEBUG = ("-g1", "-gdwarf-4")
"""Lines of templates for reports. DWARF 5 takes the first file of a generated source for the standard input."""
COMMON = (*DEBUG, "-std=c++17", "-fno-exceptions", "-fno-rtti", "-fno-omit-frame-pointer")
KERNEL = (
    "-O1",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
    "-Werror=ignored-attributes",  # __shared__ on a variable of one thread
    "-ffp-contract=fast",  # as NVRTC does
    "-fsanitize=thread",  # a call at each access: hooks.h
    "-fsanitize=alignment,bounds",
)
RUNTIME = ("-O3", "-ffp-contract=fast")
OPTIONAL = ("-march=native", "-ftrivial-auto-var-init=pattern", "-fstack-clash-protection", "-fno-var-tracking")
"""Taken where the compiler knows them. The second fills variables that the kernel forgot to set, the third makes sure
that a stack that is too small is noticed. Without the last a build takes longer: reports need lines alone."""
RUNTIME_FILES = (
    "runtime.cpp", "hooks.h", "block.h", "wgmma.h", "product.h", "warpgroup.h", "tma.h", "mbarrier.h", "matrices.h",
    "operations.h", "schedule.h", "memory.h", "races.h", "order.h", "state.h", "fiber.h",
)  # fmt: skip
COMPILE_SECONDS = 300
MAX_ERROR_LINES = 6


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that works. ``identity`` names it, its version and the processor that it builds for."""

    command: tuple[str, ...]
    identity: str
    optional: tuple[str, ...]

    def run(self, arguments: Iterable[str], text: str = "") -> subprocess.CompletedProcess[str]:
        return _run([*self.command, *arguments], text)


def find_compiler() -> Compiler:
    """The compiler that CXX names, else the first of c++, g++, clang++. Raises :class:`MissingDependency`."""
    return _compiler(os.environ.get("CXX", "").strip(), os.environ.get("PATH", ""))


def build_kernel(text: str) -> Path:
    """The program that runs the kernel of ``text``, from the cache or compiled; :class:`CompileError` if refused."""
    compiler = find_compiler()
    runtime = _runtime(compiler)
    flags = (*COMMON, *KERNEL, *compiler.optional)
    path = _directory() / f"kernel-{_digest(compiler.identity, runtime.name, *flags, text)}"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled, program = Path(scratch, "kernel.o"), Path(scratch, "kernel")
        done = compiler.run([*flags, "-x", "c++", "-c", "-", "-o", str(compiled)], text)
        if done.returncode:
            raise _failure(compiler, done.stderr, text)
        done = compiler.run([str(compiled), str(runtime), "-lm", "-o", str(program)])
        if done.returncode:
            raise _failure(compiler, done.stderr, text)
        os.replace(program, path)
    return path


def _runtime(compiler: Compiler) -> Path:
    """The object file of the runtime, which all kernels share."""
    flags = (*COMMON, *RUNTIME, *compiler.optional)
    contents = [(HERE / name).read_text(encoding="utf-8") for name in RUNTIME_FILES]
    path = _directory() / f"runtime-{_digest(compiler.identity, *flags, *contents)}.o"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled = Path(scratch, "runtime.o")
        done = compiler.run([*flags, "-c", str(HERE / "runtime.cpp"), "-o", str(compiled)])
        if done.returncode:
            raise CompileError(f"{compiler.command[0]} can't build the emulator:\n{done.stderr}", log=done.stderr)
        os.replace(compiled, path)
    return path


@functools.cache
def _compiler(chosen: str, path: str) -> Compiler:
    commands = [shlex.split(chosen)] if chosen else [[name] for name in NAMES]
    found = next((each for each in commands if shutil.which(each[0], path=path)), None)
    if found is None:
        why = f"CXX={chosen[:100]!r} is not found" if chosen else f"none of {', '.join(NAMES)} is found"
        raise MissingDependency(f"The emulator needs a C++ compiler, and {why}. Install g++ or clang++, or set CXX")
    done = _run([*found, "--version"])
    if done.returncode:
        raise MissingDependency(
            f"The emulator needs a C++ compiler, and {found[0]} --version fails: {done.stderr[:300]}"
        )
    optional = tuple(flag for flag in OPTIONAL if _accepts(found, flag))
    return Compiler(tuple(found), json.dumps([found, done.stdout, _processor()]), optional)


def _accepts(command: list[str], flag: str) -> bool:
    arguments = [*command, "-Werror", flag, "-x", "c++", "-c", "-", "-o", os.devnull]
    return _run(arguments, "int main() { return 0; }").returncode == 0


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} has not ended after {COMPILE_SECONDS} s") from error
    except OSError as error:
        raise MissingDependency(f"The C++ compiler {command[0]} can't be run: {error.strerror or error}") from error


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _directory() -> Path:
    path = settings.cache_dir() / "emulator"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(_scratch().name)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Stands in for a cache that can't be used; gone with this process."""
    return tempfile.TemporaryDirectory(prefix="flashtune-emulator-")


def _failure(compiler: Compiler, log: str, text: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines() if "error" in line or "undefined reference" in line]
    lines = lines or [line.strip() for line in log.splitlines() if line.strip()] or ["no message"]
    listed = "".join(f"\n  {line}" for line in lines[:MAX_ERROR_LINES])
    path = _directory() / f"failed-{_digest(text)[:12]}.cpp"
    path.write_text(text, encoding="utf-8")
    hint = ""
    if any("not declared" in line or "undeclared" in line for line in lines):
        hint = "\nWhat is not declared there is not modelled by the emulator: see docs/emulator.md"
    return CompileError(
        f"{compiler.command[0]} refused the generated source:{listed}{hint}\nIt is kept as {path}",
        log=log,
        source_path=path,
    )
