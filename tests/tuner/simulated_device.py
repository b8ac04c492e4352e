"""`DeviceBench` over host memory: kernels are NumPy functions, the CUDA runtime is ctypes, each launch is a clock tick.

And what can be wrong with a kernel. For test_simulated_device.py, test_full_size.py and test_out_of_memory.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import re
import sys
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tuner_fakes import FAMILY, GPU

from flashtune.codegen.bits import from_memory, to_memory
from flashtune.codegen.problem import Problem
from flashtune.codegen.reference import plain_attention
from flashtune.tuner.build import Built
from flashtune.tuner.trial import Outcome

bench, check, compare, exact, full, guard, measure, memory = (
    pytest.importorskip(f"flashtune.tuner.{name}", reason="needs CuPy", exc_type=ImportError)
    for name in ("bench", "check", "compare", "exact", "full", "guard", "measure", "memory")
)

PROBLEM = Problem(
    dtype="float16", head_dim=32, batch=2, seqlen_q=40, seqlen_k=56, num_heads=4, num_heads_kv=2, causal=True
)
CONFIG = FAMILY.default(PROBLEM.spec, GPU)
BUILT = Built(digest="a" * 64, registers=96, nvrtc="13.5")
OTHER = Built(digest="b" * 64, registers=96, nvrtc="13.5")
LAUNCH_SECONDS = 1e-4

Change = Callable[[np.ndarray, np.ndarray], None]


class CudaError(Exception):
    pass


class HostRuntime:
    """The part of the CUDA runtime that the tuner calls, over host memory. ``memsetAsync`` is ``memset_async`` here."""

    CUDARuntimeError = CudaError
    memcpy_host_to_device = memcpy_device_to_host = memcpy_device_to_device = 0

    def __init__(self) -> None:
        self.launches = 0.0
        self.broken = False
        self._events: dict[int, float] = {}
        self._names = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        snake = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
        if snake == name:
            raise AttributeError(name)
        return getattr(self, snake)

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        ctypes.memmove(to, source, size)

    def memset_async(self, address: int, value: int, size: int, stream: int) -> None:
        ctypes.memset(address, value, size)

    def stream_synchronize(self, stream: int) -> None:
        self.device_synchronize()

    def device_synchronize(self) -> None:
        if self.broken:
            raise CudaError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def mem_get_info(self) -> tuple[int, int]:
        return 2**32, 2**33

    def event_create(self) -> int:
        return next(self._names)

    def event_record(self, event: int, stream: int) -> None:
        self._events[event] = self.launches

    def event_query(self, event: int) -> int:
        return 600  # the GPU is always behind the host

    def event_elapsed_time(self, start: int, end: int) -> float:
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
        pool = SimpleNamespace(free_bytes=lambda: 0)
        cupy = SimpleNamespace(
            cuda=SimpleNamespace(alloc=self.alloc, Stream=lambda non_blocking: SimpleNamespace(ptr=0)),
            get_default_memory_pool=lambda: pool,
            __version__="14.0",
        )
        for module in (bench, check, full, guard, measure, memory):
            patch.setattr(module, "runtime", self.runtime)
        for module in (bench, measure, memory):
            patch.setattr(module, "cupy", cupy)
        patch.setattr(measure, "MIN_FLUSH_BYTES", 1)
        patch.setattr(bench, "_CUDA_ERRORS", (CudaError,))
        patch.setattr(bench, "DeviceGuard", lambda index: contextlib.nullcontext())
        patch.setattr(bench, "device_facts", lambda index: SimpleNamespace(uuid="GPU-fake", driver="580.1"))
        for module in (bench, full):
            patch.setattr(module, "load", self.load)
        patch.setattr(full, "Comparer", HostComparer)
        patch.setattr(full, "Checksum", HostChecksum)
        patch.setattr(full, "reference_plan", reference_plan)
        self.bench = bench.DeviceBench(0, dataclasses.replace(GPU, l2_bytes=16))

    def alloc(self, size: int) -> Any:
        if size > self.largest:
            raise bench.OutOfMemoryError(size, size)
        buffer = ctypes.create_string_buffer(size)
        return SimpleNamespace(ptr=ctypes.addressof(buffer), mem=SimpleNamespace(size=size), keep=buffer)

    def load(self, plan: Any, index: int) -> Any:
        loaded = SimpleNamespace(plan=plan)
        loaded.bind = lambda strides, scale: SimpleNamespace(launch=self.kernel(plan), loaded=loaded)
        return loaded

    def kernel(self, plan: Any) -> Callable[..., None]:
        problem = plan.problem
        candidate = not problem.out_dtype
        memory_results: dict[bytes, Any] = {}
        loaded: list[bool] = []

        def launch(q: int, k: int, v: int, out: int, lse: int, stream: int, workspace: int = 0) -> None:
            self.runtime.launches += self.duration(not loaded)
            loaded.append(True)
            if candidate and self.crash:
                self.runtime.broken = True
                return
            *shapes, out_shape = problem.shapes
            stored = [view(at, problem.dtype, shape) for at, shape in zip((q, k, v), shapes, strict=True)]
            key = b"".join(each.tobytes()[:64] for each in stored)
            if key not in memory_results:
                values = [from_memory(each, problem.dtype) for each in stored]
                memory_results[key] = plain_attention(*values, causal=problem.causal)
            right, right_lse = memory_results[key]
            exact = problem.out_dtype == "float64"
            out_view = view(out, problem.spec.output, out_shape)
            lse_view = view(lse, "float64" if exact else "float32", right_lse.shape)
            if exact:
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

    def __init__(self, spec: Any, gpu: Any) -> None:
        self.spec = spec

    def compare(self, arena: Any, **given: Any) -> Any:
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
        return compare.Difference(bad, int((~near).sum()), 0.0)


class HostChecksum:
    """tuner/checksum.py on the host."""

    def __init__(self, gpu: Any, arena: Any, stream: int) -> None:
        self.asked: list[int] = []

    def begin(self) -> None:
        self.asked = []

    def ask(self, address: int, size: int) -> None:
        self.asked.append(zlib.crc32(ctypes.string_at(address, size)))

    def answers(self) -> list[int]:
        return self.asked


def reference_plan(problem: Problem, gpu: Any) -> Any:
    return SimpleNamespace(problem=dataclasses.replace(exact.last_part(problem), out_dtype="float64"))


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
