"""The policy by which variants are blocklisted and barred. Pure functions over what is stored, as in `winners.py`.

A variant (family, config, source) that was wrong for a spec or made an illegal access is barred: no look-up gives it.
One that has cost two workers for a spec is blocklisted, so not tried again either. Nothing of it is stored: it follows
from immutable measurements, so it merges with them, and a kernel whose source has changed gets another chance.

For whom a failure counts:

1. On the device model that it is of, at once. Whatever else was measured there, before or since, does not outvote it:
   a race shows once in a while, and a slower kernel costs less than a wrong result.
2. On other models, where a second session says so, of another day or another card (as in `trust.py`): what one card
   says, which may be broken, or not exist, takes nothing away from all others. A veto costs no less than a vote.

What somebody erred in, or lied about, on one's own model is tried on the GPU at hand by `flashtune db verify
--failures`, and taken out by `flashtune db forget`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

from flashtune.tuned_db.records.measurement import REJECTING, Measurement, Variant

KILLS = {"illegal_access": 2, "timeout": 1}
"""Workers that a row of this status stands for. The tuner blames a death on a config when the next worker has died over
it too; one that hangs is stopped once, and may have been the machine's fault."""
MOST_KILLS = 2
TELLING = frozenset((*REJECTING, *KILLS))
"""Statuses of failures that may bar a variant."""


class Failure(NamedTuple):
    """Rows of one variant, for one spec, with one status, of one session and card."""

    variant: Variant
    status: str
    gpu_key: str
    session: str
    unit: str
    created: str
    """Of the newest."""
    rows: int = 1

    @classmethod
    def of(cls, row: Measurement) -> Self:
        return cls(row.variant, row.status, row.gpu_key, row.session, row.unit, row.created)


def blocklisted(failures: Iterable[Failure], gpu_key: str) -> frozenset[Variant]:
    """Variants that have cost `MOST_KILLS` workers, as far as that counts on the device model ``gpu_key``."""
    return _counting((each for each in failures if each.status in KILLS), gpu_key, _deadly)


def barred(failures: Iterable[Failure], gpu_key: str) -> frozenset[Variant]:
    """Variants that no look-up gives on that device model: blocklisted, or ever of a status in `REJECTING`."""
    failures = list(failures)
    rejected = _counting((each for each in failures if each.status in REJECTING), gpu_key, bool)
    return rejected | blocklisted(failures, gpu_key)


def _counting(
    failures: Iterable[Failure], gpu_key: str, enough: Callable[[Sequence[Failure]], bool]
) -> frozenset[Variant]:
    """Variants with ``enough`` failures by rule 1, or by rule 2."""
    found: dict[Variant, list[Failure]] = defaultdict(list)
    for each in failures:
        found[each.variant].append(each)
    return frozenset(
        variant
        for variant, own in found.items()
        if enough([each for each in own if each.gpu_key == gpu_key]) or (enough(own) and _confirmed(own))
    )


def _deadly(failures: Sequence[Failure]) -> bool:
    return sum(KILLS[each.status] * each.rows for each in failures) >= MOST_KILLS


def _confirmed(failures: Iterable[Failure]) -> bool:
    """Whether two of their sessions are independent; a session is of the day and card of its newest row."""
    newest: dict[str, tuple[str, str]] = {}
    for each in failures:
        newest[each.session] = max(newest.get(each.session, ("", "")), (each.created, each.unit))
    days, units = {created[:10] for created, _ in newest.values()}, {unit for _, unit in newest.values() if unit}
    return len(days) > 1 or len(units) > 1
