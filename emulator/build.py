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
from typing import BinaryIO

from flashtune.codegen.cache.cache_folder import EMULATOR, open_entry, read_entry, save_entry, write_entry
from flashtune.errors import CompileError, InvalidInput, MissingDependency
from flashtune.files import shown_path

from .program import EXECUTABLE
from .source import RUNTIME_FOLDER

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


def build_kernel(text: str) -> BinaryIO:
    """The program that runs the kernel of ``text``, open; :class:`CompileError` if the compiler refuses it.

    A descriptor and no path: a name may lead elsewhere a moment later, the program that was checked stays the same.
    """
    compiler = find_compiler()
    runtime = _runtime_name(compiler)
    flags = (*COMMON, *KERNEL, *compiler.optional)
    name = f"kernel-{_digest(compiler.identity, runtime, *flags, text)}"
    if (found := open_entry(EMULATOR, name)) is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="flashtune-emulator-") as scratch:
        linked, compiled, program = (Path(scratch, file) for file in ("runtime.o", "kernel.o", "kernel"))
        linked.write_bytes(_runtime(compiler, runtime))
        done = compiler.run([*flags, "-x", "c++", "-c", "-", "-o", str(compiled)], text)
        if done.returncode:
            raise _failure(compiler, done.stderr, text)
        done = compiler.run([str(compiled), str(linked), "-lm", "-o", str(program)])
        if done.returncode:
            raise _failure(compiler, done.stderr, text)
        write_entry(EMULATOR, name, program.read_bytes(), mode=EXECUTABLE)
        return open_entry(EMULATOR, name) or program.open("rb")


def _runtime_name(compiler: Compiler) -> str:
    contents = [(RUNTIME_FOLDER / name).read_text(encoding="utf-8") for name in RUNTIME_FILES]
    return f"runtime-{_digest(compiler.identity, *COMMON, *RUNTIME, *compiler.optional, *contents)}.o"


def _runtime(compiler: Compiler, name: str) -> bytes:
    """The object file of the runtime, which all kernels share."""
    if (found := read_entry(EMULATOR, name)) is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="flashtune-emulator-") as scratch:
        compiled = Path(scratch, "runtime.o")
        flags = (*COMMON, *RUNTIME, *compiler.optional)
        done = compiler.run([*flags, "-c", str(RUNTIME_FOLDER / "runtime.cpp"), "-o", str(compiled)])
        if done.returncode:
            raise CompileError(f"{compiler.command[0]} can't build the emulator:\n{done.stderr}", log=done.stderr)
        content = compiled.read_bytes()
    write_entry(EMULATOR, name, content)
    return content


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


def _failure(compiler: Compiler, log: str, text: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines() if "error" in line or "undefined reference" in line]
    lines = lines or [line.strip() for line in log.splitlines() if line.strip()] or ["no message"]
    listed = "".join(f"\n  {line}" for line in lines[:MAX_ERROR_LINES])
    hint = ""
    if any("not declared" in line or "undeclared" in line for line in lines):
        hint = "\nWhat is not declared there is not modelled by the emulator: see docs/emulator.md"
    path: Path | None = None
    try:
        path = save_entry(EMULATOR, f"failed-{_digest(text)[:12]}.cpp", text.encode())
        kept = f"It is kept as {shown_path(path)}"
    except (OSError, InvalidInput) as error:
        kept = f"It could not be kept: {error}"
    return CompileError(
        f"{compiler.command[0]} refused the generated source:{listed}{hint}\n{kept}", log=log, source_path=path
    )
