"""The policy by which winners are derived from measurements. Pure functions over records.

Winners are not stored, so databases merge without conflicts and a better policy needs no migration. The policy:

1. Only ``ok`` rows count. A variant (family, config, source) that was ever ``wrong``, made an ``illegal_access`` or is
   blocklisted (`blocklist.py`) for the spec is out, on every GPU.
2. A variant counts at its best stage only: finals, where candidates and default ran interleaved, before ``measure``
   before ``screen``. Variants with finals come before those without. Rows that were made while the card was slowed
   down or shared (`Measurement.flagged`) count only where a variant has no other at that stage. Of several compilers
   the nearest to ours counts (`toolchain.py`): what was faster with one may be slower with the next.
3. Within a stage, variants with a ratio to the default config of the same session come before those without, which are
   ordered by time: ratios compare across sessions, units and days, microseconds don't. The ratio is the median over
   paired rounds; rows of the first schema have that of medians. Several rows of one variant count by their median, and
   so do the ends of their intervals: one lucky run wins nothing.
4. A winner is never slower than the default: its interval must not reach above 1, where there is none its ratio.
   The default's own is 1 without an interval around it, so it wins where nothing is clearly faster.
5. What can't be told apart is a tie set: all whose interval overlaps that of the fastest. Two 95 % intervals come apart
   by chance less often than a test at 95 % errs (Schenker and Gentleman, The American Statistician 55, 2001), which is
   wanted: another tuning is to agree. An interval that is wider than the fastest's counts as no wider: to be measured
   badly must not help. Rows without an interval are as narrow as their ratio. Those within `ALIKE` of the fastest are
   tied with it too: they may be told apart one day and change places the next. Who left a final early, with fewer
   rounds than the default, was slower than the fastest there by more than that, round by round: it is not tied with
   those who stayed, unless in as many finals it did so too, and its ratio counts as no less than that of the fastest of
   them and `ALIKE`, whatever its few rounds say.
6. In a tie set the one wins that needs least: spilled bytes, then registers, then shared memory, each the least that
   was recorded; then family, config key and source digest, which are the same everywhere and always. What is left is
   ordered likewise, set by set.
7. What is disputed (`trust.py`: its newest session does not reproduce the others) comes behind all else that is faster
   than the default. Where there is nothing else, it wins only if rule 4 holds for each of its witnesses: a median of
   sessions that differ says little. Ratios decide this too, so that sessions of other cards count.

The same rows in any order give the same winner, on every machine with the same compiler.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtune.codegen.config import Config

from . import blocklist
from .records import STAGES, Measurement, Trust, Variant
from .toolchain import compatible
from .trust import defaults, judged, unflagged

BEST_FIRST = tuple(reversed(STAGES))
ALIKE = 0.005
"""Part of a time. Of ten problems on an H200 that were tuned twice, six had another winner the second time, in three of
them by a lead of less than this over the first (tune_twice_8_finalists_h200.json)."""
RENDERED = 64
"""Configs that are rendered to find one whose source is as stored: two finals of an older source, and more."""
MOST_TIED = 32
"""Variants in a tie set: more than a final has. Where the set ends among equals, noise would say who is in it."""


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

    def tied_with(self, leader: Ranked) -> bool:
        """Rule 5."""
        assert self.ratio is not None
        assert leader.ratio is not None
        own = self.ratio - (self.ratio if self.low is None else self.low)
        high = leader.ratio if leader.high is None else leader.high
        width = high - (leader.ratio if leader.low is None else leader.low)
        if len(self.left & leader.stayed) > len(self.stayed & leader.stayed):
            return False
        is_default = leader.low == leader.high == 1  # its interval has no width, as it is compared with itself
        reach = own if is_default else min(own, width / 2)
        return self.ratio - reach <= high or self.ratio <= leader.ratio * (1 + ALIKE)


def rank(
    measurements: Iterable[Measurement], barred: Collection[Variant] = (), *, toolchain: str | None = None
) -> list[Ranked]:
    """Variants of one problem and one GPU, best first; see the policy above.

    ``barred`` adds to rule 1. ``toolchain`` is the NVRTC version of rule 2, None for the one here.
    """
    return list(_ranking(measurements, barred, toolchain))


def _ranking(
    measurements: Iterable[Measurement], barred: Collection[Variant], toolchain: str | None = None
) -> Iterator[Ranked]:
    """:func:`rank`, of which a look-up needs only the first."""
    rows = list(measurements)
    stages: dict[str, list[Ranked]] = {stage: [] for stage in BEST_FIRST}
    for each in _trusted(variants(rows, barred, toolchain=toolchain), rows):
        stages[each.rows[0].stage].append(each)
    for stage in stages.values():
        yield from _ordered(stage)


def variants(
    measurements: Iterable[Measurement], barred: Collection[Variant] = (), *, toolchain: str | None = None
) -> list[Ranked]:
    """Rules 1 and 2 alone: what may be used, in no order, those slower than the default included."""
    rows: dict[Variant, list[Measurement]] = defaultdict(list)
    failed = []
    for each in measurements:
        if each.status == "ok":
            rows[each.variant].append(each)
        else:
            failed.append((each.variant, each.status, 1))
    out = blocklist.barred(failed).union(barred)
    races = _races(each for found in rows.values() for each in found)
    return [_ranked(found, races, toolchain) for variant, found in rows.items() if variant not in out]


def fastest(ranked: Sequence[Ranked]) -> Ranked:
    """The one that leads the first tie set of a ranking: with it left out, another might win."""
    first = ranked[0]
    alike = [each for each in ranked if (each.rows[0].stage, each.disputed) == (first.rows[0].stage, first.disputed)]
    return min(alike, key=lambda each: each.speed)


def best_first(by_stage: Callable[[str], Iterable[Measurement]], barred: Collection[Variant] = ()) -> Iterator[Ranked]:
    """:func:`rank` that asks for the rows of one stage at a time, since finals usually decide."""
    out = frozenset(barred)
    for stage in BEST_FIRST:
        rows = list(by_stage(stage))
        yield from _ranking(rows, out)
        out = out.union(each.variant for each in rows if each.status == "ok")


def with_source(
    ranked: Iterable[Ranked], digest: Callable[[Config], str], most: int = RENDERED
) -> tuple[Ranked | None, Ranked | None]:
    """The best whose source is what ``digest`` renders today, and the best of an older source that precedes it.

    Rendering costs a few milliseconds, so at most ``most`` configs are rendered; others that rank lower count as of an
    older source.
    """
    older: Ranked | None = None
    rendered: dict[Config, str] = {}
    for each in ranked:
        if each.config not in rendered and len(rendered) < most:
            rendered[each.config] = digest(each.config)
        if rendered.get(each.config) == each.variant[2]:
            return each, older
        older = older or each
    return None, older


@dataclass(slots=True)
class _Race:
    """The final of a session: its rounds, and the least ratio of those who stayed for all of them."""

    session: frozenset[str]
    """It alone."""
    rounds: int = 0
    fastest: float = math.inf


def _races(rows: Iterable[Measurement]) -> dict[str, _Race]:
    races: dict[str, _Race] = {}
    for each in rows:
        if each.stage != "final":
            continue
        race = races.get(each.session)
        if race is None:
            race = races[each.session] = _Race(frozenset((each.session,)))
        if each.rounds and each.rounds > race.rounds:  # who stayed longest so far had left early
            race.rounds, race.fastest = each.rounds, math.inf
        if each.rounds == race.rounds and each.ratio is not None:
            race.fastest = min(race.fastest, each.ratio)
    return races


def _ranked(rows: list[Measurement], races: Mapping[str, _Race], toolchain: str | None) -> Ranked:
    return _of_one(rows[0], races) if len(rows) == 1 else _of_many(rows, races, toolchain)


def _of_one(row: Measurement, races: Mapping[str, _Race]) -> Ranked:
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


def _of_many(rows: Sequence[Measurement], races: Mapping[str, _Race], toolchain: str | None) -> Ranked:
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


def _trusted(found: Iterable[Ranked], rows: Iterable[Measurement]) -> Iterator[Ranked]:
    """``found`` with the trust in what several sessions have measured of all ``rows``."""
    against: dict[str, Variant] | None = None
    for each in found:
        first = each.rows[0]
        alone = len(each.rows) == 1
        if not alone and first.stage == "final" and any(row.session != first.session for row in each.rows):
            against = defaults(rows) if against is None else against
            each = each._replace(judged=judged(each.rows, against))
        yield each


def _ordered(stage: Iterable[Ranked]) -> Iterator[Ranked]:
    """Variants of one stage in the order of rules 3 to 7, without those that may not win: they only count as tied."""
    found = list(stage)
    compared = [each for each in found if each.ratio is not None]
    disputed = [each for each in compared if each.disputed]
    sound: Iterable[Ranked] = _tie_sets([each for each in compared if not each.disputed])
    if disputed:
        sound = list(sound)
        claiming = [number for number, each in enumerate(sound) if each.trust is not None]
        ahead = sound[: claiming[-1] + 1] if claiming else []
        placed = {each.variant for each in ahead}
        sound = [*ahead, *_tie_sets(each for each in compared if each.variant not in placed)]
    yield from sound
    yield from sorted((each for each in found if each.ratio is None), key=lambda each: each.speed)


def _tie_sets(compared: Iterable[Ranked]) -> Iterator[Ranked]:
    """Rules 4 to 6."""
    waiting = sorted(compared, key=lambda each: each.speed)
    while leader := next((each for each in waiting if each.may_win), None):
        tied = [each for each in waiting if each.tied_with(leader)]
        if len(tied) > MOST_TIED:
            tied = sorted(tied, key=lambda each: (each is not leader, not each.may_win, each.speed))[:MOST_TIED]
        able = sorted((each for each in tied if each.may_win), key=lambda each: (each.needs, each.variant))
        yield from (each._replace(tied=len(tied)) for each in able)
        taken = {each.variant for each in tied}
        waiting = [each for each in waiting if each.variant not in taken]


def _needed(row: Measurement) -> tuple[float, float, float]:
    """See :attr:`Ranked.needs`."""
    needed = row.spill_bytes, row.registers, row.shared_bytes
    spills, registers, shared = (math.inf if each is None else each for each in needed)
    return spills, registers, shared
