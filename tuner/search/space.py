"""The feasible configs of one family for one problem, best-predicted first, as points on an integer grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution, IntDistribution

from flashtune.codegen.families.family import AnyFamily
from flashtune.codegen.families.model import Estimate
from flashtune.codegen.families.registry import predict
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config, Parameter
from flashtune.codegen.problem.problem import Problem, Spec

Rejected = dict[tuple[Spec, str], Counter[str]]
"""How many configs are not legal, by reason, of each spec and family: all problems of a spec have the same."""


@dataclass(frozen=True)
class Space:
    """Legal configs and what the model expects of each. Position in ``configs`` is the model's rank."""

    family: AnyFamily
    configs: tuple[Config, ...]
    estimates: tuple[Estimate, ...]
    rejected: Counter[str]
    """How many configs were illegal, by reason."""

    def __len__(self) -> int:
        return len(self.configs)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Searched parameters that leave a choice."""
        return tuple(each for each in self.family.config_type.parameters() if each.searched and len(each.choices) > 1)

    @cached_property
    def rank(self) -> dict[Config, int]:
        return {config: rank for rank, config in enumerate(self.configs)}

    def name(self, parameter: Parameter) -> str:
        """Name of an Optuna parameter: equal names of two families must not meet in one model."""
        return f"{self.family.name}.{parameter.name}"

    def point(self, config: Config) -> dict[str, int]:
        """``config`` as indices into each parameter's choices."""
        return {self.name(each): each.choices.index(getattr(config, each.name)) for each in self.parameters}

    def at(self, point: Mapping[str, int]) -> Config:
        """The legal config with these indices."""
        return self._by_point[tuple(point[self.name(each)] for each in self.parameters)]

    @cached_property
    def _by_point(self) -> dict[tuple[int, ...], Config]:
        return {tuple(self.point(config).values()): config for config in self.configs}

    @cached_property
    def _values(self) -> dict[str, list[int]]:
        """Indices of each parameter that occur, in order."""
        points = [self.point(config) for config in self.configs]
        return {self.name(each): sorted({point[self.name(each)] for point in points}) for each in self.parameters}

    @cached_property
    def grid(self) -> npt.NDArray[np.float64]:
        """Indices of all configs, each axis scaled to 0..1."""
        points = [list(self.point(config).values()) for config in self.configs]
        scale = [len(each.choices) - 1 for each in self.parameters]
        indices = np.array(points, dtype=np.float64).reshape(len(self.configs), len(scale))
        return np.asarray(indices / np.array(scale), dtype=np.float64)

    def nearest(self, point: Mapping[str, float], closed: Collection[Config]) -> Config | None:
        """The config outside ``closed`` that is nearest to ``point``; ties go to the better rank. None if all are."""
        wanted = np.array([point[self.name(each)] / (len(each.choices) - 1) for each in self.parameters])
        order = np.argsort(np.abs(self.grid - wanted).sum(axis=1), kind="stable")
        return next((self.configs[rank] for rank in order if self.configs[rank] not in closed), None)

    def neighbour(self, config: Config, closed: Collection[Config]) -> Config | None:
        """The best-ranked config outside ``closed`` that differs from ``config`` by one step of one parameter, to the
        next of the values that configs here have."""
        point = self.point(config)
        around = []
        for name, values in self._values.items():
            place = values.index(point[name])
            around += [
                {**point, name: each} for each in (*values[max(0, place - 1) : place], *values[place + 1 : place + 2])
            ]
        found = (self._by_point.get(tuple(each.values())) for each in around)
        open_ones = [each for each in found if each is not None and each not in closed]
        return min(open_ones, key=self.rank.__getitem__, default=None)

    def best_open(self, closed: Collection[Config]) -> Config | None:
        """The best-ranked config outside ``closed``."""
        return next((config for config in self.configs if config not in closed), None)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """One integer range per parameter: the index into its choices, which keeps their order."""
    return {space.name(each): IntDistribution(0, len(each.choices) - 1) for each in space.parameters}


def make_space(problem: Problem, gpu: Gpu, family: AnyFamily) -> Space:
    """Enumerates and ranks. Empty, with the reason counted, where the family doesn't support the problem."""
    legal, rejected = _legal(family, problem.spec, gpu)
    found = [each for config in legal for each in family.variants(config, problem, gpu)]
    return ranked(family, [(config, predict(problem, config, gpu)) for config in found], rejected)


@lru_cache(maxsize=64)
def _legal(family: AnyFamily, spec: Spec, gpu: Gpu) -> tuple[list[Config], Counter[str]]:
    """Problems share specs, and walking a whole product space takes a while."""
    return family.enumerate(spec, gpu)


def ranked(family: AnyFamily, found: Sequence[tuple[Config, Estimate]], rejected: Counter[str]) -> Space:
    """A space in order of predicted time; equal times keep a fixed order by key."""
    order = sorted(found, key=lambda pair: (pair[1].seconds, pair[0].key))
    return Space(family, tuple(config for config, _ in order), tuple(estimate for _, estimate in order), rejected)
