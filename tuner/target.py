"""One problem of a measured run: its searches, one per family, and what is known of its configs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flashtune.codegen.config import Config
from flashtune.codegen.problem import Problem
from flashtune.tuned_db.records import Measurement

from .space import Space
from .study import Search

FINALISTS = 8
"""Configs in a final besides the default and the previous winner. Single measurements differ by several percent with
the clock that the power limit leaves at the time (1605 to 1980 MHz on an H200); finals are interleaved."""
LOSING_FAMILY, FAMILY_TRIALS = 2.0, 4
"""A family whose best measured time is so much above another's after so many trials is not searched further."""


class Target:
    """One problem: its searches, one per family, and what is known of its configs."""

    def __init__(
        self,
        problem: Problem,
        spaces: Sequence[Space],
        default: Config,
        rows: dict[Config, Measurement],
        first: Sequence[Config],
        seed: int,
    ) -> None:
        self.problem = problem
        self.default = default
        self.rows = rows
        self.known = len(rows)
        self.previous: Config | None = None
        """What won before this run; it takes part in the final."""
        self.asked = 0
        self.tried = 0
        self.skipped = ""
        """Why it can't be measured here; empty if it can."""
        self.exhausted = False
        """Nothing is left to try."""
        self.finished = False
        """Nothing is left to do."""
        self.seconds: dict[Config, float] = {}
        """Medians of correct configs, from this run and earlier ones."""
        for config, row in rows.items():
            if row.status == "ok" and row.median_us:
                self.seconds[config] = row.median_us / 1e6
        self._trials: Counter[str] = Counter()
        self._searches = {
            space.family.name: Search(
                space,
                seed=seed,
                known={config: self.seconds.get(config) for config in rows},
                first=[each for each in (default, *first) if each.family == space.family.name],
            )
            for space in spaces
        }

    @property
    def best(self) -> float | None:
        return min(self.seconds.values(), default=None)

    @property
    def open(self) -> bool:
        """Whether it may be asked."""
        return not (self.skipped or self.exhausted or self.finished)

    def skip(self, reason: str) -> None:
        """Takes back what was asked for and not tried."""
        self.skipped = reason
        self.asked = self.tried

    def ask(self) -> Config | None:
        """The next config, from the open family with the fewest trials; None when there is nothing left to try."""
        for name in sorted(self._searches, key=lambda each: self._trials[each]):
            if not self._losing(name) and (config := self._searches[name].ask()) is not None:
                self._trials[name] += 1
                self.asked += 1
                return config
        self.exhausted = True
        return None

    def tell(self, config: Config, row: Measurement, seconds: float | None) -> None:
        self.rows[config] = row
        self.tried += 1
        if seconds is not None:
            self.seconds[config] = seconds
        self._searches[config.family].tell(config, seconds)

    def finalists(self) -> list[Config]:
        """The default and the previous winner, if they are correct, and the fastest others."""
        order = sorted(self.seconds, key=lambda config: (self.seconds[config], config.family, config.key))
        others = [config for config in order if config != self.default][:FINALISTS]
        asked = [each for each in (self.default, self.previous) if each is not None and each in self.seconds]
        return list(dict.fromkeys([*asked, *others]))

    def _losing(self, name: str) -> bool:
        own = min((seconds for config, seconds in self.seconds.items() if config.family == name), default=None)
        if self._trials[name] < FAMILY_TRIALS or self.best is None:
            return False
        return own is None or own > LOSING_FAMILY * self.best
