"""How a search proposes configs, by the name a user gives: `strategy`.

The names are checked against what Optuna exports; nothing is imported because of a name.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, create_trial

from flashtune.errors import InvalidInput, InvalidType
from flashtune.values import shown

from .gaussian_process import ResidualSampler
from .space import Space

DEFAULT_SAMPLER = "residual"
OPTUNA = "optuna:"
EXHAUSTIVE = 48
"""Spaces up to this size are walked in the model's order: searching would cost as much as trying all."""
STARTUP = 12
"""Configs in the model's order that are measured before one of Optuna's samplers proposes."""
MODEL_SHARE = 0.25
"""Part of the later trials that follow the model's order all the same."""
RESIDUAL_STARTUP, RESIDUAL_MODEL_SHARE = 2, 0.1
"""The first two for the sampler of `residual`, which knows the model. In replays no share from 0 to 0.25 won; some
of the model's order is kept for spaces in which what was measured misleads."""
NEAR_SHARE = 0.2
"""Part of the later trials that go next to the best: what one step of one parameter makes faster, or as fast with less,
is then not left to chance."""
_WALKERS = ("BruteForceSampler",)
"""Samplers that walk a product of ranges by themselves, one parameter after the other; ``exhaustive`` does it here."""
_TOLD = 16
"""Trials of the search that shows whether a sampler works: more than any start-up of Optuna's samplers."""

Ranges = dict[str, BaseDistribution]


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's lines for each study that lives in memory, and its warnings that a part is experimental."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(level)


@dataclass(frozen=True, slots=True)
class Strategy:
    """What proposes, and how much of a search follows the model's order instead."""

    name: str
    make: Callable[[Space, int], BaseSampler] | None
    """Makes the sampler from a space and a seed; None where there is none and all follow the model's order."""
    startup: int = STARTUP
    """Configs that are measured before the sampler proposes."""
    model_share: float = MODEL_SHARE
    """Part of the later trials that take the best-ranked config that is open."""
    near_share: float = NEAR_SHARE
    """Part of the later trials that change the fastest configs by one step."""
    walked: int = EXHAUSTIVE
    """Spaces up to this size are walked in the model's order whatever would propose."""


def strategy(name: str) -> Strategy:
    """``residual``, ``tpe``, ``random`` (which knows no model), ``exhaustive`` or ``optuna:<class>``.

    Others raise `InvalidInput` with what is allowed.

    ``<class>`` is a sampler that `optuna.samplers` exports, that takes nothing but perhaps a seed, and that works on
    ranges of integers here: some need packages that flashtune does not.
    """
    if not isinstance(name, str):
        raise InvalidType(f"sampler={shown(name)} must be text, such as 'tpe'")
    if name == "residual":
        return Strategy(
            name,
            lambda space, _: ResidualSampler(space),
            startup=RESIDUAL_STARTUP,
            model_share=RESIDUAL_MODEL_SHARE,
        )
    if name == "tpe":
        return Strategy(name, lambda _, seed: _tpe(seed))
    if name == "random":
        return Strategy(
            name, lambda _, seed: optuna.samplers.RandomSampler(seed=seed), startup=0, model_share=0.0, near_share=0.0
        )
    if name == "exhaustive":
        return Strategy(name, None)
    kind = _exported().get(name.removeprefix(OPTUNA)) if name.startswith(OPTUNA) else None
    if kind is None:
        listed = ", ".join(f"{OPTUNA}{each}" for each in _exported())
        raise InvalidInput(f"sampler {shown(name)} is not known. Allowed: residual, tpe, random, exhaustive, {listed}")

    try:
        _try_out(_made(kind, 0))
    except Exception as error:  # a sampler may need a package, a search space of its own, or `Study.optimize`
        reason = " ".join(str(error).split())[:300]
        raise InvalidInput(f"sampler {name} can't be used here: {type(error).__name__}: {reason}") from error
    return Strategy(name, lambda _, seed: _made(kind, seed))


def proposal(inner: BaseSampler, study: Study, trial: FrozenTrial, ranges: Ranges) -> dict[str, Any]:
    """What ``inner`` proposes for all of ``ranges``: together what it can, one by one what it leaves."""
    together = inner.infer_relative_search_space(study, trial)
    found = inner.sample_relative(study, trial, together) if together else {}
    return {
        name: found[name] if name in found else inner.sample_independent(study, trial, name, kind)
        for name, kind in ranges.items()
    }


def _tpe(seed: int) -> BaseSampler:
    with quiet():
        return optuna.samplers.TPESampler(multivariate=True, group=True, seed=seed, n_startup_trials=1)


def _made(kind: Any, seed: int) -> BaseSampler:
    with quiet():
        made = kind(seed=seed) if "seed" in inspect.signature(kind).parameters else kind()
    assert isinstance(made, BaseSampler)
    return made


def _exported() -> dict[str, type[BaseSampler]]:
    """The samplers of `optuna.samplers` that can be made from a seed or from nothing, by name."""
    found = {name: getattr(optuna.samplers, name, None) for name in sorted(optuna.samplers.__all__)}
    return {
        name: kind
        for name, kind in found.items()
        if name not in _WALKERS
        and isinstance(kind, type)
        and issubclass(kind, BaseSampler)
        and not inspect.isabstract(kind)
        and all(_optional(each) for each in inspect.signature(kind).parameters.values())
    }


def _optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty or parameter.kind in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _try_out(inner: BaseSampler) -> None:
    """Raises what ``inner`` raises in a small search that asks and tells as a run does."""
    ranges: Ranges = {"first": IntDistribution(0, 9), "second": IntDistribution(0, 9)}
    with quiet():
        study = optuna.create_study(sampler=_Whole(inner, ranges))
        for number in range(_TOLD):
            point = {"first": number % 7, "second": number % 10}
            study.add_trial(create_trial(value=float(number), params=point, distributions=ranges))
        for value in (1.0, 2.0):
            study.tell(study.ask(fixed_distributions=ranges), value)


class _Whole(BaseSampler):
    """Samples all of ``ranges`` by `proposal`."""

    def __init__(self, inner: BaseSampler, ranges: Ranges) -> None:
        self.inner = inner
        self.ranges = ranges

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Ranges:
        return self.ranges

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Ranges) -> dict[str, Any]:
        return proposal(self.inner, study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise RuntimeError(f"{param_name} was not asked for")

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self.inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        self.inner.after_trial(study, trial, state, values)
