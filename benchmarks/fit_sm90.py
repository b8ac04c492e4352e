"""Fits the constants of `sm90_fwd`'s own time model to a sweep, all of it and without each (head_dim, mask) group.

    python benchmarks/fit_sm90.py          # writes benchmarks/results/model_fit_sm90.json, prints what to ship

As fit_model.py does it for the general model. A score is the best measured time of a problem over that of the config
which the model puts first among those measured; "near" counts the problems of which one of the model's first five is
within 3 % of the best.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from environment import environment
from least_squares import Vector, least_squares
from model_check import GPU, RESULTS, STAGES, geomean, group

from flashtune.codegen.families.sm90_fwd import Sm90FwdConfig
from flashtune.codegen.families.sm90_time import CONSTANTS, TimeConstants, predict_seconds
from flashtune.codegen.problem.problem import Problem
from flashtune.values import from_json

SWEEP = RESULTS / "tune_h200_sm90.jsonl.gz"
FITS = RESULTS / "model_fit_sm90.json"
PULL = 0.01
"""Weight of the squared log-distance from what ships now."""
SCREENED = 0.6
"""Weight of a screened row's residual."""
FIRST, NEAR = 5, 1.03
DIGITS = 4


@dataclass(frozen=True, slots=True)
class Row:
    problem: Problem
    config: Sm90FwdConfig
    stage: str
    seconds: float
    best: float
    """Of the fastest config on the same problem."""


def read_sweep(path: Path = SWEEP) -> list[Row]:
    """One row for each correct (problem, config), from the stage that measured it best."""
    found: dict[tuple[Problem, Sm90FwdConfig], dict[str, Any]] = {}
    with gzip.open(path, "rt") as file:
        next(file)  # the header
        for line in file:
            data = json.loads(line)
            if data["family"] != "sm90_fwd" or data["status"] != "ok":
                continue
            key = from_json(Problem, data["problem"]), Sm90FwdConfig.from_json(data["config"])
            if key not in found or STAGES.index(data["stage"]) > STAGES.index(found[key]["stage"]):
                found[key] = data
    best: dict[Problem, float] = {}
    for (problem, _), data in found.items():
        best[problem] = min(best.get(problem, math.inf), data["median_us"] / 1e6)
    return [
        Row(problem, config, data["stage"], data["median_us"] / 1e6, best[problem])
        for (problem, config), data in found.items()
    ]


def log_seconds(rows: Sequence[Row], constants: TimeConstants) -> Vector:
    return np.log([predict_seconds(row.config, row.problem, GPU, constants)[0] for row in rows])


def fit(rows: Sequence[Row]) -> TimeConstants:
    """The constants that explain ``rows`` best."""
    names = list(asdict(CONSTANTS))
    start = np.log(np.array(list(asdict(CONSTANTS).values())))
    measured = np.log(np.array([row.seconds for row in rows]))
    weight = np.array([(row.best / row.seconds) ** 2 * (SCREENED if row.stage == "screen" else 1.0) for row in rows])

    def made(point: Vector) -> TimeConstants:
        return TimeConstants(**dict(zip(names, map(float, np.exp(point)), strict=True)))

    def residuals(point: Vector) -> Vector:
        return np.concatenate([weight * (log_seconds(rows, made(point)) - measured), PULL**0.5 * (point - start)])

    point = least_squares(residuals, start)
    return TimeConstants(
        **{name: float(f"{value:.{DIGITS}g}") for name, value in zip(names, np.exp(point), strict=True)}
    )


def fit_without(left_out: str) -> TimeConstants:
    """The fit to all groups but one, or to all if the name is empty."""
    return fit([row for row in read_sweep() if group(row.problem) != left_out])


def scores(rows: Sequence[Row], constants: TimeConstants) -> dict[Problem, tuple[float, bool]]:
    """By problem: the score, and whether a near one is among the first."""
    by_problem: dict[Problem, list[tuple[float, str, float]]] = {}
    for row, expected in zip(rows, log_seconds(rows, constants), strict=True):
        by_problem.setdefault(row.problem, []).append((float(expected), row.config.key, row.best / row.seconds))
    found = {}
    for problem, ranked in by_problem.items():
        ranked.sort()
        found[problem] = ranked[0][2], max(score for _, _, score in ranked[:FIRST]) >= 1 / NEAR
    return found


def summary(found: Mapping[Problem, tuple[float, bool]]) -> dict[str, float]:
    return {
        "geomean": round(geomean(score for score, _ in found.values()), 4),
        "lowest": round(min(score for score, _ in found.values()), 4),
        "near": sum(near for _, near in found.values()),
        "problems": len(found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FITS)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    rows = read_sweep()
    groups = list(dict.fromkeys(group(row.problem) for row in rows))
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        shipped, *others = pool.map(fit_without, ["", *groups])
    left_out = dict(zip(groups, others, strict=True))
    unseen: dict[Problem, tuple[float, bool]] = {}
    for name, constants in left_out.items():
        unseen |= scores([row for row in rows if group(row.problem) == name], constants)
    residual = log_seconds(rows, shipped) - np.log(np.array([row.seconds for row in rows]))
    written = {
        "environment": environment(),
        "sweep": SWEEP.name,
        "rows": len(rows),
        "spread": round(float(residual.std()), 4),
        "scores": {"all": summary(scores(rows, shipped)), "left out": summary(unseen)},
        "all": asdict(shipped),
        "without": {name: asdict(constants) for name, constants in left_out.items()},
    }
    arguments.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written["scores"], indent=1))
    print(json.dumps(written["all"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
