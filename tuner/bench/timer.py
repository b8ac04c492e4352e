"""Times launches on a device: cold L2, no host time, warm clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flashtune.codegen.gpu.cuda import cupy, runtime
from flashtune.tuner.trial.intervals import PairedRatio, beaten, paired
from flashtune.tuner.trial.timing import MAX_ROUNDS, MIN_ROUNDS, ROUND_LAUNCHES, shuffled, summarise

Launch = Callable[[], None]
K = TypeVar("K")

SCREEN_LAUNCHES = 3
SLOWER = 1.5
"""A config that is this much slower than the best so far is not measured further."""
HOPELESS = 4.0
"""One whose first launch is this much slower is not even screened."""
MEASURE_SECONDS = 0.025
"""GPU time for the launches of a measurement, those of the default included and flushes not counted."""
MIN_LAUNCHES, MAX_LAUNCHES = 5, 40
LONG_SECONDS = 0.3
"""Launches that take longer are repeated once only."""
MIN_FLUSH_BYTES = 32 * 2**20
STEADY = 0.01
"""Warm-up ends when three windows agree within this."""
WINDOW_SECONDS, WARM_SECONDS = 0.05, 1.5
QUEUE = 32
"""Launches queued at once: far below the depth at which the driver blocks the host."""
LEAD = 2
"""Flushes before the first launch of a batch, which take the GPU longer than the host needs for that one."""
MOST_HELD = 512
"""Further flushes that hold the GPU back for a slow host, in a batch: with the launches still below that depth."""
HOST_PART = 0.01
"""Part of a time that the host may have in it: what it can be is known for each launch."""
ATTEMPTS = 4
"""Times that a batch is queued until the GPU is held back for long enough."""
NOT_READY = 600
"""cudaErrorNotReady."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each launch of a config; and of the default's between them, none where there is nothing to compare."""

    own: Sequence[float]
    default: Sequence[float] = ()
    screened: bool = False
    """A rough time only, of a config that is much slower than the best."""

    @property
    def ratio(self) -> PairedRatio | None:
        return paired(self.own, self.default) if len(self.own) == len(self.default) else None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Launches that were queued at once: the seconds of each, and how the host kept ahead of the GPU."""

    seconds: list[float]
    overtaken: list[float]
    """Of each launch the host's seconds for it, if the GPU had come to it before it was queued; else 0."""
    host: float
    """Seconds from the first call to the last."""
    flush: float
    """Seconds of a flush."""

    @property
    def host_counts(self) -> bool:
        """Whether a time may have host time in it that matters."""
        return any(host > HOST_PART * own for own, host in zip(self.seconds, self.overtaken, strict=True))

    def held_next(self, held: int) -> int:
        """Flushes for each launch that hold the GPU back for all that the host does; 0 where one does as it is."""
        if self.flush <= 0:
            return held
        needed = 1.25 * self.host / len(self.seconds) / self.flush
        enough = math.ceil(needed) if needed > 1 else 0
        return max(enough, held + 1) if self.host_counts else min(enough, held)


class Timer:
    """Times launches on a stream of its own. The device must be current at every call.

    Before each timed launch a memset of twice the L2 cache evicts the inputs, and all is queued at once behind two such
    memsets. As a rule each takes the GPU longer than the host needs for the next launch. Where the host is too slow for
    that, a batch is queued again behind so many more that the GPU waits for nothing; `noticed` says where even the most
    are too few.
    """

    def __init__(self, l2_bytes: int) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.stream: int = self._stream.ptr
        self._flush_bytes = max(2 * l2_bytes, MIN_FLUSH_BYTES)
        self._flush = cupy.cuda.alloc(self._flush_bytes)
        self._events = [(runtime.eventCreate(), runtime.eventCreate()) for _ in range(QUEUE)]
        self._lead = runtime.eventCreate(), runtime.eventCreate()
        self._held = 0
        """Flushes for each launch of a batch by which the GPU is held back."""
        self._host_counts = False

    def noticed(self) -> list[str]:
        """Words of `tuned_db.records.THROTTLES` for what was timed since this was asked."""
        words = ["slow_host"] if self._host_counts else []
        self._host_counts = False
        return words

    def seconds(self, launch: Launch, count: int) -> list[float]:
        """Seconds of each of ``count`` launches."""
        return self._seconds([launch] * count)

    def measure(self, launch: Launch, best: float | None, default: Launch | None = None) -> Measured:
        """Times a config, in turns with ``default``; roughly and alone if it is much slower than ``best`` seconds.

        At its power limit a card's clock moves by a fifth, between configs and between the same one's launches a second
        apart. Times of configs that were measured one after the other then differ by more than the configs do; ratios
        to what ran in between hold.
        """
        warm_up = self.seconds(launch, 1)
        if best is not None and warm_up[0] > HOPELESS * best:
            return Measured(warm_up, screened=True)
        first = self.seconds(launch, SCREEN_LAUNCHES)
        rough = min(first)
        if best is not None and rough > SLOWER * best:
            return Measured(first, screened=True)
        if rough > LONG_SECONDS:
            return Measured(first, self.seconds(default, SCREEN_LAUNCHES) if default else ())
        count = min(MAX_LAUNCHES, max(MIN_LAUNCHES, math.ceil(MEASURE_SECONDS / max(rough, 1e-9))))
        if default is None:
            return Measured(self.seconds(launch, count))
        return self._in_turns(launch, default, max(MIN_ROUNDS, count // 2))

    def _in_turns(self, launch: Launch, default: Launch, rounds: int) -> Measured:
        """Each comes first in every other round, so that neither always runs at the clock that the other left."""
        self.seconds(default, 1)
        times = self._seconds([launch, default, default, launch] * math.ceil(rounds / 2))
        firsts, seconds = times[::2], times[1::2]
        own, others = list(firsts), list(seconds)
        own[1::2], others[1::2] = seconds[1::2], firsts[1::2]
        return Measured(own, others)

    def settle(self, launch: Launch) -> None:
        """Runs ``launch`` until clocks and temperature have left their idle state."""
        started = time.monotonic()
        one = max(min(self.seconds(launch, SCREEN_LAUNCHES)), 1e-6)
        count = max(3, min(200, round(WINDOW_SECONDS / one)))
        windows: list[float] = []
        while time.monotonic() - started < WARM_SECONDS:
            windows.append(summarise(self.seconds(launch, count)).median)
            last = windows[-3:]
            if len(last) == 3 and max(last) - min(last) < STEADY * max(last):
                return

    def interleaved(
        self, launches: Mapping[K, Launch], seconds: float, margin: float | None = None
    ) -> dict[K, list[float]]:
        """Medians of each by round, in another order each time, for about ``seconds``.

        All take part in each round. With a ``margin`` those leave which are slower than the fastest by more, so that
        the others get their time; the first is what all are compared with and stays. That is asked every `MIN_ROUNDS`
        rounds, not in each: who is asked often is unlucky once.
        """
        rounds: dict[K, list[float]] = {each: [] for each in launches}
        racing = list(launches)
        started = time.monotonic()
        for number in range(MAX_ROUNDS):
            for each in shuffled(racing, number):
                rounds[each].append(summarise(self.seconds(launches[each], ROUND_LAUNCHES)).median)
            if number + 1 >= MIN_ROUNDS and time.monotonic() - started > seconds:
                break
            if margin is not None and (number + 1) % MIN_ROUNDS == 0:
                slow = beaten({each: rounds[each] for each in racing}, margin)
                racing = [each for each in racing if each not in slow or each == racing[0]]
        return rounds

    def _seconds(self, launches: Sequence[Launch]) -> list[float]:
        times: list[float] = []
        for first in range(0, len(launches), QUEUE):
            for _ in range(ATTEMPTS):
                batch = self._batch(launches[first : first + QUEUE])
                self._held = batch.held_next(self._held)
                if not batch.host_counts:
                    break
            self._host_counts |= batch.host_counts
            times += batch.seconds
        return times

    def _batch(self, launches: Sequence[Launch]) -> _Batch:
        """Times at most `QUEUE` launches."""
        begun = time.perf_counter()
        queued = list(zip(launches, self._events, strict=False))
        flushes = LEAD + min(MOST_HELD, self._held * len(launches))
        lead_start, lead_end = self._lead
        runtime.eventRecord(lead_start, self.stream)
        for _ in range(flushes):
            self._clear()
        runtime.eventRecord(lead_end, self.stream)
        overtaken = []
        for launch, (start, end) in queued:
            self._clear()
            before = time.perf_counter()
            runtime.eventRecord(start, self.stream)
            launch()
            runtime.eventRecord(end, self.stream)
            took = time.perf_counter() - before
            overtaken.append(took if runtime.eventQuery(start) != NOT_READY else 0.0)
        host = time.perf_counter() - begun
        runtime.streamSynchronize(self.stream)
        return _Batch(
            seconds=[runtime.eventElapsedTime(start, end) / 1e3 for _, (start, end) in queued],
            overtaken=overtaken,
            host=host,
            flush=runtime.eventElapsedTime(lead_start, lead_end) / 1e3 / flushes,
        )

    def _clear(self) -> None:
        runtime.memsetAsync(self._flush.ptr, 0, self._flush_bytes, self.stream)
