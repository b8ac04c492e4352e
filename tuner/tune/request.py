"""What a tuning run is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashtune.codegen.families.family import AnyFamily
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.results.budget import Budget
from flashtune.tuner.search.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """Problems, and how they are to be searched."""

    problems: Sequence[Problem]
    budget: Budget
    """Shared by the problems."""
    families: Callable[[Problem], Sequence[AnyFamily]]
    """Families to search for a problem, the most specialised first."""
    strategy: Strategy | None = None
    """What proposes configs; None is the default. A prediction ranks all: it uses neither this nor ``first``."""
    first: Sequence[Config] = ()
    """Configs that are tried before all else; they are legal for each problem."""
