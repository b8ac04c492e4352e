"""`DeviceBench` over host memory: kernels are NumPy functions, the CUDA runtime is ctypes, each launch is a clock tick.

And what can be wrong with a kernel. For test_simulated_device.py, test_full_size.py and test_out_of_memory.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tuner_fakes import FAMILY, GPU

from flashtune.codegen.plan.plan import Plan
from flashtune.codegen.problem.bits import from_memory, to_memory
from flashtune.codegen.problem.problem import ITEM_BYTES, Problem
from flashtune.codegen.problem.reference import plain_attention
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.trial.outcome import Outcome

pytest.importorskip("cupy", reason="needs CuPy", exc_type=ImportError)

from flashtune.tuner.bench import checksum, compare, guard, memory
from flashtune.tuner.bench import device_bench as bench
from flashtune.tuner.bench import full_size as full
from flashtune.tuner.bench import sample_check as check
from flashtune.tuner.bench import timer as measure

PROBLEM = Problem(
    dtype="float16", head_dim=32, batch=2, seqlen_q=40, seqlen_k=56, num_heads=4, num_heads_kv=2, causal=True
)
CONFIG = FAMILY.default(PROBLEM.spec, GPU)
BUILT = Built(digest="a" * 64, registers=96, nvrtc="13.5")
OTHER = Built(digest="b" * 64, registers=96, nvrtc="13.5")
LAUNCH_SECONDS = 1e-4
STREAM = 7
"""The one that is timed; 0 is the default stream, which it does not wait for."""

Change = Callable[[np.ndarray, np.ndarray], None]


class CudaError(Exception):
    pass


class Buffer:
    """Device memory; what is freed stays mapped, as in a pool, but nothing may be begun with it any more."""

    def __init__(self, runtime: HostRuntime, size: int) -> None:
        self.memory = ctypes.create_string_buffer(b"\xff" * size, max(size, 1))  # NaN
        self.ptr = ctypes.addressof(self.memory)
        self.mem = SimpleNamespace(size=size)
        self._ranges = runtime.ranges
        self._ranges[self.ptr] = size
        runtime.kept.append(self.memory)

    def __del__(self) -> None:
        del self._ranges[self.ptr]


class HostRuntime:
    """The part of the CUDA runtime that the tuner calls, over host memory. ``memsetAsync`` is ``memset_async`` here.

    No kinder than a device: what is put on a stream is done when that stream is waited for and not before, a copy to
    the host waits for the default stream alone, and memory must be the device's or the host's as a call says.
    """

    CUDARuntimeError = CudaError
    memcpy_host_to_device, memcpy_device_to_host, memcpy_device_to_device = 1, 2, 3

    def __init__(self) -> None:
        self.current: int | None = None
        """The device of this thread."""
        self.launches = 0.0
        self.broken = False
        self.ranges: dict[int, int] = {}
        """Bytes of device memory by address."""
        self.kept: list[Any] = []
        self._streams: dict[int, deque[Callable[[], None]]] = {0: deque(), STREAM: deque()}
        self._events: dict[int, float] = {}
        self._pending: set[int] = set()
        self._names = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        snake = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
        if snake == name:
            raise AttributeError(name)
        return getattr(self, snake)

    @contextlib.contextmanager
    def guard(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def holds(self, address: int, size: int) -> bool:
        return any(first <= address and address + size <= first + length for first, length in self.ranges.items())

    def must_hold(self, *wanted: tuple[int, int]) -> None:
        assert self.current == 0, "the device is not current"
        for address, size in wanted:
            assert self.holds(address, size), f"{size} bytes at {address:#x} are not the device's"

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        assert self.current == 0, "the device is not current"
        self._streams[stream].append(work)

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        here = (self.holds(source, size), self.holds(to, size))
        known = {1: (False, True), 2: (True, False), 3: (True, True)}
        assert here == known[kind], f"kind {kind} of copy from {source:#x} to {to:#x}"
        self.enqueue(0, lambda: ctypes.memmove(to, source, size) and None)
        if kind == self.memcpy_device_to_host:
            self.stream_synchronize(0)

    def memset_async(self, address: int, value: int, size: int, stream: int) -> None:
        self.must_hold((address, size))
        self.enqueue(stream, lambda: ctypes.memset(address, value, size) and None)

    def stream_synchronize(self, stream: int) -> None:
        waiting = self._streams[stream]
        while waiting and not self.broken:
            waiting.popleft()()
        if self.broken:
            raise CudaError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def device_synchronize(self) -> None:
        for stream in self._streams:
            self.stream_synchronize(stream)

    def mem_get_info(self) -> tuple[int, int]:
        return 2**32, 2**33

    def event_create(self) -> int:
        return next(self._names)

    def event_record(self, event: int, stream: int) -> None:
        def record() -> None:
            self._events[event] = self.launches
            self._pending.discard(event)

        self._pending.add(event)
        self.enqueue(stream, record)

    def event_query(self, event: int) -> int:
        return 600  # the GPU is always behind the host

    def event_elapsed_time(self, start: int, end: int) -> float:
        if self._pending & {start, end}:
            raise CudaError("cudaErrorNotReady: device not ready")
        return (self._events[end] - self._events[start]) * LAUNCH_SECONDS * 1e3


def view(address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    stored = {"float64": np.float64, "float32": np.float32}.get(dtype, np.uint16)
    size = int(np.prod(shape)) * np.dtype(stored).itemsize
    raw = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(raw, stored).reshape(shape)


class Simulation:
    """A bench whose candidates compute rightly, then let ``change`` spoil output and LSE in memory form."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runtime = HostRuntime()
        self.change: Change = lambda out, lse: None
        self.refuse: Callable[[], None] = lambda: None
        """Called at each launch of a candidate: may raise what the driver says of it at once."""
        self.crash = False
        self.spoil_input = ""
        """The input whose last element candidates change: q, k or v."""
        self.beside_workspace = ""
        """Where candidates write beside their workspace: ``before`` or ``behind`` it."""
        self.largest = sys.maxsize
        """Bytes of the largest buffer that can still be had."""
        self.errors = CudaError
        self.only_at: Problem | None = None
        self.rows = slice(None)
        """Rows of the output that candidates write."""
        self.duration: Callable[[bool], float] = lambda first: 1.0
        """Ticks of a launch, the first one of a loaded kernel or another."""
        self._results: dict[tuple[Any, ...], Any] = {}
        pool = SimpleNamespace(free_bytes=lambda: 0)
        cupy = SimpleNamespace(
            cuda=SimpleNamespace(alloc=self.alloc, Stream=self.stream),
            get_default_memory_pool=lambda: pool,
            __version__="14.0",
        )
        for module in (bench, check, full, guard, measure, memory):
            patch.setattr(module, "runtime", self.runtime)
        for module in (bench, measure, memory):
            patch.setattr(module, "cupy", cupy)
        patch.setattr(measure, "MIN_FLUSH_BYTES", 1)
        patch.setattr(memory, "CHUNK", 1009)  # so that inputs are made of several
        patch.setattr(bench, "_CUDA_ERRORS", (CudaError,))
        patch.setattr(bench, "DeviceGuard", self.runtime.guard)
        patch.setattr(bench, "device_facts", lambda index: SimpleNamespace(uuid="GPU-fake", driver="580.1"))
        for module in (bench, full):
            patch.setattr(module, "load", self.load)
        patch.setattr(full, "Comparer", functools.partial(HostComparer, self.runtime))
        patch.setattr(full, "Checksum", functools.partial(HostChecksum, self.runtime))
        self.bench = bench.DeviceBench(0, dataclasses.replace(GPU, l2_bytes=16))

    def alloc(self, size: int) -> Buffer:
        assert self.runtime.current == 0, "the device is not current"
        if size > self.largest:
            raise bench.OutOfMemoryError(size, size)
        return Buffer(self.runtime, size)

    def stream(self, *, non_blocking: bool) -> Any:
        assert non_blocking, "one that waits for the default stream is not what the tuner times on"
        return SimpleNamespace(ptr=STREAM)

    def load(self, plan: Plan, index: int) -> Any:
        assert index == 0
        loaded = SimpleNamespace(plan=plan)

        def bind(strides: Any, scale: float) -> Any:
            assert strides == memory.contiguous(plan.problem)
            return SimpleNamespace(launch=self.kernel(plan, scale), loaded=loaded)

        loaded.bind = bind
        return loaded

    def right(self, problem: Problem, scale: float, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        key = problem, scale, *(each.tobytes() for each in (q, k, v))
        if key not in self._results:
            values = [from_memory(each, problem.dtype) for each in (q, k, v)]
            self._results[key] = plain_attention(*values, causal=problem.causal, scale=scale)
        return self._results[key]

    def kernel(self, plan: Plan, scale: float) -> Callable[..., None]:
        problem = plan.problem
        candidate = not problem.out_dtype
        loaded: list[bool] = []
        *shapes, out_shape = problem.shapes
        lse_shape = problem.batch, problem.num_heads, problem.seqlen_q
        lse_dtype = "float64" if problem.out_dtype == "float64" else "float32"

        def launch(q: int, k: int, v: int, out: int, lse: int, stream: int, workspace: int = 0) -> None:
            items = [ITEM_BYTES[each] for each in (*[problem.dtype] * 3, problem.spec.output, lse_dtype)]
            sizes = [math.prod(shape) * item for shape, item in zip((*problem.shapes, lse_shape), items, strict=True)]
            self.runtime.must_hold(*zip((q, k, v, out, lse), sizes, strict=True))
            assert not any(each % problem.alignment for each in (q, k, v, out)), f"not aligned as {problem} says"
            assert bool(workspace) == bool(plan.workspace_bytes)
            if workspace:
                assert workspace % 16 == 0
                self.runtime.must_hold((workspace, plan.workspace_bytes))
            if candidate:
                self.refuse()
            self.runtime.enqueue(stream, lambda: run(q, k, v, out, lse, workspace))

        def run(q: int, k: int, v: int, out: int, lse: int, workspace: int) -> None:
            self.runtime.launches += self.duration(not loaded)
            loaded.append(True)
            if candidate and self.crash:
                self.runtime.broken = True
                return
            stored = [view(at, problem.dtype, shape) for at, shape in zip((q, k, v), shapes, strict=True)]
            right, right_lse = self.right(problem, scale, *stored)
            out_view, lse_view = view(out, problem.spec.output, out_shape), view(lse, lse_dtype, lse_shape)
            if workspace:
                ctypes.memset(workspace, 0x5A, plan.workspace_bytes)
            if problem.out_dtype == "float64":
                out_view[...], lse_view[...] = right, right_lse
                return
            made = to_memory(right.astype(np.float32), problem.dtype)
            made_lse = right_lse.astype(np.float32)
            if self.only_at in (None, problem):
                out_view[:, self.rows], lse_view[...] = made[:, self.rows], made_lse
                self.change(out_view, lse_view)
                if self.spoil_input:
                    stored["qkv".index(self.spoil_input)][-1, -1, -1, -1] = 0x3C01
                if self.beside_workspace and workspace:
                    behind = plan.workspace_bytes if self.beside_workspace == "behind" else -1
                    ctypes.memset(workspace + behind, 0, 1)
            else:
                out_view[...], lse_view[...] = made, made_lse

        return launch

    def attempt(self, best: float | None = None) -> Outcome:
        assert self.bench.prepare(PROBLEM) is None
        outcome: Outcome = self.bench.attempt(PROBLEM, CONFIG, BUILT, best)
        return outcome


class HostComparer:
    """templates/compare.cu.jinja in NumPy."""

    def __init__(self, runtime: HostRuntime, spec: Any, gpu: Any) -> None:
        self.runtime = runtime
        self.spec = spec

    def compare(self, arena: Any, *, stream: int, **given: int) -> Any:
        dtype, rows, compared = self.spec.output, given["total_rows"], given["total_rows"] - given["first_row"]
        row = ITEM_BYTES[dtype] * self.spec.value_dim
        lse = given["lse_count"] // given["lse_length"] * given["lse_stride"] * 4
        self.runtime.must_hold((given["out"], rows * row), (given["reference"], compared * self.spec.value_dim * 8))
        self.runtime.must_hold((given["lse"], lse), (given["reference_lse"], given["lse_count"] * 8))
        found: list[Any] = []
        self.runtime.enqueue(stream, lambda: found.append(self.difference(**given)))
        self.runtime.stream_synchronize(stream)
        return found[0]

    def difference(self, **given: int) -> Any:
        dtype, dim = self.spec.output, self.spec.value_dim
        rows, first = given["total_rows"], given["first_row"]
        ours = from_memory(view(given["out"], dtype, (rows, dim)), dtype).astype(np.float64)
        reference = view(given["reference"], "float64", (rows - first, dim))
        error = np.linalg.norm(ours[first:] - reference, axis=1)
        good = error <= compare.ROW_TOLERANCE[dtype] * np.linalg.norm(reference, axis=1)
        bad = int((~good).sum()) + int((~np.isfinite(ours[:first]).all(axis=1)).sum())
        count, length, stride = given["lse_count"], given["lse_length"], given["lse_stride"]
        lse = view(given["lse"], "float32", (count // length, stride))[:, stride - length :]
        exact = view(given["reference_lse"], "float64", (count // length, length))
        with np.errstate(invalid="ignore"):
            near = (lse == exact) | (np.abs(lse - exact) <= compare.LSE_TOLERANCE * np.maximum(1, np.abs(exact)))
        return compare.OutputDifference(bad, int((~near).sum()), 0.0)


class HostChecksum:
    """tuner/bench/checksum.py on the host."""

    def __init__(self, runtime: HostRuntime, gpu: Any, arena: Any, stream: int) -> None:
        self.runtime = runtime
        self.stream = stream
        self.asked = 0
        self.found: list[int] = []

    def begin(self) -> None:
        self.asked = 0
        self.runtime.enqueue(self.stream, self.found.clear)

    def ask(self, address: int, size: int) -> None:
        assert address % 16 == 0
        assert self.asked < checksum.MOST
        self.asked += 1
        self.runtime.must_hold((address, size))
        self.runtime.enqueue(self.stream, lambda: self.found.append(zlib.crc32(ctypes.string_at(address, size))))

    def answers(self) -> list[int]:
        self.runtime.stream_synchronize(self.stream)
        return list(self.found)


def zeros(out: np.ndarray, lse: np.ndarray) -> None:
    out[...] = 0


def last_column(out: np.ndarray, lse: np.ndarray) -> None:
    out[..., -1] = out[..., -2]


def lse_shifted(out: np.ndarray, lse: np.ndarray) -> None:
    lse += 0.01


def lse_not_written(out: np.ndarray, lse: np.ndarray) -> None:
    lse[...] = np.nan


def odd_rows_poisoned(out: np.ndarray, lse: np.ndarray) -> None:
    out[:, 1::2] = 0xFFFF


def behind_the_end(out: np.ndarray, lse: np.ndarray) -> None:
    ctypes.memset(out.ctypes.data + out.nbytes, 0, 2)


def before_the_start(out: np.ndarray, lse: np.ndarray) -> None:
    ctypes.memset(out.ctypes.data - 2, 0, 2)
