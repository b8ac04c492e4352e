"""The policy by which a claim is trusted: has another session measured the same? Pure functions over finals.

The claim of a variant (family, config, source) on one problem and GPU model is its ratio to the default config, from an
interleaved final. Trust is not stored: it is derived from the finals that are there, so it merges with them. Only
ratios are compared: they travel between cards and days, microseconds don't. The policy:

1. Finals with status ``ok``, a ratio and times that there can be (`plausible.py`) count, grouped by session: a session
   says the median of its rows. Rows that were made while the card was slowed down or shared (`Measurement.flagged`)
   count only where a variant has no other. Of those that are left and are of several compilers, only rows of the
   nearest to ours count (`toolchain.py`): what another one made of the source neither confirms nor disputes. Sessions
   with an interval wider than `BLURRED` don't count at all: they would agree with anything.
2. Sessions are independent where their day (UTC) or their card differs; a card that is not known is no other card. A
   session is of the day and card of its newest row. Those of one day and card are one witness, which says their median.
3. Two witnesses can be compared unless they are known to have measured against different defaults (config or source).
4. Two agree where their intervals overlap, or where their ratios are within `ALIKE_CLAIMS` of each other.
5. The claim is that of the median witness, by ratio; of an even number, of either of the two in the middle. All decide
   that are independent of it and can be compared with it: there are none, ``candidate``; at least half of them agree
   with it, ``verified``; else ``disputed``. So one odd session disputes what one has said until a third has spoken, and
   disputes nothing that two have said. A claim that no longer holds is disputed when as many witnesses say so as said
   it, and verified anew, with another ratio, when more do.
6. The default claims nothing: its ratio is 1 by definition.

No witness counts more than another, nor does the newest: who sends a row fills in its date, so whoever wrote the latest
would decide, and a clock that is wrong by a year would for a year. Dates tell witnesses apart, and that is all.

The same rows in any order come to the same, on every machine with the same compiler. What a disputed variant may still
win is in `winners.py`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashtune.tuned_db.records.measurement import Measurement, Trust, Variant

from .plausible import plausible
from .toolchain import compatible

ALIKE_CLAIMS = 0.015
"""Part of a ratio. Sound claims came within 0.4 to 0.5 % when they were timed again on the same card and day
(benchmarks/tune_twice.py, whose own bar this is); three times that leaves room for what another card or day adds."""
BLURRED = 0.1
"""Width of an interval as a part of its ratio. Of 1420 finals on an H200 (benchmarks/results/tune_h200.jsonl.gz) half
were narrower than a fifth of this, and one in a hundred was wider."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Time relative to the default. Without an interval, both ends are the ratio."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, ratio: float, low: float | None, high: float | None) -> Claim:
        return cls(ratio, ratio, ratio) if low is None or high is None else cls(ratio, low, high)

    @property
    def blurred(self) -> bool:
        return self.high - self.low > BLURRED * self.ratio

    def agrees(self, other: Claim) -> bool:
        """Rule 4."""
        if self.low <= other.high and other.low <= self.high:
            return True
        least, most = sorted((self.ratio, other.ratio))
        return most <= least * (1 + ALIKE_CLAIMS)


@dataclass(frozen=True, slots=True)
class Witness:
    """The sessions of one day and card that measured against one default (None: not known which)."""

    day: str
    unit: str
    default: Variant | None
    claim: Claim

    def independent(self, other: Witness) -> bool:
        """Rule 2."""
        return self.day != other.day or ("" not in (self.unit, other.unit) and self.unit != other.unit)

    def comparable(self, other: Witness) -> bool:
        """Rule 3."""
        return None in (self.default, other.default) or self.default == other.default


def trust_of(measurements: Iterable[Measurement], variant: Variant) -> Trust | None:
    """The trust in ``variant`` by ``measurements`` of one problem and GPU model; None where it claims nothing."""
    rows = plausible(measurements)
    finals = [each for each in rows if (each.status, each.stage, each.variant) == ("ok", "final", variant)]
    return judged(compatible(unflagged(finals)), defaults(rows))


def judged(rows: Sequence[Measurement], against: Mapping[str, Variant]) -> Trust | None:
    """The trust in one variant by its finals, of which those that are flagged were left out; see the policy above.

    ``against`` is the default of each session, as far as it is known. None for the default itself, and where no row
    has a ratio.
    """
    counted = sorted((each for each in rows if _counts(each)), key=_age)
    if all(each.ratio == 1 for each in counted):
        return None
    witnesses = _witnesses(counted, against)
    agreeing, others = _support(witnesses)
    claims = [each.claim for each in witnesses] or [_claim(counted)]
    return Trust(
        level="candidate" if not others else "verified" if 2 * agreeing >= others else "disputed",
        sessions=len({each.session for each in counted}),
        units=tuple(sorted({each.unit for each in counted if each.unit})),
        first=counted[0].created[:10],
        last=counted[-1].created[:10],
        agreeing=agreeing,
        others=others,
        worst=max(each.high for each in claims),
    )


def _support(witnesses: Sequence[Witness]) -> tuple[int, int]:
    """Rule 5: of ``witnesses``, by ratio, how many agree with the median one, and how many can say whether they do.

    Of the two in the middle of an even number, the one with more support; one that nobody can say anything of comes
    last, or it would hide that the other is disputed.
    """
    found = []
    for median in witnesses[(len(witnesses) - 1) // 2 : len(witnesses) // 2 + 1]:
        asked = [each for each in witnesses if each.independent(median) and each.comparable(median)]
        found.append((sum(each.claim.agrees(median.claim) for each in asked), len(asked)))
    return max(found, key=lambda each: (each[1] > 0, 2 * each[0] - each[1], each[1]), default=(0, 0))


def defaults(measurements: Iterable[Measurement]) -> dict[str, Variant]:
    """The default config of each session that has a final with one: its time relative to itself is exactly 1.

    Where more than one variant looks like it, as rows without intervals may, it is not known.
    """
    found: dict[str, set[Variant]] = defaultdict(set)
    for each in measurements:
        if _counts(each) and each.ratio == 1 and each.ratio_low in (None, 1) and each.ratio_high in (None, 1):
            found[each.session].add(each.variant)
    return {session: next(iter(variants)) for session, variants in found.items() if len(variants) == 1}


def unflagged(rows: Sequence[Measurement]) -> Sequence[Measurement]:
    """``rows`` without those that were made while the card was slowed down or shared, unless all were."""
    return [each for each in rows if not each.flagged] or rows


def _counts(row: Measurement) -> bool:
    return row.status == "ok" and row.stage == "final" and row.ratio is not None


def _age(row: Measurement) -> tuple[str, str]:
    return row.created, row.id


def _witnesses(rows: Sequence[Measurement], against: Mapping[str, Variant]) -> list[Witness]:
    """Rules 1 and 2, in the order of their ratios. ``rows`` are sorted by age."""
    sessions: dict[str, list[Measurement]] = defaultdict(list)
    for each in rows:
        sessions[each.session].append(each)
    claims: dict[tuple[str, str, Variant | None], list[Claim]] = defaultdict(list)
    for session, own in sessions.items():
        claim, last = _claim(own), own[-1]
        if not claim.blurred:
            claims[last.created[:10], last.unit, against.get(session)].append(claim)
    return sorted((Witness(*place, _median(found)) for place, found in claims.items()), key=_by_ratio)


def _by_ratio(each: Witness) -> tuple[object, ...]:
    claim = each.claim
    return claim.ratio, claim.low, claim.high, each.day, each.unit, each.default or ()


def _claim(rows: Sequence[Measurement]) -> Claim:
    """What one session says: the medians of its rows."""
    return _median([claim_of(each) for each in rows])


def claim_of(row: Measurement) -> Claim:
    """What one row says that has a ratio."""
    assert row.ratio is not None
    return Claim.of(row.ratio, row.ratio_low, row.ratio_high)


def _median(claims: Sequence[Claim]) -> Claim:
    if len(claims) == 1:  # nearly always, and a look-up has little time
        return claims[0]
    return Claim(
        statistics.median(each.ratio for each in claims),
        statistics.median(each.low for each in claims),
        statistics.median(each.high for each in claims),
    )
