"""What the model expects of `sm80_fwd` on cards that were not at hand, beside published figures of FlashAttention-2.

    python benchmarks/predicted_table.py --out benchmarks/results/predicted_cards.json    # 10 minutes, no GPU

Each config is chosen as a predicted run does: the best-ranked are compiled for the card and ranked again with registers
and spills as they are. The figures are predictions, not measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from environment import environment
from model_check import Facts

from flashtune.codegen.compiler.nvrtc import compile_source
from flashtune.codegen.families.model import preference
from flashtune.codegen.families.registry import predict
from flashtune.codegen.families.sm80_fwd import Sm80Fwd
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.tune.predicted_run import COMPILED_CONFIGS

FA2_PAPER = "arXiv 2307.08691, section 4: 'up to'"
TVM = "apache/tvm, tl_doc/flash_perf.md: batch and heads not given, 2048 tokens"
LEARN_CUDA = "gau-nernst/learn-cuda, 07_attention/README.md: flash-attn, batch 4, 8 heads"


@dataclass(frozen=True, slots=True)
class Case:
    card: str
    head_dim: int
    causal: bool
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    published: float | None = None
    """TFLOP/s of FlashAttention-2."""
    source: str = ""

    @property
    def problem(self) -> Problem:
        return Problem(
            dtype="float16",
            head_dim=self.head_dim,
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads,
            causal=self.causal,
        )


def grid(card: str, length: int, known: dict[tuple[int, bool], float], source: str) -> list[Case]:
    """16384 tokens and a model width of 2048 in all, as FlashAttention's benchmarks have them."""
    return [
        Case(card, dim, causal, 16384 // length, length, length, 2048 // dim, known.get((dim, causal)),
             source if (dim, causal) in known else "")
        for dim in (64, 128, 256) for causal in (False, True)
    ]  # fmt: skip


CASES = (
    *grid("a100", 16384, {(128, False): 230.0}, FA2_PAPER),
    *grid(
        "rtx-4090",
        2048,
        {(64, False): 168.91, (64, True): 142.23, (128, False): 169.28, (128, True): 151.19, (256, False): 156.15,
         (256, True): 144.12},
        TVM,
    ),
    *grid("rtx-5090", 4096, {}, ""),
    Case("rtx-5090", 128, False, 4, 4096, 8192, 8, 190.58, LEARN_CUDA),
)  # fmt: skip
RULES = Sm80Fwd()


def compiled(job: tuple[Case, Config]) -> Facts:
    """What the compiler makes of a config for the card of a case."""
    case, config = job
    spec = case.problem.spec
    source = RULES.source(config, spec)
    built = compile_source(source, gpu_by_alias(case.card).arch)
    return Facts(built.registers, built.spill_bytes, built.static_shared_bytes)


def candidates(case: Case) -> list[Config]:
    problem, gpu = case.problem, gpu_by_alias(case.card)
    legal, _ = RULES.enumerate(problem.spec, gpu)
    return sorted(legal, key=lambda each: (predict(problem, each, gpu).seconds, each.key))[:COMPILED_CONFIGS]


def conclude(case: Case, facts: dict[Config, Facts]) -> dict[str, Any]:
    problem, gpu = case.problem, gpu_by_alias(case.card)
    expected = {config: predict(problem, config, gpu, known) for config, known in facts.items()}
    first = min(facts, key=lambda each: (preference(expected[each], facts[each].spill_bytes), each.key))
    estimate = expected[first]
    return {
        "card": case.card,
        "problem": str(problem),
        "tflops": round(estimate.tflops, 1),
        "of_peak": round(estimate.tflops / gpu.tensor_tflops, 2),
        "published": case.published,
        "ratio": round(estimate.tflops / case.published, 2) if case.published else None,
        "source": case.source,
        "config": first.to_json(),
        "registers": facts[first].registers,
        "spill_bytes": facts[first].spill_bytes,
        "why": estimate.why,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    jobs = [(case, config) for case in CASES for config in candidates(case)]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        known: dict[Case, dict[Config, Facts]] = {case: {} for case in CASES}
        for (case, config), facts in zip(jobs, pool.map(compiled, jobs, chunksize=4), strict=True):
            known[case][config] = facts
    rows = [conclude(case, facts) for case, facts in known.items()]
    written = {"environment": environment(), "measured": False, "rows": rows}
    arguments.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(
        "| card | problem | predicted TFLOP/s | of peak | FlashAttention-2, published | ratio | tile, warps, stages |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        config = row["config"]
        tile = f"{config['block_m']} x {config['block_n']}, {config['num_warps']}, {config['num_stages']}"
        if config["q_in_registers"]:
            tile += ", Q in registers"
        cells = (row["card"], row["problem"], f"{row['tflops']:.0f}", f"{row['of_peak']:.2f}")
        print("|", " | ".join((*cells, str(row["published"] or "-"), str(row["ratio"] or "-"), tile)), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
