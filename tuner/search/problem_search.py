"""One problem of a measured run: its searches, one per family, and what is known of its configs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuner.trial.timing import MIN_ROUNDS, ROUND_LAUNCHES

from .family_search import FamilySearch
from .space import Space
from .strategy import Strategy

FEWEST_FINALISTS, FINALISTS = 8, 24
"""Configs in a final besides the default and the previous winner, as many as it has time for. Single measurements
differ by several percent with the clock that the power limit leaves at the time (1605 to 1980 MHz on an H200), so that
the best may rank low; finals are interleaved, and the slow leave them early."""
FINAL_OVERRUN = 2.0
"""How much longer than asked a final may take so that more take part."""
LOSING_FAMILY, FAMILY_TRIALS = 2.0, 4
"""A family whose best measured time is so much above another's after so many trials is not searched further."""
FAMILY_SHARPNESS, FAMILY_FLOOR = 8, 0.1
"""A family's share of the trials falls with this power of its best time over the best of all, and no lower than this
part: at 1.1 of the time it gets half as many trials as the best, from 1.3 on the floor."""


class ProblemSearch:
    """One problem: its searches, one per family, and what is known of its configs."""

    def __init__(
        self,
        problem: Problem,
        spaces: Sequence[Space],
        default: Config,
        rows: dict[Config, Measurement],
        first: Sequence[Config],
        seed: int,
        chosen: Strategy | None = None,
        given: Sequence[Config] = (),
        previous: Config | None = None,
    ) -> None:
        """``default`` is tried first, since others are timed in turns with it. Then ``given``, by the user, and
        ``previous``, which won before this run and takes part in the final. These may lie outside of ``spaces``.
        ``first``: tried before what is searched."""
        self.problem = problem
        self.default = default
        self.rows = rows
        self.known = len(rows)
        self.previous = previous
        self.asked = 0
        self.tried = 0
        self.skipped = ""
        """Why it can't be measured here; empty if it can."""
        self.exhausted = False
        """Nothing is left to try."""
        self.finished = False
        """Nothing is left to do."""
        self.seconds: dict[Config, float] = {}
        """Times of correct configs, from this run and earlier ones, that compare with each other: see `comparable`."""
        for config, row in rows.items():
            if seconds := self.comparable(row):
                self.seconds[config] = seconds
        self._default_due = default not in rows
        self._walks = chosen is not None and chosen.make is None
        asked = [default, *given, *([] if previous is None else [previous])]
        self._given = [each for each in dict.fromkeys(asked) if each not in rows]
        self._trials: Counter[str] = Counter()
        self._predicted = {space.family.name: space.estimates[0].seconds for space in spaces}
        self._searches = {
            space.family.name: FamilySearch(
                space,
                chosen,
                seed=seed,
                known={config: self.seconds.get(config) for config in rows},
                first=[each for each in first if each.family == space.family.name],
            )
            for space in spaces
        }

    @property
    def given(self) -> list[Config]:
        """What is tried before anything is searched, and has not been yet: the default, and what was asked for."""
        return [*self._given]

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
        """The next config: the user's, then of the open family that is farthest below its share. None: none is left."""
        config = self._given.pop(0) if self._given else None
        if config is None:
            config = self._of_a_family()
        elif config.family in self._searches:
            self._searches[config.family].take(config)
        if config is None:
            self.exhausted = True
            return None
        self._trials[config.family] += 1
        self.asked += 1
        return config

    def _of_a_family(self) -> Config | None:
        weights = self._weights()
        for name in sorted(weights, key=lambda each: (self._trials[each] + 1) / weights[each]):
            if (config := self._searches[name].ask()) is not None:
                return config
        return None

    def awaits_default(self, config: Config) -> bool:
        """Whether ``config`` has to wait until the default was tried."""
        return self._default_due and config != self.default

    def beside(self, config: Config) -> Config | None:
        """What ``config`` is timed in turns with: the default, once that is known to be correct."""
        row = self.rows.get(self.default)
        return self.default if config != self.default and row is not None and row.status == "ok" else None

    def tell(self, config: Config, row: Measurement, seconds: float | None) -> None:
        """``row`` came of ``config``, and ``seconds`` are `comparable` times or None."""
        self.rows[config] = row
        self.tried += 1
        self._settle_default(config)
        if seconds is not None:
            self.seconds[config] = seconds
        if config.family in self._searches:
            self._searches[config.family].tell(config, seconds)

    def bar(self, config: Config) -> None:
        """Leaves ``config`` alone: it is not asked for, and takes part in no final."""
        self._given = [each for each in self._given if each != config]
        self.seconds.pop(config, None)
        self._settle_default(config)
        if config.family in self._searches:
            self._searches[config.family].close(config)

    def withdraw(self, config: Config) -> None:
        """Takes back that ``config`` was asked for: it is not tried."""
        self.asked -= 1
        self._settle_default(config)
        if config.family in self._searches:
            self._searches[config.family].tell(config, None)

    def comparable(self, row: Measurement) -> float | None:
        """Seconds; of a row with a ratio to the default as many as that would have taken beside the default's own row,
        whatever the clock was at the time. None where it was not correct."""
        if row.status != "ok" or not row.median_us:
            return None
        default = self.rows.get(self.default)
        if row.ratio is None or default is None or not default.median_us:
            return row.median_us / 1e6
        return row.ratio * default.median_us / 1e6

    def finalists(self, seconds: float) -> list[Config]:
        """The default and the previous winner, if they are correct, and the fastest others: fewer where the rounds of
        all would take much longer than ``seconds``.

        None before the previous winner was tried: a final without it would put another in its place.
        """
        if self.previous is not None and self.previous not in self.rows:
            return []
        order = sorted(self.seconds, key=lambda config: (self.seconds[config], config.family, config.key))
        round_seconds = MIN_ROUNDS * ROUND_LAUNCHES * (self.best or 0.0)
        room = int(FINAL_OVERRUN * seconds / round_seconds) if round_seconds else FINALISTS
        others = [config for config in order if config != self.default]
        others = others[: max(FEWEST_FINALISTS, min(FINALISTS, room))]
        asked = [each for each in (self.default, self.previous) if each is not None and each in self.seconds]
        return list(dict.fromkeys([*asked, *others]))

    def _settle_default(self, config: Config) -> None:
        """Nothing waits for the default any more, if ``config`` is it."""
        self._default_due &= config != self.default

    def _weights(self) -> dict[str, float]:
        """How trials are shared, by family: by best measured times, or predicted ones until all have been measured.

        A family that is losing has no weight and is left out.
        """
        measured = {name: self._best_of(name) for name in self._searches if not self._losing(name)}
        times = {name: seconds or self._predicted[name] for name, seconds in measured.items()}
        if None in measured.values():
            times = {name: self._predicted[name] for name in measured}
        best = min(times.values(), default=0.0)
        return {name: max(FAMILY_FLOOR, (best / seconds) ** FAMILY_SHARPNESS) for name, seconds in times.items()}

    def _best_of(self, name: str) -> float | None:
        return min((seconds for config, seconds in self.seconds.items() if config.family == name), default=None)

    def _losing(self, name: str) -> bool:
        if self._walks or self._trials[name] < FAMILY_TRIALS:
            return False
        best = min((seconds for each in self._searches if (seconds := self._best_of(each))), default=None)
        own = self._best_of(name)
        return best is not None and (own is None or own > LOSING_FAMILY * best)
