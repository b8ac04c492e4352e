"""`DeviceBench` over host memory: kernels are NumPy functions, the CUDA runtime is ctypes, each launch is a clock tick.

What the device really does is tested in tests/gpu; here it is that good kernels pass and each kind of wrong one fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tuner_fakes import FAMILY, GPU

from flashtune.codegen.bits import from_memory, to_memory
from flashtune.codegen.families.fma_fwd import FmaFwd
from flashtune.codegen.problem import Problem
from flashtune.codegen.reference import plain_attention
from flashtune.tuner.build import Built
from flashtune.tuner.readings import Readings, Watch
from flashtune.tuner.space import make_space
from flashtune.tuner.trial import DeviceLostError, Outcome

bench, check, compare, measure, memory = (
    pytest.importorskip(f"flashtune.tuner.{name}", reason="needs CuPy", exc_type=ImportError)
    for name in ("bench", "check", "compare", "measure", "memory")
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
        self.spoil_input = False
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
        for module in (bench, check, measure, memory):
            patch.setattr(module, "runtime", self.runtime)
        for module in (bench, measure, memory):
            patch.setattr(module, "cupy", cupy)
        patch.setattr(measure, "MIN_FLUSH_BYTES", 1)
        patch.setattr(bench, "_CUDA_ERRORS", (CudaError,))
        patch.setattr(bench, "DeviceGuard", lambda index: contextlib.nullcontext())
        patch.setattr(bench, "device_facts", lambda index: SimpleNamespace(uuid="GPU-fake", driver="580.1"))
        patch.setattr(bench, "load", self.load)
        patch.setattr(bench, "Comparer", HostComparer)
        patch.setattr(bench, "reference_plan", reference_plan)
        self.bench = bench.DeviceBench(0, dataclasses.replace(GPU, l2_bytes=16))

    def alloc(self, size: int) -> Any:
        buffer = ctypes.create_string_buffer(size)
        return SimpleNamespace(ptr=ctypes.addressof(buffer), mem=SimpleNamespace(size=size), keep=buffer)

    def load(self, plan: Any, index: int) -> Any:
        loaded = SimpleNamespace(plan=plan)
        loaded.bind = lambda strides, scale: SimpleNamespace(launch=self.kernel(plan.problem), loaded=loaded)
        return loaded

    def kernel(self, problem: Problem) -> Callable[..., None]:
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
                    stored[1][0, 0, 0, 0] ^= 1
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


def reference_plan(problem: Problem, gpu: Any) -> Any:
    return SimpleNamespace(problem=dataclasses.replace(bench.last_part(problem), out_dtype="float64"))


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)


def test_a_right_kernel_is_measured(simulation: Simulation) -> None:
    outcome = simulation.attempt()
    assert outcome.status == "ok", outcome.message
    assert outcome.stage == "measure"
    assert outcome.seconds == pytest.approx(LAUNCH_SECONDS)
    assert outcome.max_error is not None
    assert outcome.max_error > 0


@pytest.mark.parametrize("head_dim_v", [16, 64])
@pytest.mark.parametrize("limit", [10**6, 10 * 4 * 16])
def test_values_of_another_width(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, limit: int, head_dim_v: int
) -> None:
    """Where all of the output has a reference and where only its last rows have; then with a fault."""
    monkeypatch.setattr(bench, "REFERENCE_ELEMENTS", limit)
    problem = dataclasses.replace(PROBLEM, head_dim_v=head_dim_v)
    config = FmaFwd().default(problem.spec, GPU)
    for wanted in (problem, PROBLEM, problem):  # buffers that the other problem has left
        assert simulation.bench.prepare(wanted) is None
        outcome = simulation.bench.attempt(wanted, config, BUILT, None)
        assert outcome.status == "ok", outcome.message
    simulation.only_at, simulation.change = problem, last_column
    assert "rows" in simulation.bench.attempt(problem, config, BUILT, None).message


def test_a_slow_kernel_is_only_screened(simulation: Simulation) -> None:
    assert simulation.attempt(best=LAUNCH_SECONDS / 2).stage == "screen"
    hopeless = simulation.attempt(best=LAUNCH_SECONDS / 10)
    assert hopeless.timing is not None
    assert hopeless.timing.count == 1


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


@pytest.mark.parametrize(
    "change",
    [zeros, last_column, lse_shifted, lse_not_written, odd_rows_poisoned, behind_the_end, before_the_start],
)
def test_a_wrong_kernel_is_rejected_untimed(simulation: Simulation, change: Change) -> None:
    simulation.change = change
    outcome = simulation.attempt()
    assert outcome.status == "wrong", outcome
    assert outcome.timing is None
    assert outcome.message


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "at-full-size-only"])
def test_a_kernel_that_leaves_what_a_good_one_wrote_is_rejected(simulation: Simulation, everywhere: bool) -> None:
    """D60: it writes even rows only, and the odd ones hold the right values of the kernel before it."""
    assert simulation.attempt().status == "ok"
    simulation.rows = slice(0, None, 2)
    simulation.only_at = None if everywhere else PROBLEM
    worse = simulation.bench.attempt(PROBLEM, dataclasses.replace(CONFIG, num_stages=2), OTHER, None)
    assert worse.status == "wrong"
    assert worse.timing is None
    simulation.rows = slice(None)
    assert simulation.attempt().status == "ok"


def test_the_same_config_first_and_last_of_twelve_takes_the_same_time(simulation: Simulation) -> None:
    """D64: loading takes 1000 launches of time, which no measurement may hold; launches differ by up to 4 %."""
    draw = random.Random(0)
    simulation.duration = lambda first: 1000.0 if first else draw.uniform(0.98, 1.02)
    configs = [CONFIG, *(each for each in make_space(PROBLEM, GPU, FAMILY).configs if each != CONFIG)][:11]
    assert simulation.bench.prepare(PROBLEM) is None
    timings = []
    for number, config in enumerate([*configs, CONFIG]):
        outcome = simulation.bench.attempt(PROBLEM, config, Built(digest=f"{number:064x}", registers=96), None)
        assert outcome.status == "ok", outcome.message
        assert outcome.timing is not None
        timings.append(outcome.timing)
    first, last = timings[0], timings[-1]
    assert first.median == pytest.approx(last.median, rel=first.spread)
    assert 0 < first.spread < 0.04
    assert all(0.98 * LAUNCH_SECONDS <= each.median <= 1.02 * LAUNCH_SECONDS for each in timings)


def test_readings_around_each_measurement_come_with_it(simulation: Simulation) -> None:
    """D65 on the device side: the clock halves while one candidate is timed, first once, then for good."""
    sound_pair, slow_pair = [False, False], [False, True]
    clocks = iter([*sound_pair, *slow_pair, *sound_pair, *slow_pair, *slow_pair])
    simulation.bench._watch = Watch(
        lambda: Readings(990.0 if next(clocks) else 1980.0, throttle=""), pause=lambda seconds: None
    )
    sound = simulation.attempt()
    again = simulation.attempt()
    flagged = simulation.attempt()
    assert [each.readings.throttle for each in (sound, again, flagged)] == ["", "", "slow_clock"]
    assert [each.readings.clock_mhz for each in (sound, again, flagged)] == [1980.0, 1980.0, 990.0]
    assert {each.status for each in (sound, again, flagged)} == {"ok"}
    assert next(clocks, None) is None, "two readings for each of five measurements"


def test_copies_of_a_config_are_interleaved_like_finalists(simulation: Simulation) -> None:
    assert simulation.attempt().status == "ok"
    rounds = simulation.bench.alike(PROBLEM, CONFIG, 2, 0.0)
    assert [len(times) for times in rounds] == [measure.MIN_ROUNDS] * 2


def test_a_kernel_that_changes_its_inputs_is_rejected(simulation: Simulation) -> None:
    simulation.spoil_input = True
    assert "input" in simulation.attempt().message


def test_a_kernel_that_gives_two_results_is_rejected(simulation: Simulation) -> None:
    calls = itertools.count()

    def change(out: np.ndarray, lse: np.ndarray) -> None:
        out.view(np.uint16)[0, 0, 0, 0] ^= next(calls) & 1

    simulation.change = change
    assert "two launches" in simulation.attempt().message


@pytest.mark.parametrize("limit", [10**6, 40 * 4 * 32, 10 * 4 * 32], ids=["all", "last-entry", "last-rows"])
@pytest.mark.parametrize("change", [zeros, lse_shifted, lse_not_written, odd_rows_poisoned])
def test_what_only_the_full_size_shows_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, change: Change, limit: int
) -> None:
    monkeypatch.setattr(bench, "REFERENCE_ELEMENTS", limit)
    simulation.only_at = PROBLEM
    assert simulation.attempt().status == "ok"
    simulation.change = change
    outcome = simulation.attempt()
    assert outcome.status == "wrong"
    assert "rows" in outcome.message


def test_rows_without_a_reference_must_still_be_written(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "REFERENCE_ELEMENTS", 10 * 4 * 32)
    simulation.only_at = PROBLEM

    def change(out: np.ndarray, lse: np.ndarray) -> None:
        out[0, 3] = 0xFFFF

    simulation.change = change
    assert simulation.attempt().status == "wrong"


def test_a_crash_says_that_the_device_is_lost(simulation: Simulation) -> None:
    assert simulation.bench.prepare(PROBLEM) is None
    simulation.crash = True
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        simulation.attempt()


def test_finals_interleave_all_configs(simulation: Simulation) -> None:
    assert simulation.attempt().status == "ok"
    other = dataclasses.replace(CONFIG, num_stages=2)
    rounds = simulation.bench.finals(PROBLEM, [CONFIG, other], 0.0)
    assert {len(times) for times in rounds.values()} == {measure.MIN_ROUNDS}
    assert set(rounds) == {CONFIG, other}


def test_too_large_a_problem_is_skipped_with_its_need(simulation: Simulation) -> None:
    large = dataclasses.replace(PROBLEM, batch=2**12, seqlen_q=2**12, seqlen_k=2**12)
    reason = simulation.bench.prepare(large)
    assert reason is not None
    assert "GB of device memory" in reason


def test_problems_share_inputs_and_stay_correct_when_buffers_grow(simulation: Simulation) -> None:
    assert simulation.attempt().status == "ok"
    longer = dataclasses.replace(PROBLEM, seqlen_q=200, seqlen_k=300)
    assert simulation.bench.prepare(longer) is None
    assert simulation.bench.attempt(longer, CONFIG, BUILT, None).status == "ok"
    assert simulation.attempt().status == "ok"
