"""How well problems are served that nobody tuned: 30 shapes of real models, by what ships, against their own tuning.

    python benchmarks/held_out.py --out benchmarks/results/held_out_h200.json

The shapes were drawn once, with the seed below, from heads and widths of published models and from common lengths;
none of them ships, which is checked. Each is looked up in what ships alone, as `attention()` does it, then tuned from
an empty database; then what is served, the own winner and the default are timed together, interleaved. The bar: served
ones reach 0.95 of their own best as a geometric mean, and none is slower than the default by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from environment import environment

import flashtune
from flashtune.codegen.families.registry import default_config, source_for
from flashtune.codegen.gpu.devices import visible_gpus
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.lookup.lookup import find_in
from flashtune.tuned_db.lookup.sources import bundled
from flashtune.tuned_db.records.measurement import capability
from flashtune.tuner.bench.device_bench import DeviceBench
from flashtune.tuner.processes.compile_pool import build
from flashtune.tuner.trial.intervals import paired

MODELS = {
    # num_heads, num_heads_kv, head_dim, causal: from the config.json that each model is published with
    "Llama 3 8B": (32, 8, 128, True),
    "Llama 3 70B, a quarter": (16, 2, 128, True),
    "Qwen2.5 7B": (28, 4, 128, True),
    "Qwen2.5 14B": (40, 8, 128, True),
    "Gemma 2 9B": (16, 8, 256, True),
    "Gemma 7B": (16, 16, 256, True),
    "Phi-3 mini": (32, 32, 96, True),
    "GPT-2 XL": (25, 25, 64, True),
    "Pythia 6.9B": (32, 32, 128, True),
    "BERT large": (16, 16, 64, False),
    "ViT-L": (16, 16, 64, False),
    "FLUX.1": (24, 24, 128, False),
    "Stable Diffusion XL": (20, 20, 64, False),
    "Whisper large": (20, 20, 64, False),
}
LENGTHS = (577, 1000, 1500, 2048, 3000, 4096, 4608, 6000, 8192, 12000)
TOKENS = (8192, 16384, 32768)
SHAPES, SEED = 30, 20261130
BUDGET = "250s"
SERVED_AT_LEAST = 0.95
SLOWER_AT_MOST = 1.01
RETIME_SECONDS = 1.0


def shapes() -> dict[Problem, str]:
    """The problems, and the model of each."""
    draw = random.Random(SEED)
    found: dict[Problem, str] = {}
    while len(found) < SHAPES:
        name = draw.choice(list(MODELS))
        heads, heads_kv, head_dim, causal = MODELS[name]
        seqlen = draw.choice(LENGTHS)
        batch = max(1, draw.choice(TOKENS) // seqlen)
        found[
            Problem(
                dtype=draw.choice(("bfloat16", "bfloat16", "float16")),
                head_dim=head_dim,
                batch=batch,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
                num_heads=heads,
                num_heads_kv=heads_kv,
                causal=causal,
            )
        ] = name
    return found


def run(problems: dict[Problem, str], folder: Path) -> list[dict[str, Any]]:
    """The rows of the result file. What is tuned is kept in ``folder``."""
    gpu = visible_gpus()[0]
    shipped = bundled(capability(gpu.key))
    tuned = {
        problem for key in shipped.gpu_keys(capability=capability(gpu.key)) for problem in shipped.problems(gpu_key=key)
    }
    if both := tuned & problems.keys():
        raise SystemExit(f"{', '.join(map(str, both))}: tuned configs ship, so these are not held out")
    report = flashtune.tune(list(problems), mode="measure", devices=[0], database=folder / "tuned.db", budget=BUDGET)
    bench = DeviceBench(0, gpu)
    rows = []
    for own in report.rows:
        if own.config is None:
            raise SystemExit(f"{own.problem}: no winner: {own.why}")
        served, default = find_in(own.problem, gpu, [shipped]), default_config(own.problem, gpu)
        if missing := bench.prepare(own.problem):
            raise SystemExit(f"{own.problem}: {missing}")
        checked = bench.attempt(
            own.problem, served.config, build(source_for(own.problem, served.config), gpu.arch), None
        )  # the others were checked by the run
        if checked.status != "ok":
            raise SystemExit(f"{own.problem}: {served.config} is {checked.status}: {checked.message}")
        configs = list(dict.fromkeys([served.config, own.config, default]))
        rounds = bench.finals(own.problem, configs, RETIME_SECONDS)
        rows.append(
            {
                "model": problems[own.problem],
                "problem": own.problem.key,
                "level": served.level,
                "evidence": served.evidence,
                "configs": {"served": str(served.config), "own": str(own.config), "default": str(default)},
                "own_to_served": round(paired(rounds[own.config], rounds[served.config]).median, 4),
                "served_to_default": round(paired(rounds[served.config], rounds[default]).median, 4),
                "tried": own.tried,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--keep", type=Path, help="folder for the database of what is tuned; it must not hold one")
    options = parser.parse_args()
    before = environment()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(shapes(), options.keep or Path(folder))
    reached = statistics.geometric_mean(row["own_to_served"] for row in rows)
    slowest = max(row["served_to_default"] for row in rows)
    passed = {"served": reached >= SERVED_AT_LEAST, "no loss": slowest <= SLOWER_AT_MOST}
    print(f"{passed}, {reached:.4f} of their own best, at most {slowest:.4f} of the default's time")
    if options.out:
        result = {"what": __doc__, "environment": before, "passed": passed, "reached": reached, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
