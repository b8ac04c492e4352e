"""One launch on the CPU: a job file, a program built from generated source, results back. And any kernel, not only
those of a family: :func:`run_kernel`.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from flashtune.codegen.plan.tensor_map import MAP_BYTES
from flashtune.errors import EmulationError, InvalidInput

from .build import build_kernel
from .faults import read_fault
from .program import Program, runnable
from .source import host_text
from .tensors import MAP_ADDRESS, Mapped, Tensor, encode_for_emulator

Array = NDArray[Any]
Argument = Tensor | Mapped | np.generic
"""A pointer to element (0, 0, ...) of a tensor, a tensor map by value, or a number by value."""

FAULT_STATUS = 3
GRACE_SECONDS = 60
"""For a program past its time to say where it hangs, on a machine that is busy."""
MAX_SEED = 2**64
POINTER_BYTES = 8
MAP_ALIGNMENT = 64

_JOB = struct.Struct("<Q12I")
_ENTRY = struct.Struct("<16sQQ6I")
_POINTER = struct.Struct("<2I")
_ALIGNED = 256
"""Bytes: what allocations of CUDA start on."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where in the parameters an address stands: that of what lies ``element`` bytes beyond element (0, 0, ...)."""

    place: int
    element: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor of a launch. Element (0, 0, ...) lies ``beyond`` bytes behind a multiple of 256."""

    tensor: Tensor
    addresses: tuple[Pointer, ...]
    beyond: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """What a program is told. ``params`` are the kernel's parameters with gaps for addresses; memory in bytes."""

    grid: tuple[int, int, int]
    threads: int
    shared_memory: int
    params: bytes
    tensors: Sequence[Placed]

    def run(self, file: BinaryIO, what: str, seed: int, processes: int, timeout: int) -> dict[str, Array]:
        """Runs the program in ``file``, which is closed, and reads what it wrote: values by tensor name. ``what`` is
        for messages."""
        job, places = self._job(seed, processes, timeout)
        what = f"{what}, seed {seed}"
        descriptor, path = tempfile.mkstemp(prefix="flashtune-emulate-")
        try:
            with open(descriptor, "wb") as opened:
                opened.write(job)
            with runnable(file) as program:
                done = self._done(program, path, what, timeout)
                if done.returncode:
                    fault = read_fault(done.stderr, program)
                    if fault is None or done.returncode != FAULT_STATUS:
                        ended = f"the emulator ended with status {done.returncode}: {done.stderr[:500]}"
                        raise EmulationError(f"{what}: {ended}")
                    raise EmulationError(f"{what}: {fault}", fault=fault)
            written = Path(path).read_bytes()
        finally:
            Path(path).unlink(missing_ok=True)
        results: dict[str, Array] = {}
        for placed, place in zip(self.tensors, places, strict=True):
            tensor = placed.tensor
            if tensor.writable:
                memory = np.frombuffer(written, tensor.memory.dtype, tensor.memory.size, place)
                if changed := tensor.gaps(memory):
                    raise EmulationError(f"{what}: wrote {changed} bytes between the elements of {tensor.name}")
                results[tensor.name] = tensor.values(memory)
        return results

    def _done(self, program: Program, job: str, what: str, timeout: int) -> subprocess.CompletedProcess[str]:
        most = timeout + GRACE_SECONDS  # it ends itself, saying where it hangs; this is for one that can't any more
        try:
            return program.run([program.path, job], most)
        except subprocess.TimeoutExpired as error:
            raise EmulationError(f"{what}: the emulator has not ended after {most} s") from error
        except OSError as error:
            reason = f"the emulator can't be started: {error.strerror or error}"
            raise EmulationError(
                f"{what}: {reason}. Programs must be allowed to run from the cache directory"
            ) from error

    def _job(self, seed: int, processes: int, timeout: int) -> tuple[bytes, list[int]]:
        """The job file, as runtime.cpp reads it, and where in it the memory of each tensor lies."""
        addresses = [address for placed in self.tensors for address in placed.addresses]
        pointers = b"".join(_POINTER.pack(each.place, each.element) for each in addresses)
        params_offset = _JOB.size + len(self.tensors) * _ENTRY.size + len(pointers)
        end = params_offset + len(self.params)
        head = _JOB.pack(
            seed, *self.grid, self.threads, self.shared_memory, processes, timeout, len(self.params),
            len(self.tensors), len(addresses), params_offset, 0,
        )  # fmt: skip
        entries, places, contents, first = [], [], [], 0
        for placed in self.tensors:
            tensor = placed.tensor
            place = -(-end // _ALIGNED) * _ALIGNED
            contents.append(bytes(place - end) + tensor.memory.tobytes())
            end = place + tensor.memory.nbytes
            places.append(place)
            begin = tensor.begin * tensor.memory.itemsize
            misaligned = (placed.beyond - begin) % _ALIGNED
            count = len(placed.addresses)
            entries.append(
                _ENTRY.pack(
                    tensor.name.encode(),
                    place,
                    tensor.memory.nbytes,
                    first,
                    count,
                    misaligned,
                    tensor.writable,
                    begin,
                    0,
                )
            )
            first += count
        return b"".join([head, *entries, pointers, self.params, *contents]), places


def check_options(seed: int, processes: int, timeout: int) -> None:
    """Raises :class:`InvalidInput`."""
    if not 0 <= seed < MAX_SEED:
        raise InvalidInput(f"seed={seed} must be at least 0 and below 2**64")
    for name, number in (("processes", processes), ("timeout", timeout)):
        if number < 1:
            raise InvalidInput(f"{name}={number} must be at least 1")


def pack_parameters(arguments: Sequence[Argument]) -> tuple[bytes, list[Placed]]:
    """``arguments`` as CUDA lays them out, each on a multiple of its alignment, and where addresses go."""
    params = bytearray()
    tensors: dict[str, tuple[Tensor, list[Pointer]]] = {}
    for argument in arguments:
        if isinstance(argument, np.generic):
            alignment, packed = argument.itemsize, argument.tobytes()
        elif isinstance(argument, Tensor):
            alignment, packed = POINTER_BYTES, bytes(POINTER_BYTES)
        else:
            alignment, packed = MAP_ALIGNMENT, encode_for_emulator(argument.map)
            assert len(packed) == MAP_BYTES
        params.extend(bytes(-len(params) % alignment))
        if isinstance(argument, Tensor):
            tensors.setdefault(argument.name, (argument, []))[1].append(Pointer(len(params)))
        elif isinstance(argument, Mapped):
            address = Pointer(len(params) + MAP_ADDRESS, argument.map.address)
            tensors.setdefault(argument.tensor.name, (argument.tensor, []))[1].append(address)
        params.extend(packed)
    return bytes(params), [Placed(tensor, tuple(addresses)) for tensor, addresses in tensors.values()]


def run_kernel(
    main: str,
    templates: Mapping[str, str],
    names: Mapping[str, object],
    entry: str,
    arguments: Sequence[Argument],
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int,
    shared_memory: int,
    seed: int = 0,
    processes: int = 1,
    timeout: int = 60,
) -> dict[str, Array]:
    """Runs kernel ``entry`` of the template ``main``, which ``templates`` may hold, on the CPU.

    ``arguments`` are the kernel's parameters in order. Returns what the writable tensors hold, by name. Errors are
    those of :func:`flashtune.emulator.emulate`.
    """
    check_options(seed, processes, timeout)
    params, placed = pack_parameters(arguments)
    program = build_kernel(host_text(main, templates, names, entry))
    return Launch(grid, threads, shared_memory, params, placed).run(program, entry, seed, processes, timeout)
