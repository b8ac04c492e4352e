"""Time of the first `attention()` call of a process, with an empty and with a filled kernel cache.

    python benchmarks/first_call.py --out benchmarks/results/first_call_h200.json

Each figure is the median over processes of their own, whose imports and CUDA context are made before: what remains is
validation, look-up of the config, rendering, compiling or reading the cubin, loading and launching. The stages are
timed one by one in further processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import environment

PROCESSES = 5
COLD_PROCESSES = 3
CHILD = """
import importlib, pkgutil, sys, time
import cupy, numpy, sqlalchemy
import flashtune
USED = tuple(f"flashtune.{part}" for part in ("call", "codegen", "templates", "tuned_db"))
for module in pkgutil.walk_packages(flashtune.__path__, "flashtune."):
    if module.name.endswith("__main__") or ".migrations" in module.name or not module.name.startswith(USED):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # what talks to a team database needs an extra
        if error.name != "psycopg":
            raise
head_dim, causal = int(sys.argv[1]), sys.argv[2] == "causal"
q = cupy.asarray(numpy.random.default_rng(0).standard_normal((1, 1024, 8, head_dim)).astype(numpy.float16))
cupy.cuda.runtime.deviceSynchronize()
problem = flashtune.Problem(
    dtype="float16", head_dim=head_dim, batch=1, seqlen_q=1024, seqlen_k=1024, num_heads=8, num_heads_kv=8,
    causal=causal,
)
def attention():
    flashtune.attention(q, q, q, causal=causal)
    cupy.cuda.runtime.deviceSynchronize()
steps = {
    "look up": lambda: flashtune.explain(problem),
    "plan": lambda: flashtune.plan(problem),
    "compile and load": lambda: flashtune.compile(problem),
    "attention": attention,
}
for step in steps if sys.argv[3] == "stages" else ["attention"]:
    start = time.perf_counter()
    steps[step]()
    print(step, time.perf_counter() - start, sep=":")
"""


def timed(cache: str, head_dim: int, mask: str, what: str) -> dict[str, float]:
    """Milliseconds by step in a new process that uses the kernel cache in ``cache``."""
    command = [sys.executable, "-c", CHILD, str(head_dim), mask, what]
    environ = os.environ | {"FLASHTUNE_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the process that was to be timed failed:\n{done.stderr}")
    lines = (line.split(":") for line in done.stdout.splitlines())
    return {step: 1e3 * float(seconds) for step, seconds in lines}


def timed_cold(head_dim: int, mask: str) -> float:
    with tempfile.TemporaryDirectory() as empty:
        return timed(empty, head_dim, mask, "whole")["attention"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    rows = []
    for head_dim, mask in ((64, "full"), (128, "causal"), (256, "causal")):
        with tempfile.TemporaryDirectory() as cache:
            cold = statistics.median(timed_cold(head_dim, mask) for _ in range(COLD_PROCESSES))
            timed(cache, head_dim, mask, "whole")
            warm = statistics.median(timed(cache, head_dim, mask, "whole")["attention"] for _ in range(PROCESSES))
            stages = {step: round(each, 1) for step, each in timed(cache, head_dim, mask, "stages").items()}
        figures = {"cold_ms": round(cold, 1), "cached_ms": round(warm, 1), "cached_stages_ms": stages}
        rows.append({"head_dim": head_dim, "mask": mask} | figures)
        print(f"head_dim {head_dim:3} {mask:6}  empty cache {cold:7.1f} ms   filled cache {warm:6.1f} ms", flush=True)
        print(f"    of a filled one: {stages}", flush=True)
    if options.out:
        result = {"what": __doc__, "environment": environment(), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
