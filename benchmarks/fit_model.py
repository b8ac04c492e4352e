"""Fits the performance model's constants to a sweep, all of it and without each (head_dim, mask) group.

    python benchmarks/fit_model.py          # writes benchmarks/results/model_fit.json, prints what to ship

Damped least squares on logarithms: of the constants, which are positive, and of predicted over measured time. Rows
count by how near the best of their problem they are, as ranking matters there; screened rows, which were timed
briefly, count less. A weak pull to the start holds what the data leave open. What ships is the fit to all; the others
say how well the model chooses for a group that it has not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from environment import environment
from least_squares import least_squares
from model_check import FITS, SWEEP, Fit, Row, Scores, estimates, group, read_sweep, score

Vector = npt.NDArray[np.float64]

START = {
    "exposed": 0.5,
    "chained": 0.2,
    "shared": 1.0,
    "spill": 2.0,
    "step_latency": 500.0,
    "load_latency": 200.0,
    "tile_latency": 1000.0,
    "uneven": 0.5,
    "ends": 2.0,
    "alu_per_score": 6.0,
    "alu_per_thread": 200.0,
    "masked_alu_per_score": 8.0,
}
"""Rough, by hand: the size of what each stands for."""
PULL = 0.02
"""Weight of the squared log-distance from the start."""
SCREENED = 0.6
"""Weight of a screened row's residual."""
DIGITS = 4


def fit(rows: list[Row]) -> Fit:
    """The constants that explain ``rows`` best."""
    names = list(START)
    start = np.log(np.array([START[name] for name in names]))
    measured = np.log(np.array([row.seconds for row in rows]))
    weight = np.array([(row.best / row.seconds) ** 2 * (SCREENED if row.stage == "screen" else 1.0) for row in rows])

    def made(point: Vector) -> Fit:
        return Fit.of(
            {name: float(f"{value:.{DIGITS + 4}g}") for name, value in zip(names, np.exp(point), strict=True)}
        )

    def residuals(point: Vector) -> Vector:
        return np.concatenate([weight * (log_seconds(rows, made(point)) - measured), PULL**0.5 * (point - start)])

    point = least_squares(residuals, start)
    return Fit.of({name: float(f"{value:.{DIGITS}g}") for name, value in zip(names, np.exp(point), strict=True)})


def log_seconds(rows: list[Row], one: Fit) -> Vector:
    """What the model expects, knowing the compiler's facts."""
    return np.asarray(np.log([each.seconds for each in estimates(rows, one, compiled=True)]), dtype=np.float64)


def fit_without(left_out: str) -> Fit:
    """The fit to all groups but one, or to all if the name is empty."""
    return fit([row for row in read_sweep() if group(row.problem) != left_out])


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
    parts = [score([row for row in rows if group(row.problem) == name], one) for name, one in left_out.items()]
    unseen = Scores(*({p: s for part in parts for p, s in getattr(part, way).items()} for way in Scores.__slots__))
    residual = log_seconds(rows, shipped) - np.log(np.array([row.seconds for row in rows]))
    written = {
        "environment": environment(),
        "sweep": SWEEP.name,
        "rows": len(rows),
        "spread": round(float(residual.std()), 4),
        "scores": {"all": score(rows, shipped).summary(), "left out": unseen.summary()},
        "all": shipped.values(),
        "without": {name: one.values() for name, one in left_out.items()},
    }
    arguments.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written["scores"], indent=1))
    print(json.dumps(shipped.values(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
