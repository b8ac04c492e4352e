"""Paired ratios of interleaved rounds, with an interval that assumes no distribution; needs no GPU.

Round by round the time of one config is divided by that of another: drift of clock and temperature, which both share,
cancels. The ratio is the median over rounds, and its interval lies between two of the sorted ratios. By the binomial
distribution of how many of them fall below the true median, it holds that median with at least 95 % probability
(Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2; David and Nagaraja, Order Statistics, section 7.1).

Why not a bootstrap: it promises its 95 % only for many rounds, and there are 9 to 300; it needs a seed to be repeated;
and outliers, which a shared card has, move it where they leave the middle of sorted ratios alone.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")

CONFIDENCE = 0.95
FEWEST_ROUNDS = 6
"""Of 5 ratios even the smallest and the largest hold the median with 93.75 % only."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Time of one relative to another over ``rounds`` rounds. ``low`` and ``high`` are None below `FEWEST_ROUNDS`."""

    median: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 1: one of the two is faster."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def paired(ours: Sequence[float], other: Sequence[float]) -> PairedRatio:
    """Of ours / other, over the rounds that both took part in: one may have left before the other."""
    ratios = sorted(a / b for a, b in zip(ours, other, strict=False))
    count = len(ratios)
    place = interval_place(count)
    low, high = (None, None) if place is None else (ratios[place], ratios[count - 1 - place])
    return PairedRatio(statistics.median(ratios), low, high, count)


def paired_ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """The median of :func:`paired` alone."""
    return paired(ours, other).median


def ratios_to(rounds: Mapping[K, Sequence[float]], default: K) -> dict[K, float]:
    """Paired ratio of each to ``default``, whose own is 1."""
    return {each: paired_ratio(times, rounds[default]) for each, times in rounds.items()}


def beaten(rounds: Mapping[K, Sequence[float]], margin: float) -> set[K]:
    """Those whose whole interval lies above the fastest's time by more than ``margin``, a part of it."""
    fastest = min(rounds, key=lambda each: statistics.median(rounds[each]))
    ratios = {each: paired(times, rounds[fastest]) for each, times in rounds.items()}
    return {each for each, ratio in ratios.items() if ratio.low is not None and ratio.low > 1 + margin}


@functools.cache
def interval_place(count: int) -> int | None:
    """How many of ``count`` sorted values lie outside the interval on either side; None if even all are too few.

    The median lies below the value with this many before it only if at most so many of ``count`` fair coins show heads.
    """
    outside, place = 0, -1
    while 2 * (outside + math.comb(count, place + 1)) <= (1 - CONFIDENCE) * 2**count:
        place += 1
        outside += math.comb(count, place)
    return place if place >= 0 else None
