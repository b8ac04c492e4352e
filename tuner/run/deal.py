"""Who measures what: problems are dealt to devices, trials to problems."""

from __future__ import annotations

import math
from collections.abc import Sequence

TRIAL_SECONDS = 0.03
"""Of a trial besides its launches: checks, loading, the way there and back."""
TIMED_SECONDS, MIN_LAUNCHES, MAX_LAUNCHES = 0.025, 10, 45
"""What a trial takes of launches: enough for so much time, but at least and at most so many."""


def trial_seconds(launch: float) -> float:
    """About what a trial takes of a device, where its kernel takes ``launch`` seconds."""
    return TRIAL_SECONDS + launch * min(MAX_LAUNCHES, max(MIN_LAUNCHES, TIMED_SECONDS / launch))


def deal(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Deals items of these costs to ``hands``, evenly by cost: the dearest first, each to who has least.

    The same input is always dealt the same, so that a run that goes on finds each problem on the device it was on.
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for item in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        least = min(dealt, key=lambda hand: sum(costs[each] for each in hand))
        least.append(item)
    return [sorted(hand) for hand in dealt]


def trials_each(budget: int, closed: Sequence[int], still_open: int) -> int:
    """Most trials of one problem: what ``closed`` ones have not used of ``budget`` is for those that are open."""
    return math.ceil((budget - sum(closed)) / still_open) if still_open else 0
