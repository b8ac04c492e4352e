"""Checks one candidate on one sample, in full and on the host."""

from __future__ import annotations

import numpy as np

from flashtune.codegen.gpu.cuda import runtime
from flashtune.codegen.launch import BoundPlan
from flashtune.codegen.problem.bits import from_memory
from flashtune.codegen.problem.problem import ITEM_BYTES
from flashtune.tuner.trial.outcome import Outcome

from .guard import Guarded, workspace
from .memory import Arena, download, elements, skew, upload
from .samples import Sample


def check_sample(sample: Sample, bound: BoundPlan, arena: Arena, stream: int) -> Outcome:
    """Launches ``bound``, a candidate bound to the sample's problem, twice: ``ok`` with its errors, or ``wrong``.

    Output, LSE and workspace are poisoned before each launch and lie between guard bands; inputs must stay as they
    were.
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

    out = Guarded.of(arena, "sample-out", counts.out * ITEM_BYTES[problem.spec.output], offset)
    lse = Guarded.of(arena, "sample-lse", counts.lse * 4)
    shared = workspace(arena, bound)
    written = [each for each in (out, lse, shared) if each]
    results = []
    for _ in range(2):  # equal inputs must give equal bits: a race may show
        for each in written:
            each.poison(stream)
        bound.launch(q, k, v, out.address, lse.address, stream, shared.address if shared else 0)
        runtime.streamSynchronize(stream)
        made, made_lse = np.empty(out.size, np.uint8), np.empty(lse.size, np.uint8)
        download(out.address, made)
        download(lse.address, made_lse)
        results.append((made, made_lse))
        if not all(each.intact() for each in written):
            return _wrong("wrote outside its output")

    for name, values in host.items():
        after = np.empty_like(values)
        download(addresses[name], after)
        if not np.array_equal(after.view(np.uint8), values.view(np.uint8)):
            return _wrong(f"changed its input {name}")
    if any(not np.array_equal(a, b) for a, b in zip(*results, strict=True)):
        return _wrong("two launches with equal inputs differ")
    ours = from_memory(made, problem.spec.output).reshape(problem.shapes[3])
    ours_lse = made_lse.view(np.float32).reshape(problem.batch, problem.num_heads, problem.seqlen_q)
    judged, judged_lse = sample.out.judge(ours), sample.lse.judge(ours_lse)
    if not judged:
        return _wrong(f"{problem}: out {judged}", judged.max_error, judged.rms_error)
    if not judged_lse:
        return _wrong(f"{problem}: LSE {judged_lse}", judged.max_error, judged.rms_error)
    return Outcome(status="ok", max_error=judged.max_error, rms_error=judged.rms_error)


def _wrong(message: str, max_error: float | None = None, rms_error: float | None = None) -> Outcome:
    return Outcome(status="wrong", message=message, max_error=max_error, rms_error=rms_error)
