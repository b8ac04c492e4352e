"""How well a problem is served by its neighbours: each of 112 that were tuned on an H200 is looked up among the others.

    python benchmarks/neighbours.py --out benchmarks/results/neighbours_h200.json

Needs no GPU: what is served was nearly always tried for the problem itself too, in the same session, and its time is
known from there (of a final, else of one measurement, which is less sure by some percent). Once by the rule of
`tuned_db/lookup/lookup.py`; once by the nearest whose predicted time is no loss, which was the rule before it; once by
the default alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from environment import environment
from model_check import RESULTS

from flashtune.codegen.families.registry import default_config, family, predict
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.lookup.lookup import find_in
from flashtune.tuned_db.policy.distance import problem_distance
from flashtune.tuned_db.policy.winners import rank, variants
from flashtune.tuned_db.records.measurement import Measurement, Prediction, Variant

TUNED = ("tune_h200.jsonl.gz", "tune_h200_models.jsonl.gz")
GPU = gpu_by_alias("h200")
WITHIN = 1.01
"""More of the default's time than this is a loss."""

Rows = Mapping[Problem, Sequence[Measurement]]


class Others:
    """The rows of all problems but one, as a look-up asks for them."""

    label = "others"

    def __init__(self, rows: Rows, left_out: Problem) -> None:
        self._rows = {problem: found for problem, found in rows.items() if problem != left_out}

    def measurements(self, *, problem: Problem, gpu_key: str, status: str, stage: str) -> list[Measurement]:
        rows = self._rows.get(problem, ()) if gpu_key == GPU.key else ()
        return [each for each in rows if (each.status, each.stage) == (status, stage)]

    def predictions(self, *, problem: Problem, gpu_key: str) -> list[Prediction]:
        return []

    def problems(self, *, spec: Spec, gpu_key: str) -> list[Problem]:
        return [each for each in self._rows if each.spec == spec and gpu_key == GPU.key]

    def gpu_keys(self, *, capability: str) -> list[str]:
        return [GPU.key]

    def rejected(self, spec: Spec, gpu_key: str) -> frozenset[Variant]:
        return frozenset()


def read_rows() -> Rows:
    rows = defaultdict(list)
    for name in TUNED:
        for each in read_export(RESULTS / name).measurements:
            rows[each.problem].append(each)
    return rows


def by_rule(problem: Problem, rows: Rows, gpu: Gpu) -> Config:
    return find_in(problem, gpu, [Others(rows, problem)]).config


def by_distance(problem: Problem, rows: Rows, gpu: Gpu) -> Config:
    """The nearest winner that the model predicts to be no loss."""
    default = default_config(problem, gpu)
    near = [each for each in rows if each.spec == problem.spec and each != problem]
    for each in sorted(near, key=lambda each: (problem_distance(problem, each), each.key))[:8]:
        winner = rank(rows[each])[0].config
        kind = family(winner.family)
        config = kind.fitted(winner, problem, gpu)
        if kind.unusable(config, problem, gpu):
            continue
        if predict(problem, config, gpu).seconds <= predict(problem, default, gpu).seconds:
            return config
    return default


def by_default(problem: Problem, rows: Rows, gpu: Gpu) -> Config:
    return default_config(problem, gpu)


RULES: dict[str, Callable[[Problem, Rows, Gpu], Config]] = {
    "expected gain": by_rule,
    "nearest": by_distance,
    "default": by_default,
}


def ratios(rows: Sequence[Measurement], default: Config) -> dict[Config, float]:
    """Time of each correct config relative to the default."""
    alone = [each.median_us for each in rows if each.config == default and each.stage == "measure" and each.median_us]
    found = {default: 1.0}
    for each in variants(rows):
        if each.ratio is not None:
            found[each.config] = each.ratio
        elif alone:
            found[each.config] = each.median_us / alone[0]
    return found


def served(rows: Rows) -> dict[str, dict[str, Any]]:
    result = {}
    for name, rule in RULES.items():
        reached, times, unknown = [], [], 0
        for problem, own in rows.items():
            known = ratios(own, default_config(problem, GPU))
            config = rule(problem, rows, GPU)
            if config not in known:
                unknown += 1
                continue
            reached.append(min(known.values()) / known[config])
            times.append(known[config])
        losses = sorted((round(each, 3) for each in times if each > WITHIN), reverse=True)
        result[name] = {
            "problems": len(times),
            "not tried there": unknown,
            "of their own best": round(statistics.geometric_mean(reached), 4),
            "least": round(min(reached), 3),
            "losses": losses,
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    found = served(read_rows())
    for name, each in found.items():
        print(name, each)
    if options.out:
        result = {"what": __doc__, "environment": environment(), "rules": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
