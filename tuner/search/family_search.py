"""One search: a problem and a family, asked and told in memory, and rebuilt from what is stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from flashtune.codegen.plan.config import Config

from .sampler import FeasibleSampler
from .space import Space, distributions
from .strategy import DEFAULT_SAMPLER, Strategy, quiet, strategy


class FamilySearch:
    """Asks for configs, each at most once.

    ``known`` maps configs that were tried before to their median seconds, or None where the trial failed; they steer
    the search and are not asked again. ``first`` are asked before anything else: the default, then known winners.
    ``chosen`` says what proposes the rest.
    """

    def __init__(
        self, space: Space, chosen: Strategy | None = None, *, seed: int = 0,
        known: Mapping[Config, float | None] | None = None, first: Iterable[Config] = (),
    ) -> None:  # fmt: skip
        self.space = space
        self.closed: set[Config] = set()
        self._running: dict[Config, Trial] = {}
        with quiet():
            sampler = FeasibleSampler(space, chosen or strategy(DEFAULT_SAMPLER), self.closed, seed)
            self._study = optuna.create_study(sampler=sampler)
        earlier = {config: seconds for config, seconds in (known or {}).items() if config in space.rank}
        self._study.add_trials([self._finished(config, seconds) for config, seconds in earlier.items()])
        self.closed.update(earlier)
        self._first = [config for config in dict.fromkeys(first) if config in space.rank and config not in self.closed]

    @property
    def open(self) -> int:
        """Configs that have not been asked for."""
        return len(self.space) - len(self.closed)

    def ask(self) -> Config | None:
        """The next config to try, or None when there is none left."""
        if not self.open:
            return None
        self._first = [each for each in self._first if each not in self.closed]
        if self._first:
            self._study.enqueue_trial(self.space.point(self._first.pop(0)))
        return self._asked()

    def take(self, config: Config) -> None:
        """As if ``config`` had been asked for, which may lie outside the space."""
        if config in self.space.rank and config not in self.closed:
            self._study.enqueue_trial(self.space.point(config))
            self._asked()

    def _asked(self) -> Config:
        ranges = distributions(self.space)
        with quiet():
            trial = self._study.ask(fixed_distributions=ranges)
        config = self.space.at({name: trial.params[name] for name in ranges})
        self.closed.add(config)
        self._running[config] = trial
        return config

    def close(self, config: Config) -> None:
        """Not to be asked for."""
        if config in self.space.rank:
            self.closed.add(config)

    def tell(self, config: Config, seconds: float | None) -> None:
        """The result of a config that was asked for or taken; None if it failed."""
        trial = self._running.pop(config, None)
        if trial is None:  # from outside the space
            return
        if seconds is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, objective(seconds))

    def _finished(self, config: Config, seconds: float | None) -> FrozenTrial:
        return create_trial(
            state=TrialState.PRUNED if seconds is None else TrialState.COMPLETE,
            value=None if seconds is None else objective(seconds),
            params=dict(self.space.point(config)),
            distributions=distributions(self.space),
        )


def objective(seconds: float) -> float:
    """Logarithm of milliseconds: noise and differences are ratios."""
    return math.log(seconds * 1e3)
