"""Checks one candidate on one sample, in full and on the host."""

from __future__ import annotations

import numpy as np
from cupy.cuda import runtime

from flashtune.codegen.bits import from_memory
from flashtune.codegen.launch import BoundPlan
from flashtune.codegen.problem import ITEM_BYTES

from .memory import POISON, Arena, download, elements, skew, upload, workspace_address
from .sample import Sample
from .trial import Outcome

GUARD_BYTES = 4096
"""Poisoned bytes around the output of a sample, which must stay as they are."""


def check_sample(sample: Sample, bound: BoundPlan, arena: Arena, stream: int) -> Outcome:
    """Launches ``bound``, a candidate bound to the sample's problem, twice: ``ok`` with its errors, or ``wrong``.

    Output and LSE are poisoned before each launch and lie between guard bytes; inputs must stay as they were.
    """
    problem = sample.problem
    counts = elements(problem)
    offset = skew(problem)
    host = {"q": sample.q, "k": sample.k, "v": sample.v}
    addresses = {
        name: arena.address(f"sample-{name}", values.nbytes + offset) + offset for name, values in host.items()
    }
    q, k, v = addresses["q"], addresses["k"], addresses["v"]
    for name, values in host.items():
        upload(addresses[name], values)

    out_bytes = counts.out * ITEM_BYTES[problem.spec.output]
    region = np.empty(2 * GUARD_BYTES + offset + out_bytes, np.uint8)
    region_address = arena.address("sample-out", region.nbytes)
    lse = np.empty((problem.batch, problem.num_heads, problem.seqlen_q), np.float32)
    lse_address = arena.address("sample-lse", counts.lse * 4)
    workspace = workspace_address(arena, bound)
    results = []
    for _ in range(2):  # equal inputs must give equal bits: a race may show
        runtime.memsetAsync(region_address, POISON, region.nbytes, stream)
        runtime.memsetAsync(lse_address, POISON, lse.nbytes, stream)
        out_address = region_address + GUARD_BYTES + offset
        if workspace:
            runtime.memsetAsync(workspace, POISON, bound.loaded.plan.workspace_bytes, stream)
        bound.launch(q, k, v, out_address, lse_address, stream, workspace)
        runtime.streamSynchronize(stream)
        download(region_address, region)
        download(lse_address, lse)
        results.append((region.copy(), lse.copy()))

    begin = GUARD_BYTES + offset
    guards = np.concatenate([region[:begin], region[begin + out_bytes :]])
    if (guards != POISON).any():
        return _wrong("wrote outside its output")
    for name, values in host.items():
        after = np.empty_like(values)
        download(addresses[name], after)
        if not np.array_equal(after, values):
            return _wrong(f"changed its input {name}")
    if any(not np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(*results, strict=True)):
        return _wrong("two launches with equal inputs differ")
    raw = np.ascontiguousarray(region[begin : begin + out_bytes])
    ours = from_memory(raw, problem.spec.output).reshape(problem.shapes[3])
    judged, judged_lse = sample.out.judge(ours), sample.lse.judge(lse)
    if not judged:
        return _wrong(f"{problem}: out {judged}", judged.max_error, judged.rms_error)
    if not judged_lse:
        return _wrong(f"{problem}: LSE {judged_lse}", judged.max_error, judged.rms_error)
    return Outcome(status="ok", max_error=judged.max_error, rms_error=judged.rms_error)


def _wrong(message: str, max_error: float | None = None, rms_error: float | None = None) -> Outcome:
    return Outcome(status="wrong", message=message, max_error=max_error, rms_error=rms_error)
