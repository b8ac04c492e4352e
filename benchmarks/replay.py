"""Compares what may propose configs, with no GPU: searches are replayed on kept sweeps of an H200.

    python benchmarks/replay.py --out benchmarks/results/replay.json      # some minutes on one core

A replayed search is one of `ProblemSearch`, as in a run, over the configs that a sweep holds: what it asks for is
answered with what was measured, some configs later (`AHEAD`), since a run compiles ahead. Configs that failed are in it
and count as tried. Regret is the best time found over the sweep's best, less 1.

Parts:
- `sm80`: `tune_h200_grid` and `tune_h200_wide`, 49 problems of about 121 configs (of 125 to 3465 legal ones: what a
  search by TPE and in the model's order had tried, so both are on home ground).
- `sm90`: the problems of `tune_h200_sm90` with `LEAST_CONFIGS` or more: 20 of 46, with 43 to 61 (of up to 7800), so 60
  would say nothing. Judged after a third, with as many fewer out at a time. Small spaces are not walked here: these
  stand for large ones.
- `families`: the 46 problems in both, 130 to 184 configs of two families, of which one takes 1.3 to 2.4 times as long.
`sm80_trials_h200.json` has no configs as the tuner knows them and is not used.

Models, by which configs are ranked, as good as the search gets them:
- `left out`: constants fitted to other groups of (head_dim, mask) than the problem's: a shape nobody has measured.
- `rough`: each constant off by a factor of e**0.4 or so, drawn for each spec and seed: a chip nothing was fitted to.

Bars, for the sampler that is the default: median regret within 1 %, nine in ten within 3 %, after 60 configs in `sm80`
and `families`, after a third in `sm90`; and it loses to no other sampler there by more than `SLACK` in the mean.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from environment import environment
from model_check import FITS, GPU, RESULTS, STAGES, Fit, group

from flashtune.codegen.families.registry import default_config, unusable
from flashtune.codegen.families.sm80_fwd import Sm80Fwd
from flashtune.codegen.families.sm90_fwd import Sm90Fwd
from flashtune.codegen.families.sm90_time import CONSTANTS, TimeConstants
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.records.parse import measurement_from_json
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.search.space import Space, ranked
from flashtune.tuner.search.strategy import DEFAULT_SAMPLER, strategy

SWEEPS = {"sm80": ("tune_h200_grid", "tune_h200_wide"), "sm90": ("tune_h200_sm90",)}
FITS_SM90 = RESULTS / "model_fit_sm90.json"
PARTS, MODELS = ("sm80", "sm90", "families"), ("left out", "rough")
SAMPLERS = ("residual", "tpe", "random", "exhaustive")
TRIALS = 60
AHEAD = 8
"""Configs that are out while one is asked for, of `TRIALS`: twice the compile workers of a host with 4 cores."""
LEAST_CONFIGS = 40
ROUGH = 0.4
MEDIAN_BAR, NINE_IN_TEN_BAR = 0.01, 0.03
SLACK = 0.002
"""By so much mean regrets may differ by chance (of about 50 problems and 2 seeds)."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was measured of one problem."""

    problem: Problem
    rows: Mapping[Config, Measurement]

    def seconds(self, config: Config) -> float | None:
        row = self.rows[config]
        return row.median_us / 1e6 if row.status == "ok" and row.median_us else None

    @property
    def best(self) -> float:
        return min(seconds for config in self.rows if (seconds := self.seconds(config)))


@cache
def read(names: Sequence[str]) -> list[Sweep]:
    """One row for each config that is legal today, from the stage that measured it best."""
    found: dict[Problem, dict[Config, Measurement]] = {}
    for name in names:
        with gzip.open(RESULTS / f"{name}.jsonl.gz", "rt") as file:
            next(file)  # the header
            for line in file:
                row = measurement_from_json(json.loads(line))
                rows = found.setdefault(row.problem, {})
                old = rows.get(row.config)
                later = old is None or STAGES.index(row.stage) > STAGES.index(old.stage)
                if later and unusable(row.config, row.problem, GPU) is None:
                    rows[row.config] = row
    return [Sweep(problem, rows) for problem, rows in found.items()]


def sweeps(part: str) -> list[Sweep]:
    if part != "families":
        return [each for each in read(SWEEPS[part]) if len(each.rows) >= LEAST_CONFIGS]
    other = {each.problem: each.rows for each in read(SWEEPS["sm90"])}
    both = [each for each in read(SWEEPS["sm80"]) if each.problem in other]
    return [Sweep(each.problem, {**each.rows, **other[each.problem]}) for each in both]


def spaces(sweep: Sweep, model: str, seed: int) -> list[Space]:
    """The configs of ``sweep`` by family, ranked by ``model``."""
    without, without_sm90 = (json.loads(path.read_text(encoding="utf-8"))["without"] for path in (FITS, FITS_SM90))
    name = group(sweep.problem)
    fit = Fit.of(without.get(name, Fit().values()))  # what is in no group was not fitted to anyway
    fit_sm90 = TimeConstants(**without_sm90.get(name, asdict(CONSTANTS)))
    if model == "rough":
        draw = random.Random(zlib.crc32(f"{sweep.problem.spec.key} {seed}".encode()))
        fit = Fit.of({key: value * math.exp(draw.gauss(0, ROUGH)) for key, value in Fit().values().items()})
        off = {key: value * math.exp(draw.gauss(0, ROUGH)) for key, value in asdict(CONSTANTS).items()}
        fit_sm90 = TimeConstants(**off)
    kinds: dict[str, Any] = {"sm80_fwd": Sm80Fwd(fit.costs, fit.constants), "sm90_fwd": Sm90Fwd(fit_sm90)}
    found = []
    for name in sorted({config.family for config in sweep.rows}):
        kind = kinds[name]
        configs = [config for config in sweep.rows if config.family == name]
        estimates = [kind.predict(each, sweep.problem, GPU) for each in configs]
        found.append(ranked(kind, list(zip(configs, estimates, strict=True)), Counter()))
    return found


def replay(sweep: Sweep, within: Sequence[Space], sampler: str, seed: int, trials: int) -> list[float]:
    """Regret after each of ``trials`` configs; infinite while none was correct."""
    default = default_config(sweep.problem, GPU)
    if default not in sweep.rows:  # then one from which no search gains much
        default = within[0].configs[-1]
    search = ProblemSearch(sweep.problem, within, default, {}, [], seed, replace(strategy(sampler), walked=0))
    ahead = AHEAD * trials // TRIALS
    out: deque[Config] = deque()
    regrets: list[float] = []
    best = sweep.best
    for _ in range(trials):
        while len(out) <= ahead and search.asked < trials and (config := search.ask()) is not None:
            out.append(config)
        if out:
            config = out.popleft()
            search.tell(config, sweep.rows[config], sweep.seconds(config))
        regrets.append(math.inf if search.best is None else search.best / best - 1)
    return regrets


def trials_of(part: str, sweep: Sweep) -> int:
    return -(-len(sweep.rows) // 3) if part == "sm90" else TRIALS


def compare(
    part: str, model: str, samplers: Sequence[str], seeds: int, chosen: Sequence[Sweep] | None = None
) -> dict[str, dict[str, float]]:
    """By sampler: regrets in % at the end, in the mean also after a quarter, and milliseconds for each config asked."""
    found: dict[str, list[list[float]]] = {name: [] for name in samplers}
    spent: Counter[str] = Counter()
    for sweep in sweeps(part) if chosen is None else chosen:
        for seed in range(seeds):
            within = spaces(sweep, model, seed)
            for name in samplers:
                started = time.perf_counter()
                found[name].append(replay(sweep, within, name, seed, trials_of(part, sweep)))
                spent[name] += time.perf_counter() - started
    return {name: _summary(each, spent[name]) for name, each in found.items()}


def _summary(regrets: Sequence[Sequence[float]], seconds: float) -> dict[str, float]:
    last = np.array([each[-1] for each in regrets])
    early = np.array([each[len(each) // 4 - 1] for each in regrets])
    return {
        "median": round(100 * float(np.median(last)), 3),
        "nine in ten": round(100 * float(np.quantile(last, 0.9)), 3),
        "mean": round(100 * float(last.mean()), 3),
        "worst": round(100 * float(last.max()), 2),
        "mean after a quarter": round(100 * float(early.mean()), 3),
        "ms": round(1e3 * seconds / sum(len(each) for each in regrets), 2),
    }


def meets_bars(row: Mapping[str, float]) -> bool:
    return row["median"] <= 100 * MEDIAN_BAR and row["nine in ten"] <= 100 * NINE_IN_TEN_BAR


def loses_to(rows: Mapping[str, Mapping[str, float]], sampler: str) -> list[str]:
    """Samplers whose mean regret is clearly lower than that of ``sampler``."""
    return [name for name, row in rows.items() if row["mean"] < rows[sampler]["mean"] - 100 * SLACK]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for part in PARTS:
        for model in MODELS:
            rows = results.setdefault(part, {})[model] = compare(part, model, SAMPLERS, options.seeds)
            for name, row in rows.items():
                print(f"{part:9}{model:10}{name:11}{row}", flush=True)
    every = [rows for models in results.values() for rows in models.values()]
    passed = {
        "bars": all(meets_bars(rows[DEFAULT_SAMPLER]) for rows in every),
        "best": not any(loses_to(rows, DEFAULT_SAMPLER) for rows in every),
    }
    print(passed)
    if options.out:
        sizes = {part: sorted(len(each.rows) for each in sweeps(part)) for part in PARTS}
        written = {
            "what": __doc__,
            "environment": environment(),
            "seeds": options.seeds,
            "problems": {part: len(each) for part, each in sizes.items()},
            "configs": {part: [each[0], each[-1]] for part, each in sizes.items()},
            "default": DEFAULT_SAMPLER,
            "regret in %": results,
            "passed": passed,
        }
        options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
