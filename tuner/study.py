"""One search: a problem and a family, asked and told in memory, and rebuilt from what is stored."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from flashtune.codegen.config import Config

from .sampler import FeasibleSampler, distributions
from .space import Space

STARTUP = 12
"""Trials in the model's order before the sampler proposes."""


class Search:
    """Asks for configs, each at most once.

    ``known`` maps configs that were tried before to their median seconds, or None where the trial failed; they steer
    the search and are not asked again. ``first`` are asked before anything else: the default, then known winners.
    """

    def __init__(
        self, space: Space, *, seed: int = 0, known: Mapping[Config, float | None] | None = None,
        first: Iterable[Config] = (),
    ) -> None:  # fmt: skip
        self.space = space
        self.closed: set[object] = set()
        self._running: dict[Config, Trial] = {}
        self._study = _make_study(space, self.closed, seed)
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
        if self._first:
            self._study.enqueue_trial(self.space.point(self._first.pop(0)))
        ranges = distributions(self.space)
        trial = self._study.ask(fixed_distributions=ranges)
        config = self.space.at({name: trial.params[name] for name in ranges})
        self.closed.add(config)
        self._running[config] = trial
        return config

    def tell(self, config: Config, seconds: float | None) -> None:
        """The result of a config that was asked for; None if it failed."""
        trial = self._running.pop(config)
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


def _make_study(space: Space, closed: set[object], seed: int) -> optuna.Study:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no line for each study that lives in memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            inner = optuna.samplers.TPESampler(multivariate=True, group=True, seed=seed, n_startup_trials=STARTUP)
        return optuna.create_study(sampler=FeasibleSampler(space, inner, closed, seed))
    finally:
        optuna.logging.set_verbosity(level)
