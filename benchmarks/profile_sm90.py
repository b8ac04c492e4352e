"""What ncu says of the winners of `sm90_fwd`: busiest pipe, exponential unit, issue slots, clock, where warps stall.

    python benchmarks/profile_sm90.py --out benchmarks/results/profile_sm90_h200.json

One launch per problem (bfloat16, 4 sequences of 4096 tokens, 2048 columns in all heads), clocks as they come. Needs
PyTorch with CUDA and `ncu` on the PATH, which must be allowed to read counters. FlashAttention-3 is profiled too where
its forward package (`fa3_fwd_interface`) can be imported.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from environment import environment

SECTIONS = ("SpeedOfLight", "SchedulerStats", "ComputeWorkloadAnalysis", "SourceCounters")
KERNELS = {"flashtune": "sm90_fwd", "fa3": "device_kernel"}
PROBLEMS = ((64, "full"), (128, "full"), (128, "causal"), (256, "full"), (256, "causal"))
FACTS = {
    "sm_clock_ghz": r"SM Frequency\s+Ghz\s+([\d.]+)",
    "us": r"Duration\s+us\s+([\d.]+)",
    "issue_slots_percent": r"Issue Slots Busy\s+%\s+([\d.]+)",
    "tensor_percent": r"is the highest-utilized pipeline \(([\d.]+)%\) based on elapsed cycles",
}
EXPONENTIALS = r"the highest utilized pipeline \(([\d.]+)%\) is\s+XU"
SHOWN = 4


def launch(library: str, head_dim: int, mask: str) -> None:
    """The kernel twice: the first launch warms up."""
    import torch

    shape = (4, 4096, 2048 // head_dim, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    if library == "fa3":
        attention = importlib.import_module("fa3_fwd_interface").flash_attn_func
    else:
        from flashtune import attention
    for _ in range(2):
        attention(q, k, v, causal=mask == "causal")
    torch.cuda.synchronize()


def profiled(library: str, head_dim: int, mask: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "one.ncu-rep"
        command = ["ncu", "--clock-control", "none", "-k", f"regex:{KERNELS[library]}", "--launch-skip", "1"]
        command += ["--launch-count", "1", "-f", "-o", str(report)]
        for each in SECTIONS:
            command += ["--section", each]
        command += [sys.executable, __file__, "--one", library, str(head_dim), mask]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        details, source = (
            subprocess.run(
                ["ncu", "-i", str(report), "--page", page, *more], check=True, capture_output=True, text=True
            ).stdout
            for page, more in (("details", ()), ("source", ("--csv",)))
        )
    return {"library": library, "head_dim": head_dim, "mask": mask} | read_details(details) | read_stalls(source)


def read_details(text: str) -> dict[str, float]:
    """The figures of `FACTS` and, where it is the busiest by instructions, the exponential unit's."""
    flat = re.sub(r"\s*\n\s*", " ", text)  # sentences are wrapped
    found = {name: float(match[1]) for name, pattern in FACTS.items() if (match := re.search(pattern, flat))}
    if match := re.search(EXPONENTIALS, flat):
        found["exponentials_percent"] = float(match[1])
    return found


def read_stalls(text: str) -> dict[str, Any]:
    """Percent of all stall samples by opcode, the most frequent first."""
    rows = list(csv.reader(io.StringIO(text)))
    start = next(number for number, row in enumerate(rows) if row and row[0] == "Address")
    column = rows[start].index("Warp Stall Sampling (All Samples)")
    stalls: Counter[str] = Counter()
    for row in rows[start + 1 :]:
        if len(row) == len(rows[start]):
            words = row[1].split()
            opcode = words[1] if words[0].startswith("@") else words[0]
            stalls[opcode.partition(".")[0]] += int(row[column] or 0)
    total = stalls.total()
    return {"stalls_percent": {name: round(100 * count / total, 1) for name, count in stalls.most_common(SHOWN)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "HEAD_DIM", "MASK"), help="only launch it")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    if options.one:
        library, head_dim, mask = options.one
        launch(library, int(head_dim), mask)
        return 0
    libraries = ["flashtune", *(["fa3"] if importlib.util.find_spec("fa3_fwd_interface") else [])]
    before = environment()
    rows = []
    for head_dim, mask in PROBLEMS:
        for library in libraries:
            rows.append(profiled(library, head_dim, mask))
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        result = {"what": __doc__, "environment": before, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
