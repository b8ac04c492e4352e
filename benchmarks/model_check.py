"""How good a choice the performance model makes, on a sweep of measurements: used to fit it, and by its test.

A score is the best measured time of a problem over that of the config which the model puts first, so 1 is perfect. The
sweep holds what tuning tried, so the model chooses among configs that were measured.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from flashtune.codegen.families.model import CONSTANTS, Constants, Estimate, preference
from flashtune.codegen.families.sm80_fwd import COSTS, Costs, Sm80Fwd, Sm80FwdConfig
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.tuner.tune.predicted_run import COMPILED_CONFIGS
from flashtune.values import from_json

RESULTS = Path(__file__).parent / "results"
SWEEP = RESULTS / "tune_h200_grid.jsonl.gz"
FITS = RESULTS / "model_fit.json"
GPU = gpu_by_alias("h200")
STAGES = ("screen", "measure", "final")
"""The later, the better measured."""


@dataclass(frozen=True, slots=True)
class Facts:
    registers: int
    spill_bytes: int
    static_shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    problem: Problem
    config: Sm80FwdConfig
    facts: Facts
    stage: str
    seconds: float
    """Median as measured."""
    best: float
    """Of the fastest config on the same problem."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One set of the constants that are fitted."""

    constants: Constants = CONSTANTS
    costs: Costs = COSTS

    def values(self) -> dict[str, float]:
        return asdict(self.constants) | asdict(self.costs)

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        return cls(
            Constants(**{field.name: values[field.name] for field in fields(Constants)}),
            Costs(**{field.name: values[field.name] for field in fields(Costs)}),
        )


def group(problem: Problem) -> str:
    """What is left out together when fitting."""
    return f"head_dim={problem.head_dim} {'causal' if problem.causal else 'full'}"


def read_sweep(path: Path = SWEEP) -> list[Row]:
    """One row for each correct (problem, config) of `sm80_fwd`, from the stage that measured it best."""
    found: dict[tuple[Problem, Sm80FwdConfig], dict[str, Any]] = {}
    with gzip.open(path, "rt") as file:
        next(file)  # the header
        for line in file:
            data = json.loads(line)
            if data["family"] != "sm80_fwd" or data["status"] != "ok":
                continue
            key = from_json(Problem, data["problem"]), Sm80FwdConfig.from_json(data["config"])
            if key not in found or STAGES.index(data["stage"]) > STAGES.index(found[key]["stage"]):
                found[key] = data
    best: dict[Problem, float] = {}
    for (problem, _), data in found.items():
        best[problem] = min(best.get(problem, math.inf), data["median_us"] / 1e6)
    return [
        Row(problem, config, Facts(data["registers"], data["spill_bytes"]), data["stage"], data["median_us"] / 1e6,
            best[problem])
        for (problem, config), data in found.items()
    ]  # fmt: skip


def estimates(rows: Sequence[Row], fit: Fit, compiled: bool) -> list[Estimate]:
    """By the model: with the compiler's facts, or with what is known before compiling."""
    kind = Sm80Fwd(fit.costs, fit.constants)
    return [kind.predict(row.config, row.problem, GPU, row.facts if compiled else None) for row in rows]


@dataclass(frozen=True, slots=True)
class Scores:
    """By problem, in each way to choose."""

    ranked: dict[Problem, float]
    """First by the model before anything is compiled."""
    compiled: dict[Problem, float]
    """First where the compiler's facts of all configs are known."""
    chosen: dict[Problem, float]
    """As a predicted run chooses: compiles the best-ranked of a spec and ranks them again with the facts, wary of
    spills."""

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            name: {"geomean": round(geomean(scores.values()), 4), "lowest": round(min(scores.values()), 4)}
            for name, scores in (("ranked", self.ranked), ("compiled", self.compiled), ("chosen", self.chosen))
        }


def score(rows: Sequence[Row], fit: Fit) -> Scores:
    before = [each.seconds for each in estimates(rows, fit, compiled=False)]
    facts = estimates(rows, fit, compiled=True)
    after = [each.seconds for each in facts]
    wary = [preference(each, row.facts.spill_bytes) for each, row in zip(facts, rows, strict=True)]
    by_problem: dict[Problem, list[int]] = {}
    for number, row in enumerate(rows):
        by_problem.setdefault(row.problem, []).append(number)
    candidates = _candidates(rows, by_problem, before)
    result = Scores({}, {}, {})
    for problem, numbers in by_problem.items():
        inside = [number for number in numbers if rows[number].config in candidates[problem.spec]]
        ways = (result.ranked, before, numbers), (result.compiled, after, numbers), (result.chosen, wary, inside)
        for scores, times, among in ways:
            first = rows[min(among, key=lambda number: (times[number], rows[number].config.key))]
            scores[problem] = first.best / first.seconds
    return result


def _candidates(
    rows: Sequence[Row], by_problem: Mapping[Problem, Sequence[int]], before: Sequence[float]
) -> dict[Spec, set[Sm80FwdConfig]]:
    """The configs of each spec that a predicted run compiles. Not all were measured on all problems: means compare."""
    excess: dict[Spec, dict[Sm80FwdConfig, list[float]]] = {}
    for problem, numbers in by_problem.items():
        fastest = min(before[number] for number in numbers)
        of_spec = excess.setdefault(problem.spec, {})
        for number in numbers:
            of_spec.setdefault(rows[number].config, []).append(math.log(before[number] / fastest))
    return {
        spec: set(
            sorted(found, key=lambda config: (sum(found[config]) / len(found[config]), config.key))[:COMPILED_CONFIGS]
        )
        for spec, found in excess.items()
    }


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(each) for each in values]
    return math.exp(sum(logs) / len(logs))
