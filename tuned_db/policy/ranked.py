"""What the rows of one variant come to: rules 2 and 3 of `winners.py`, and what rule 5 says of those who left early."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.records.measurement import STAGES, Measurement, Trust, Variant

from .toolchain import compatible
from .trust import judged, unflagged

BEST_FIRST = tuple(reversed(STAGES))
ALIKE = 0.005
"""Part of a time. Of ten problems on an H200 that were tuned twice, six had another winner the second time, in three of
them by a lead of less than this over the first (tune_twice_8_finalists_h200.json)."""


class Ranked(NamedTuple):
    """One variant of one problem and GPU at its best stage."""

    rows: tuple[Measurement, ...]
    """Its rows at that stage, oldest first."""
    ratio: float | None
    """Median time relative to the default config, or None where no final had one."""
    median_us: float
    low: float | None = None
    high: float | None = None
    """Medians of the ends of its intervals; None where no row has one."""
    stayed: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    """Sessions whose finals it took part in to the end, or left early."""
    tied: int = 1
    """Variants in its tie set, itself and those that may not win included."""
    judged: Trust | None = None
    """Where several sessions have finals of it, what these come to; see :attr:`trust`."""

    @property
    def measurement(self) -> Measurement:
        """The newest row: what is shown as evidence."""
        return self.rows[-1]

    @property
    def variant(self) -> Variant:
        return self.rows[0].variant

    @property
    def config(self) -> Config:
        return self.rows[0].config

    @property
    def needs(self) -> tuple[float, float, float]:
        """Bytes spilled, registers per thread, bytes of shared memory: less is better, and unknown is worst."""
        spills, registers, shared = map(min, zip(*map(_needed, self.rows), strict=True))
        return spills, registers, shared

    @property
    def trust(self) -> Trust | None:
        """In what its finals claim; None where they claim nothing: there are none with a ratio, or it is the default.

        One session needs no others to be judged, and is not until someone asks: most are never shown.
        """
        return self.judged or judged(self.rows, {})

    @property
    def disputed(self) -> bool:
        return self.judged is not None and self.judged.level == "disputed"

    @property
    def may_win(self) -> bool:
        """Rules 4 and 7."""
        bound = self.ratio if self.high is None else self.high
        if self.judged is not None and self.disputed:
            return max(self.judged.worst, bound or 0) <= 1
        return bound is None or bound <= 1

    @property
    def speed(self) -> tuple[bool, float, Variant]:
        """Orders the variants of one stage, the fastest first; a tie set is led by the first."""
        return self.ratio is None, self.median_us if self.ratio is None else self.ratio, self.variant

    @property
    def farthest(self) -> float:
        """A ratio beyond which nothing is tied with this one; rather a little more, as sums are rounded."""
        assert self.ratio is not None
        low, high = self._ends  # who left a final early may have a ratio above both
        return math.inf if self._is_default else max(high + (high - low) / 2, self.ratio * (1 + ALIKE)) * (1 + 1e-9)

    @property
    def _ends(self) -> tuple[float, float]:
        assert self.ratio is not None
        return (self.ratio if self.low is None else self.low), (self.ratio if self.high is None else self.high)

    @property
    def _is_default(self) -> bool:
        """Its interval has no width, as it is compared with itself."""
        return self.low == self.high == 1

    def tied_with(self, leader: Ranked) -> bool:
        """Rule 5."""
        assert self.ratio is not None
        assert leader.ratio is not None
        own = self.ratio - self._ends[0]
        low, high = leader._ends
        if len(self.left & leader.stayed) > len(self.stayed & leader.stayed):
            return False
        reach = own if leader._is_default else min(own, (high - low) / 2)
        return self.ratio - reach <= high or self.ratio <= leader.ratio * (1 + ALIKE)


@dataclass(slots=True)
class Race:
    """The final of a session: its rounds, and the least ratio of those who stayed for all of them."""

    session: frozenset[str]
    """It alone."""
    rounds: int = 0
    fastest: float = math.inf


def races_of(rows: Iterable[Measurement]) -> dict[str, Race]:
    """The finals among ``rows``, by session."""
    found: dict[str, Race] = {}
    for each in rows:
        if each.stage != "final":
            continue
        race = found.get(each.session)
        if race is None:
            race = found[each.session] = Race(frozenset((each.session,)))
        if each.rounds and each.rounds > race.rounds:  # who stayed longest so far had left early
            race.rounds, race.fastest = each.rounds, math.inf
        if each.rounds == race.rounds and each.ratio is not None:
            race.fastest = min(race.fastest, each.ratio)
    return found


def ranked(rows: list[Measurement], races: Mapping[str, Race], toolchain: str | None) -> Ranked:
    """What ``rows`` of one variant come to; see `winners.rank` for ``toolchain``."""
    return _of_one(rows[0], races) if len(rows) == 1 else _of_many(rows, races, toolchain)


def _of_one(row: Measurement, races: Mapping[str, Race]) -> Ranked:
    """:func:`_of_many` of one row: all medians are its own values. Nearly always there is one, and a look-up has little
    time."""
    ratio, median_us, low, high = row.ratio, row.median_us, row.ratio_low, row.ratio_high
    assert median_us is not None
    nothing: frozenset[str] = frozenset()
    stayed, left = nothing, nothing
    if row.stage == "final" and row.rounds:
        race = races[row.session]
        if row.rounds == race.rounds:
            stayed = race.session
        else:
            left = race.session
            ratio = None if ratio is None else max(ratio, race.fastest * (1 + ALIKE))
    return Ranked((row,), ratio, median_us, low, None if low is None else high, stayed, left)


def _of_many(rows: Sequence[Measurement], races: Mapping[str, Race], toolchain: str | None) -> Ranked:
    """Rules 2, 3 and what rule 5 says of those who left early."""
    best = min(rows, key=lambda each: BEST_FIRST.index(each.stage)).stage
    there = [each for each in rows if each.stage == best]
    kept = sorted(compatible(unflagged(there), toolchain), key=lambda each: (each.created, each.id))
    times = [each.median_us for each in kept if each.median_us is not None]
    raced = [each for each in kept if each.stage == "final" and each.rounds]
    left = {each.session for each in raced if each.rounds != races[each.session].rounds}
    ratios = [
        max(each.ratio, races[each.session].fastest * (1 + ALIKE)) if each.session in left else each.ratio
        for each in kept
        if each.ratio is not None
    ]
    return Ranked(
        tuple(kept),
        _median(ratios),
        statistics.median(times),
        *_interval(kept),
        stayed=frozenset(each.session for each in raced) - left,
        left=frozenset(left),
    )


def _interval(rows: Sequence[Measurement]) -> tuple[float | None, float | None]:
    """Medians of both ends, where a row without an interval is as narrow as its ratio; None where none has one."""
    if all(each.ratio_low is None for each in rows):
        return None, None
    ends = [(each.ratio, each.ratio) if each.ratio_low is None else (each.ratio_low, each.ratio_high) for each in rows]
    return _median(low for low, _ in ends), _median(high for _, high in ends)


def _median(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def _needed(row: Measurement) -> tuple[float, float, float]:
    """See :attr:`Ranked.needs`."""
    needed = row.spill_bytes, row.registers, row.shared_bytes
    spills, registers, shared = (math.inf if each is None else each for each in needed)
    return spills, registers, shared
