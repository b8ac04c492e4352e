"""Which kernels ``attention()`` would choose, as one number that processes can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import UnsupportedProblem
from flashtune.tuned_db.records.measurement import Choice, canonical, capability
from flashtune.tuned_db.store.store import LOCK_TIMEOUT, Store

from .lookup import find_in, source_digest
from .sources import RowSource, Shipped, bundled

SCHEMA = "flashtune-choices/1"


@dataclass(frozen=True, slots=True)
class Choices:
    """What would run, by problem."""

    digest: str
    """64 hexadecimal digits: the SHA-256 of the GPU model and of family, config and source of each problem."""
    chosen: dict[Problem, Choice]


def choices(gpu: Gpu, problems: Iterable[Problem] | None = None, *, database: Path | None = None) -> Choices:
    """The configs that ``attention()`` would choose on ``gpu``, and their digest.

    ``problems`` are those that count; None is all that ``database`` and the measurements that ship with flashtune have
    a usable row of, for GPUs of that capability. ``database`` is None or missing where there is none.
    The same choices give the same digest, whatever rows they follow from, in whatever order, on any machine.

    Raises `StoreError` for a database that can't be used, which a call of ``attention()`` would pass over, and
    `UnsupportedProblem` for a problem among ``problems`` that no family serves on ``gpu``.
    """
    wanted = capability(gpu.key)
    shipped = bundled(wanted)
    if database is None or not database.exists():
        return _choices(gpu, problems if problems is not None else _known(shipped, wanted), [shipped], problems is None)
    with Store.open(database, create=False, readonly=True, timeout=LOCK_TIMEOUT).snapshot() as own:
        if problems is not None:
            return _choices(gpu, problems, [own, shipped], known=False)
        predicted = {each.problem for each in own.predictions(gpu_key=gpu.key)}
        found = predicted | _known(own, wanted) | _known(shipped, wanted)
        return _choices(gpu, found, [own, shipped], known=True)


def _choices(gpu: Gpu, problems: Iterable[Problem], sources: list[RowSource], known: bool) -> Choices:
    chosen: dict[Problem, Choice] = {}
    for problem in sorted(set(problems), key=lambda each: each.key):
        try:
            choice = find_in(problem, gpu, sources)
        except UnsupportedProblem:
            if not known:
                raise
            continue
        if not known or _decided(choice, problem):
            chosen[problem] = choice
    lines = [
        {
            "problem": problem.key,
            "family": choice.family,
            "config": choice.config.key,
            "source": source_digest(problem.spec, choice.config),
        }
        for problem, choice in chosen.items()
    ]
    text = canonical({"schema": SCHEMA, "gpu": gpu.key, "choices": lines})
    return Choices(hashlib.sha256(text.encode()).hexdigest(), chosen)


def _decided(choice: Choice, problem: Problem) -> bool:
    """Whether a row of ``problem`` decided: one that can't be used leaves the choice as it would be without it."""
    record = choice.measurement or choice.prediction
    return record is not None and record.problem == problem


def _known(source: Store | Shipped, wanted: str) -> set[Problem]:
    """Problems with measurements on chips of the capability ``wanted``."""
    return {each for key in source.gpu_keys(capability=wanted) for each in source.problems(gpu_key=key)}
