"""The policy by which variants are blocklisted. Pure functions over what is stored, as in `winners.py`.

A variant (family, config, source) that has cost two workers for a spec, on any GPUs and in any sessions, is not tried
again and not looked up. The list is not stored: it follows from immutable measurements, so it merges with them, and a
kernel whose source has changed gets another chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .records import REJECTING, Variant

KILLS = {"illegal_access": 2, "timeout": 1}
"""Workers that a row of this status stands for. The tuner blames a death on a config when the next worker has died over
it too; one that hangs is stopped once, and may have been the machine's fault."""
MOST_KILLS = 2

Deaths = Iterable[tuple[Variant, str, int]]
"""Variants with a status of their rows and how many rows have it."""


def blocklisted(deaths: Deaths) -> frozenset[Variant]:
    """Variants that have cost `MOST_KILLS` workers. Other statuses than those of `KILLS` don't count."""
    kills: Counter[Variant] = Counter()
    for variant, status, rows in deaths:
        kills[variant] += KILLS.get(status, 0) * rows
    return frozenset(variant for variant, count in kills.items() if count >= MOST_KILLS)


def barred(deaths: Deaths) -> frozenset[Variant]:
    """Variants that no look-up gives: blocklisted, or ever of a status in `REJECTING`."""
    deaths = list(deaths)
    return blocklisted(deaths) | {variant for variant, status, _ in deaths if status in REJECTING}
