"""The kernel families by name, and questions that concern all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import InvalidInput, UnsupportedProblem
from flashtune.values import shown

from .family import AnyFamily
from .fma_fwd import FmaFwd
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
