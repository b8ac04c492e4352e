"""The kernel families by name, and questions that concern all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import InvalidInput, UnsupportedProblem
from flashtune.values import shown

from .family import AnyFamily
from .fma_fwd import FmaFwd
from .model import CompilerFacts, Estimate
from .sm80_fwd import Sm80Fwd
from .sm90_fwd import Sm90Fwd

_LISTED: tuple[Any, ...] = (Sm90Fwd(), Sm80Fwd(), FmaFwd())
_FAMILIES: dict[str, AnyFamily] = {each.name: each for each in _LISTED}


def families() -> dict[str, AnyFamily]:
    """Every family by name, the most specialised first."""
    return _FAMILIES


def family(name: str) -> AnyFamily:
    """The family called ``name``."""
    known = families()
    if not isinstance(name, str) or name not in known:
        raise InvalidInput(f"kernel family {shown(name)} is not known. Known: {', '.join(known)}")
    return known[name]


def source_for(problem: Problem, config: Config) -> Source:
    """The CUDA source of ``config`` for ``problem``."""
    return family(config.family).source(config, problem.spec)


def unusable(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why ``config`` can't serve ``problem`` on ``gpu``, or None."""
    return family(config.family).unusable(config, problem, gpu)


def predict(problem: Problem, config: Config, gpu: Gpu, compiled: CompilerFacts | None = None) -> Estimate:
    """The expected time of ``config``; see `Family.predict`."""
    return family(config.family).predict(config, problem, gpu, compiled)


def supporting(spec: Spec, gpu: Gpu) -> list[AnyFamily]:
    """Families that serve ``spec`` on ``gpu``, the most specialised first; none raises :class:`UnsupportedProblem`."""
    reasons = {each.name: each.refuses(spec, gpu) for each in families().values()}
    found = [family(name) for name, reason in reasons.items() if reason is None]
    if not found:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedProblem(f"no kernel serves {spec} on {gpu}: {listed}")
    return found


def read_config(name: str, data: Mapping[str, object]) -> Config:
    """A config of family ``name`` from untrusted data."""
    return family(name).config_type.from_json(data)


def default_config(problem: Problem, gpu: Gpu, families: Sequence[AnyFamily] | None = None) -> Config:
    """What serves ``problem`` where nothing is known: of the defaults, the one with the least predicted time.

    ``families`` to choose from all support it; by default all that do. Raises `UnsupportedProblem` where there is none.
    """
    kinds = families or supporting(problem.spec, gpu)
    found = [(each, each.default_for(problem, gpu)) for each in kinds]
    fit = [(each, config) for each, config in found if each.unusable(config, problem, gpu) is None]
    if not fit:  # sizes that nothing takes: the plan says why
        return found[-1][1]
    first = [config for each, config in fit if not each.last_resort]
    return min(first or [config for _, config in fit], key=lambda config: predict(problem, config, gpu).seconds)
