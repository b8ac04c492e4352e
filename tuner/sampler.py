"""An Optuna sampler that can only ask for configs that are legal and not yet tried."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from .space import Space

EXHAUSTIVE = 48
"""Spaces up to this size are walked in the model's order: searching would cost as much as trying all."""
EXPLORE_MODEL = 0.25
"""Part of the trials that follow the model's ranking even after the inner sampler has taken over."""


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """One integer range per parameter: the index into its choices, which keeps their order."""
    return {space.name(each): IntDistribution(0, len(each.choices) - 1) for each in space.parameters}


class FeasibleSampler(BaseSampler):
    """Takes the proposal of ``inner`` and moves it to the nearest config of ``space`` that is not ``closed``.

    ``closed`` is read at each proposal; its owner adds configs as they are asked for. While ``inner`` has nothing to
    propose (its start-up trials), and for a part of the later trials, the best-ranked open config is taken.
    """

    def __init__(self, space: Space, inner: BaseSampler, closed: Collection[object], seed: int) -> None:
        self.space = space
        self.inner = inner
        self.closed = closed
        self._random = random.Random(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        proposal: dict[str, Any] = {}
        if len(self.space) > EXHAUSTIVE and self._random.random() >= EXPLORE_MODEL:
            proposal = self.inner.sample_relative(study, trial, self.inner.infer_relative_search_space(study, trial))
        closed: Any = self.closed
        if set(proposal) == set(search_space):
            config = self.space.nearest(proposal, closed)
        else:
            config = self.space.best_open(closed)
        if config is None:
            raise RuntimeError("every config has been asked for; the study must not be asked again")
        return dict(self.space.point(config))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise RuntimeError(f"{param_name} is not a parameter of {self.space.family.name}")

    def reseed_rng(self) -> None:
        self.inner.reseed_rng()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self.inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        self.inner.after_trial(study, trial, state, values)
