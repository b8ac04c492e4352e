"""An Optuna sampler that can only ask for configs that are legal and not yet tried."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from flashtune.codegen.plan.config import Config

from .space import Space, distributions
from .strategy import Strategy, proposal

NEAR = 4
"""The fastest configs that neighbours are looked for of."""


class FeasibleSampler(BaseSampler):
    """Takes the proposal of the strategy's sampler and moves it to the nearest config of ``space`` not ``closed``.

    ``closed`` is read at each proposal; its owner adds configs as they are asked for. In small spaces, while too few
    configs are measured, and for a part of the later trials, the best-ranked open config is taken instead; for another
    part a neighbour of the fastest.
    """

    def __init__(self, space: Space, chosen: Strategy, closed: Collection[Config], seed: int) -> None:
        self.space = space
        self.closed = closed
        self.startup = chosen.startup
        self.model_share = chosen.model_share
        self.near_share = chosen.near_share
        walked = len(space) <= chosen.walked
        self.inner = None if chosen.make is None or walked else chosen.make(space, seed)
        self._random = random.Random(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        config: Config | None = None
        if self.inner is None or self._follows_model(study):
            config = self.space.best_open(self.closed)
        elif self._random.random() < self.near_share:
            config = self._near_best(study)
        if config is None and self.inner is not None:
            config = self.space.nearest(proposal(self.inner, study, trial, search_space), self.closed)
        if config is None:
            raise RuntimeError("every config has been asked for; the study must not be asked again")
        return dict(self.space.point(config))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise RuntimeError(f"{param_name} is not a parameter of {self.space.family.name}")

    def _follows_model(self, study: Study) -> bool:
        measured = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
        return measured < self.startup or self._random.random() < self.model_share

    def _near_best(self, study: Study) -> Config | None:
        """Next to the fastest of a few that has an open neighbour."""
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        fastest = heapq.nsmallest(NEAR, done, key=lambda each: each.value or 0.0)
        found = (self.space.neighbour(self.space.at(each.params), self.closed) for each in fastest)
        return next((each for each in found if each is not None), None)

    def reseed_rng(self) -> None:
        if self.inner is not None:
            self.inner.reseed_rng()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        if self.inner is not None:
            self.inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        if self.inner is not None:
            self.inner.after_trial(study, trial, state, values)
