"""How long a tuning run may go on: an amount of time or of trials."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from flashtune.errors import InvalidInput, InvalidType

EFFORTS = {"quick": "30s", "normal": "120s", "full": "20m"}
"""Budgets by name: a first look, a good config for a few problems, and a search that leaves little to find."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|m|h|)")


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly one of ``seconds`` and ``trials`` is set."""

    seconds: float | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        amounts = [each for each in (self.seconds, self.trials) if each is not None]
        if len(amounts) != 1 or not 0 < amounts[0] < math.inf:
            raise InvalidInput(f"seconds={self.seconds}, trials={self.trials}: one of them must be set, and positive")

    def __str__(self) -> str:
        return f"{self.trials} trials" if self.trials is not None else f"{self.seconds:g} s"


def parse_budget(text: Budget | str) -> Budget:
    """``120s``, ``10m``, ``1.5h`` are times; a bare whole number such as ``200`` counts trials; or one of `EFFORTS`."""
    if isinstance(text, Budget):
        return text
    if not isinstance(text, str):
        raise InvalidType(f"budget is a {type(text).__qualname__}, it must be text such as '120s' or '200'")
    plain = text.strip().lower()
    match = _FORM.fullmatch(EFFORTS.get(plain, plain))
    if match is not None:
        amount, unit = float(match[1]), match[2]
        if unit and amount > 0:
            return Budget(seconds=amount * _UNITS[unit])
        if not unit and amount.is_integer() and amount > 0:
            return Budget(trials=int(amount))
    raise InvalidInput(
        f"budget={text[:40]!r} is not a time such as 120s, 10m or 1h, nor a count of trials such as 200, "
        f"nor one of {', '.join(EFFORTS)}"
    )


class Meter:
    """Counts what a run has used of its budget. ``clock`` gives seconds and can be replaced in tests."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.clock = clock
        self.trials = 0
        self._start = clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self._start

    @property
    def left(self) -> float:
        """Part of the budget that is left, from 1 to 0."""
        if self.budget.trials is not None:
            return max(0.0, 1 - self.trials / self.budget.trials)
        assert self.budget.seconds is not None
        return max(0.0, 1 - self.elapsed / self.budget.seconds)

    @property
    def spent(self) -> bool:
        return self.left <= 0
