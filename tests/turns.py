"""Of many tests that are alike and take seconds of a core each, a bare `pytest` runs every second one or fewer.

The others are marked slow; `make test` runs all.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def by_turns(
    items: Iterable[T],
    every: int,
    alike: Callable[[T], Hashable] = lambda item: None,
    name: Callable[[T], str] = str,
) -> list[Any]:
    """Parameters of a test: of ``items`` that are ``alike`` the first stays in a bare run, and each ``every``-th."""
    seen: Counter[Hashable] = Counter()
    params = []
    for item in items:
        params.append(pytest.param(item, id=name(item), marks=[pytest.mark.slow] * bool(seen[alike(item)] % every)))
        seen[alike(item)] += 1
    return params


def checkered(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Pairs of both, as parameters of a test: a bare run has half of them, with each item of either in it."""
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [pytest.param(one, other, marks=[pytest.mark.slow] * ((i + j) % 2)) for (i, one), (j, other) in pairs]
