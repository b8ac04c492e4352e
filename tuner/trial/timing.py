"""Numbers from repeated timings; needs no GPU."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")

ROUND_LAUNCHES = 3
"""Launches per config and round in finals."""
MIN_ROUNDS, MAX_ROUNDS = 9, 300
"""From 9 rounds on the interval of a ratio leaves one outlier out on either side (`intervals`). Of 300 it is a sixth of
that of 9: what is left to part the last few of a final, which get there within its time."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one config: median, 20 % and 80 % quantiles, and from how many launches."""

    median: float
    q20: float
    q80: float
    count: int

    @property
    def spread(self) -> float:
        """Distance of the quantiles relative to the median."""
        return (self.q80 - self.q20) / self.median


def summarise(seconds: Sequence[float]) -> Timing:
    """At least one time. A time that is no time (NaN, infinite, not positive) raises :class:`ValueError`."""
    if not seconds:
        raise ValueError("no times")
    bad = next((each for each in seconds if not (math.isfinite(each) and each > 0)), None)
    if bad is not None:
        raise ValueError(f"{bad} s is no time")
    ordered = sorted(seconds)
    return Timing(statistics.median(ordered), _quantile(ordered, 0.2), _quantile(ordered, 0.8), len(ordered))


def shuffled(items: Sequence[K], number: int) -> list[K]:
    """``items`` in the order of round ``number``, another in each: a card at its power limit runs at the clock that the
    config before left, so that none may always come behind the same other."""
    return random.Random(number).sample(items, len(items))


def _quantile(ordered: Sequence[float], part: float) -> float:
    position = part * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
