"""The sampler that is used by default: a Gaussian process over what the time model is off by.

A model's mistakes are alike for configs that are alike: one that is 10 % too fast for a warp count is so for most
configs with it. So what is learned is the logarithm of measured over predicted time, as a function of the parameters,
and the config that is asked for next is the one with the least time expected, less one standard deviation for what may
yet be found. Where nothing like a config is measured, the model's order stands. benchmarks/replay.py compares it with
Optuna's samplers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from .space import Space, distributions

SPREAD = 0.15
"""Standard deviation of the logarithm of measured over predicted time before anything is known; the fits of the models
leave about 0.1 (`spread` in benchmarks/results/model_fit*.json)."""
NOISE = 0.01
"""That of one measurement (screening on an H200 differs by about so much from run to run)."""
RANGE = 1.0
"""Distance at which two configs' mistakes are alike by 1/e: that of one parameter from its first choice to its last,
or of several that add up to as much."""
FAILED = 0.3
"""A config that failed counts as slower than the model says by so much more than the others: its like may fail too."""
MOST = 1000
"""Results that are learned from; each costs as many numbers as the space has configs."""
NEAR_BEST = 256
"""Configs with the least expected time for which it counts what is running."""

Vector = npt.NDArray[np.float64]


class ResidualSampler(BaseSampler):
    """Proposes a config of ``space`` that no trial of the study has; see above. It draws nothing at random."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._ranks: dict[int, int] = {}
        """Of each trial's config, by the trial's number."""
        self._learned = _Process(space)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        running: list[int] = []
        for each in study.get_trials(deepcopy=False):
            if each.number == trial.number:
                continue
            if each.number not in self._ranks:
                self._ranks[each.number] = self.space.rank[self.space.at(each.params)]
            rank = self._ranks[each.number]
            if each.state is TrialState.RUNNING:
                running.append(rank)
            elif rank not in self._learned.told:
                self._learned.tell(rank, each.value if each.state is TrialState.COMPLETE else None)
        return dict(self.space.point(self.space.configs[self._learned.best(running)]))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise RuntimeError(f"{param_name} is not a parameter of {self.space.family.name}")


class _Process:
    """The Gaussian process, one result at a time: ``rows`` is K[told, all] behind the inverse of the Cholesky factor L
    of K[told, told] plus noise. Nothing here uses threads, as compilers have all cores while a run asks."""

    def __init__(self, space: Space) -> None:
        self.grid = space.grid
        self.expected = np.log(np.array([each.seconds for each in space.estimates]))
        self.told: dict[int, float | None] = {}
        """What a config is off by, or None where it failed, by rank."""
        self.rows = np.empty((0, len(space)))
        self.used = 0
        self.left = np.full(len(space), SPREAD**2)
        """Variance that is left."""
        self.solved = np.empty((2, 0))
        self.means = np.zeros((2, len(space)))
        """Expected of all configs from what is told, and what one more of the usual mistake would change of that: the
        usual one is not known before the end."""

    def tell(self, rank: int, value: float | None) -> None:
        """``value``: logarithm of the time in any unit; None if the config failed."""
        off = self.told[rank] = None if value is None else value - float(self.expected[rank])
        if self.used == MOST:
            return
        if self.used == len(self.rows):  # room for more
            self.rows = np.concatenate([self.rows, np.empty((self.used + 64, len(self.grid)))])
        before = self.rows[: self.used]
        factor = before[:, rank].copy()
        pivot = np.sqrt(max(self.left[rank], 0.0) + NOISE**2)
        row = (self._like(rank) - np.einsum("i,ij->j", factor, before)) / pivot
        value_and_one = np.array([FAILED, 0.0] if off is None else [off, 1.0])
        solved = (value_and_one - np.einsum("ki,i->k", self.solved, factor)) / pivot
        self.rows[self.used] = row
        self.used += 1
        self.left -= row**2
        self.solved = np.concatenate([self.solved, solved[:, None]], axis=1)
        self.means += solved[:, None] * row

    def best(self, running: Sequence[int]) -> int:
        """Rank of the open config with the least expected time, less one deviation. ``running`` lessens that alone."""
        score = self.expected + self.means[0] - self._usual() * self.means[1]
        left = self.left.copy()
        score[[*self.told, *running]] = np.inf
        near = np.argsort(score, kind="stable")[:NEAR_BEST]
        where = np.concatenate([near, np.array(running, dtype=near.dtype)])
        rows = self.rows[: self.used, where]
        for at, rank in enumerate(running, start=len(near)):
            pivot = np.sqrt(max(SPREAD**2 - float((rows[:, at] ** 2).sum()), 0.0) + NOISE**2)
            row = (self._like(rank)[where] - np.einsum("i,ij->j", rows[:, at], rows)) / pivot
            rows = np.concatenate([rows, row[None]])
            left[near] -= row[: len(near)] ** 2
        score[near] -= np.sqrt(np.maximum(0.0, left[near]))
        return int(near[np.argmin(score[near])])

    def _usual(self) -> float:
        found = [off for off in self.told.values() if off is not None]
        return float(np.median(found)) if found else 0.0

    def _like(self, rank: int) -> Vector:
        """Covariance of all configs with one."""
        distance = np.abs(self.grid - self.grid[rank]).sum(axis=1)
        return np.asarray(SPREAD**2 * np.exp(-distance / RANGE), dtype=np.float64)
