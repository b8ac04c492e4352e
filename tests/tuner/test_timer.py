"""F14: what the timer reports is the GPU's time, however slow the host is; or it says that it is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from flashtune.tuned_db.records.measurement import SLOWDOWNS, THROTTLES

measure = pytest.importorskip("flashtune.tuner.bench.timer", reason="needs CuPy", exc_type=ImportError)

US = 1e-6
FLUSH = 28 * US
CALL = 2 * US
"""What the host takes for a call of CUDA that launches nothing of ours."""
KERNEL = 7.5 * US


class HostAndGpu:
    """Two clocks: the host's, and when the GPU will have done all that is on the stream. The runtime and ``time``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0
        self.call = CALL
        self.flushes = 0
        self._events: dict[int, float] = {}

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def work(self, host: float, gpu: float) -> None:
        """A call that takes the host so long, and then puts so much on the stream."""
        self.now += host
        self.busy_until = max(self.now, self.busy_until) + gpu

    def launch(self, host: float, kernel: float = KERNEL) -> Callable[[], None]:
        return lambda: self.work(host, kernel)

    def memset_async(self, address: int, value: int, size: int, stream: int) -> None:
        self.flushes += 1
        self.work(self.call, FLUSH)

    def event_create(self) -> int:
        self._events[len(self._events)] = 0.0
        return len(self._events) - 1

    def event_record(self, event: int, stream: int) -> None:
        self.work(self.call, 0.0)
        self._events[event] = self.busy_until

    def event_query(self, event: int) -> int:
        self.now += self.call
        return 0 if self._events[event] <= self.now else measure.NOT_READY

    def event_elapsed_time(self, start: int, end: int) -> float:
        return (self._events[end] - self._events[start]) * 1e3

    def stream_synchronize(self, stream: int) -> None:
        self.now = max(self.now, self.busy_until)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> HostAndGpu:
    made = HostAndGpu()
    runtime = SimpleNamespace(
        memsetAsync=made.memset_async,
        eventCreate=made.event_create,
        eventRecord=made.event_record,
        eventQuery=made.event_query,
        eventElapsedTime=made.event_elapsed_time,
        streamSynchronize=made.stream_synchronize,
    )
    memory = SimpleNamespace(
        alloc=lambda size: SimpleNamespace(ptr=0), Stream=lambda non_blocking: SimpleNamespace(ptr=1)
    )
    monkeypatch.setattr(measure, "runtime", runtime)
    monkeypatch.setattr(measure, "cupy", SimpleNamespace(cuda=memory))
    monkeypatch.setattr(measure, "time", made)
    return made


@pytest.mark.parametrize("host", [3, 20, 30, 75, 150, 400])
@pytest.mark.parametrize("kernel", [2, 7.5, 100, 5000])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_slow_host_is_in_no_time(machine: HostAndGpu, host: float, kernel: float, count: int) -> None:
    timer = measure.Timer(2**20)
    launch = machine.launch(host * US, kernel * US)
    for _ in range(3):
        assert timer.seconds(launch, count) == pytest.approx([kernel * US] * count, rel=measure.HOST_PART)
    assert timer.noticed() == []


def test_a_host_that_is_far_too_slow_is_noticed_once(machine: HostAndGpu) -> None:
    timer = measure.Timer(2**20)
    timer.seconds(machine.launch(0.005), 32)
    assert timer.noticed() == ["slow_host"]
    assert timer.noticed() == []
    assert timer.seconds(machine.launch(5 * US), 32) == pytest.approx([KERNEL] * 32)
    assert timer.noticed() == []
    assert "slow_host" in THROTTLES
    assert "slow_host" in SLOWDOWNS


def test_a_long_kernel_is_measured_by_any_host_at_once(machine: HostAndGpu) -> None:
    """The host can only be in 0.5 % of it."""
    timer = measure.Timer(2**20)
    launches = []
    seconds = timer.seconds(lambda: launches.append(machine.work(0.005, 1.0)), 3)
    assert seconds == pytest.approx([1.0] * 3, rel=measure.HOST_PART)
    assert len(launches) == 3
    assert timer.noticed() == []


def test_a_quick_host_holds_nothing_back(machine: HostAndGpu) -> None:
    """Also after a moment in which it got no core."""
    timer = measure.Timer(2**20)
    hiccup = iter([0.01])

    def launch() -> None:
        machine.work(5 * US + next(hiccup, 0.0), KERNEL)

    assert timer.seconds(launch, 32) == pytest.approx([KERNEL] * 32)
    timer.seconds(launch, 32)
    machine.flushes = 0
    assert timer.seconds(launch, 32) == pytest.approx([KERNEL] * 32)
    assert machine.flushes == 32 + measure.LEAD


def test_a_host_that_changes_its_pace_is_followed(machine: HostAndGpu) -> None:
    """Random delays of 2 to 200 us, which all fall into the spans that are timed."""
    draw = random.Random(14)
    timer = measure.Timer(2**20)
    for _ in range(50):
        pace = draw.uniform(2, 200) * US
        times = timer.seconds(lambda: machine.work(draw.uniform(0, 2) * pace, KERNEL), draw.randint(1, 70))  # noqa: B023
        spoiled = timer.noticed() == ["slow_host"]
        assert spoiled or times == pytest.approx([KERNEL] * len(times), rel=measure.HOST_PART)
    assert not spoiled


def test_interleaved_configs_keep_their_ratio_on_a_slow_host(machine: HostAndGpu) -> None:
    """Of the fault's report: above some 28 us a figure was host time, whatever the kernel."""
    timer = measure.Timer(2**20)
    launches = {each: machine.launch(75 * US, each * US) for each in (7.5, 100.0)}
    rounds = timer.interleaved(launches, 0.1)
    for each, times in rounds.items():
        assert times == pytest.approx([each * US] * len(times), rel=measure.HOST_PART)
    assert timer.noticed() == []
