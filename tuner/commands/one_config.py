"""One config for several shapes of one spec: for those who want to ship a single kernel."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashtune.codegen.families.registry import default_config, unusable
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.policy.winners import variants
from flashtune.tuned_db.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The config that costs ``problems`` least, all together."""

    config: Config
    ratio: float
    """Geometric mean over the problems of its time relative to the best config of each; at least 1."""
    worst: Problem
    worst_ratio: float
    """Where it costs most, and how much."""
    considered: int
    """Configs that are known for all problems, of which it is the best."""


def check_shareable(problems: Sequence[Problem]) -> None:
    """Raises `InvalidInput` unless one kernel can serve all ``problems``."""
    specs = list(dict.fromkeys(each.spec for each in problems))
    if len(set(problems)) < 2:
        raise InvalidInput("a shared config needs two problems at least")
    if len(specs) > 1:
        raise InvalidInput(
            f"a shared config needs problems that one kernel serves, which differ in sizes alone; "
            f"these have {len(specs)} kinds: {specs[0]}, {specs[1]}{', ...' if len(specs) > 2 else ''}"
        )


def shared_config(store: Store, problems: Sequence[Problem], gpu: Gpu, *, measured: bool) -> Shared | None:
    """The best config of those that are known for each of ``problems`` and legal here; None where there is none.

    Known is what was measured, or without ``measured`` predicted, with the source of today.
    """
    known = _measured if measured else _predicted
    return choose({each: _legal(known(store, each, gpu), each, gpu) for each in problems})


def choose(times: Mapping[Problem, Mapping[Config, float]]) -> Shared | None:
    """The config with the least geometric mean of ratios to each problem's best, by times of any unit."""
    common = set.intersection(*(set(each) for each in times.values()))
    if not common:
        return None
    best = {problem: min(known.values()) for problem, known in times.items()}

    def ratios(config: Config) -> dict[Problem, float]:
        return {problem: known[config] / best[problem] for problem, known in times.items()}

    def cost(config: Config) -> tuple[float, str, str]:
        return statistics.geometric_mean(ratios(config).values()), config.family, config.key

    chosen = min(common, key=cost)
    worst, worst_ratio = max(ratios(chosen).items(), key=lambda pair: pair[1])
    return Shared(
        config=chosen, ratio=cost(chosen)[0], worst=worst, worst_ratio=worst_ratio, considered=len(common)
    )  # fmt: skip


def _legal(times: dict[Config, float], problem: Problem, gpu: Gpu) -> dict[Config, float]:
    """Rows may be from a version that knew other rules, or from anybody."""
    return {config: time for config, time in times.items() if unusable(config, problem, gpu) is None}


def _measured(store: Store, problem: Problem, gpu: Gpu) -> dict[Config, float]:
    """Time of each correct config relative to the default: of finals, else as single measurements say.

    Microseconds of different sessions don't compare. Where the default was not measured they are all there is.
    """
    rows = [
        each
        for each in store.measurements(problem=problem, gpu_key=gpu.key, status="ok")
        if each.source_digest == source_digest(problem.spec, each.config)
    ]
    default = default_config(problem, gpu)
    single = [each.median_us for each in rows if each.config == default and each.stage == "measure" and each.median_us]
    found = variants(rows, store.rejected(problem.spec, gpu.key))
    ratios = {each.config: each.ratio for each in found if each.ratio is not None}
    if single or not ratios:
        unit = statistics.median(single) if single else 1.0
        ratios |= {each.config: each.median_us / unit for each in found if each.ratio is None}
    return ratios


def _predicted(store: Store, problem: Problem, gpu: Gpu) -> dict[Config, float]:
    return {
        each.config: each.predicted_us
        for each in store.predictions(problem=problem, gpu_key=gpu.key)
        if each.source_digest == source_digest(problem.spec, each.config)
    }
