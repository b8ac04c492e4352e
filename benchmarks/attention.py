"""Forward attention against PyTorch's SDPA (FlashAttention-2 and cuDNN) and FlashAttention-3, interleaved in one run.

    python benchmarks/attention.py --out benchmarks/results/attention_h200.json

Each contender's call is captured in a CUDA graph. A round replays all of them once, in an order that rotates, each
behind a flush of the L2 cache; events enclose the replay alone. Times are medians over the rounds, ratios medians of
the ratios within a round. Inputs are random normal. In the same run, 64 random rows of each output are compared with
float64 by the project's tolerance rule. The best peer of a row is the fastest of all others. The SM clock is read while
a round runs; `tensor_percent` is of what the tensor cores could do at its median. Needs PyTorch with CUDA;
FlashAttention-3 takes part where its forward package (`fa3_fwd_interface`, wheel fa3-fwd) can be imported, and
FlashAttention-4 where `flash_attn.cute` can (wheel flash-attn-4).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.codegen.families.counts import tensor_flops_clock
from flashtune.codegen.gpu.devices import require_device, unit_uuid
from flashtune.codegen.problem.problem import Problem
from flashtune.codegen.problem.tolerance import judge
from flashtune.tuner.trial.sensors import Sensors
from flashtune.tuner.tune.presets import preset

BACKENDS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
PACKAGES = {"fa3": "fa3_fwd_interface", "fa4": "flash_attn.cute"}
SAMPLED_ROWS = 64
FLUSH_BYTES = 256 * 2**20


@functools.cache
def installed() -> dict[str, Callable[..., Any]]:
    """`flash_attn_func` of the packages that can be imported."""
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = importlib.import_module(package).flash_attn_func
        except ImportError as error:
            print(f"{name} takes no part: {error}", flush=True)
    return found


def first(found: Any) -> torch.Tensor:
    """The output, which some packages return with the LSE."""
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


def contenders(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {"flashtune": lambda: flashtune.attention(q, k, v, causal=problem.causal)}
    heads_first = [each.transpose(1, 2) for each in (q, k, v)]
    grouped = problem.num_heads != problem.num_heads_kv

    def sdpa(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*heads_first, is_causal=problem.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    for name, backend in BACKENDS.items():
        calls[name] = lambda backend=backend: sdpa(backend)
    for name, function in installed().items():
        calls[name] = lambda function=function: first(function(q, k, v, causal=problem.causal))
    return calls


def check(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> str:
    """Empty if sampled rows of ``out`` are within the tolerance, else what is wrong."""
    generator = torch.Generator().manual_seed(1)
    batch = int(torch.randint(problem.batch, (), generator=generator))
    head = int(torch.randint(problem.num_heads, (), generator=generator))
    rows = torch.randint(problem.seqlen_q, (SAMPLED_ROWS,), generator=generator).to(q.device)
    head_kv = head // (problem.num_heads // problem.num_heads_kv)
    hidden = torch.arange(problem.seqlen_k, device=q.device)[None] > rows[:, None] + problem.seqlen_k - problem.seqlen_q

    def exact(dtype: torch.dtype) -> torch.Tensor:
        scores = q[batch, rows, head].to(dtype) @ k[batch, :, head_kv].to(dtype).T * problem.default_scale
        if problem.causal:
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ v[batch, :, head_kv].to(dtype)

    verdict = judge(
        out[batch, rows, head].float().cpu().numpy(),
        exact(torch.float32).to(out.dtype).float().cpu().numpy(),
        exact(torch.float64).cpu().numpy(),
        problem.dtype,
    )
    return "" if verdict.ok else str(verdict)


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()  # warm: compiled and loaded before capture
        stream.synchronize()
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def run_row(problem: Problem, rounds: int, flush: torch.Tensor, sensors: Sensors) -> dict[str, Any]:
    dtype = getattr(torch, problem.dtype)
    q, k, v = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in problem.shapes[:3])
    calls = contenders(problem, q, k, v)
    graphs, errors, refused = {}, {}, {}
    for name, call in calls.items():
        try:
            out = call()
        except RuntimeError as error:  # a build of a peer without this dtype or head_dim
            if name == "flashtune":
                raise
            refused[name] = str(error).splitlines()[0]
            continue
        if wrong := check(problem, q, k, v, out):
            errors[name] = wrong
        graphs[name] = captured(call)
    names = list(graphs)
    times: dict[str, list[float]] = {name: [] for name in names}
    clocks: list[float] = []
    for number in range(rounds + 2):
        marks = {}
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            marks[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            flush.zero_()
            marks[name][0].record()
            graphs[name].replay()
            marks[name][1].record()
        if (mhz := sensors.read().clock_mhz) is not None:
            clocks.append(mhz)
        torch.cuda.synchronize()
        if number >= 2:  # the first rounds warm up
            for name, (start, end) in marks.items():
                times[name].append(start.elapsed_time(end) * 1e3)
    ours = times["flashtune"]
    gpu = require_device()
    peak = statistics.median(clocks) * 1e6 * gpu.num_sms * tensor_flops_clock(gpu) if clocks else math.nan
    return {
        "problem": problem.key,
        "config": str(flashtune.explain(problem).config),
        "level": flashtune.explain(problem).level,
        "us": {name: round(statistics.median(each), 2) for name, each in times.items()},
        "tflops": {name: round(problem.flops / statistics.median(each) / 1e6, 1) for name, each in times.items()},
        "clock_mhz": statistics.median(clocks) if clocks else None,
        "tensor_percent": {
            name: round(100 * problem.flops / (statistics.median(each) * 1e-6 * peak), 1)
            for name, each in times.items()
            if clocks
        },
        "speedup": {
            name: round(statistics.median(theirs / own for theirs, own in zip(each, ours, strict=True)), 4)
            for name, each in times.items()
            if name != "flashtune"
        },
        "errors": errors,
        "refused": refused,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="grid", help="problems, as in flashtune tune --preset (default: grid)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds per row (default: 20)")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    before = environment()
    sensors = Sensors(unit_uuid(torch.cuda.current_device()))
    rows = []
    for problem in preset(options.preset):
        rows.append(row := run_row(problem, options.rounds, flush, sensors))
        shown = " ".join(f"{name} {value:.3f}" for name, value in row["speedup"].items())
        print(f"{problem!s:44} {row['tflops']['flashtune']:6.1f} TFLOP/s  {shown}  {row['errors'] or ''}", flush=True)
    peers = {
        name: [row["speedup"][name] for row in rows if name in row["speedup"]]
        for name in dict.fromkeys(name for row in rows for name in row["speedup"])
    }
    peers["best peer"] = [min(row["speedup"].values()) for row in rows if row["speedup"]]
    summary = {name: round(statistics.geometric_mean(found), 4) for name, found in peers.items()}
    worst = {name: min(found) for name, found in peers.items()}
    print(f"geometric mean of the speedup over {summary}, lowest {worst}")
    if options.out:
        result = {"what": __doc__, "environment": before, "rounds": options.rounds, "summary": summary}
        result |= {"lowest": worst, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
