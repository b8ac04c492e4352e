"""Checks candidates at a problem's own size, on the device; see `compare` for values and `checksum` for bytes.

A candidate is launched twice. Output, LSE and workspace are poisoned before each launch and lie between guard bands.
Both launches must give the same bytes, every element of the output must have been written, and its last part, the end
of the address range, must agree with fma_fwd in float64. Inputs and references must stay as they were put there: their
sums are taken before a candidate too, so that none is blamed for what another did while it was timed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from flashtune.codegen.gpu.cuda import runtime
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.launch import BoundPlan, load
from flashtune.codegen.problem.problem import ITEM_BYTES, Problem, Spec

from .checksum import Checksum
from .compare import Comparer
from .exact import last_part, reference_plan
from .guard import Guarded, workspace
from .memory import Arena, contiguous, elements, free_bytes, skew

logger = logging.getLogger("flashtune")

SPARE_BYTES = 256 * 2**20
"""Device memory left to others."""
INPUT_SEEDS = {"q": 11, "k": 12, "v": 13}


class FullSize:
    """Problems at their own sizes on device ``index``, which is ``gpu`` and must be current at every call."""

    def __init__(self, index: int, gpu: Gpu, arena: Arena, stream: int) -> None:
        self._index = index
        self._gpu = gpu
        self._arena = arena
        self._stream = stream
        self._comparers: dict[tuple[str, int], Comparer] = {}
        self._sums: dict[Problem, list[int]] = {}
        """Of what candidates must leave alone, see :meth:`_kept`."""

    @functools.cached_property
    def _checksum(self) -> Checksum:
        return Checksum(self._gpu, self._arena, self._stream)

    def prepare(self, problem: Problem) -> str | None:
        """Makes inputs and reference. Returns why there is no room for them, or None."""
        counts = elements(problem)
        compared = elements(last_part(problem))
        item = ITEM_BYTES[problem.dtype]
        tensors = (counts.q + counts.k + counts.v + counts.out) * item + counts.lse * 4
        need = tensors + (compared.out + compared.lse) * 8 + SPARE_BYTES
        have = free_bytes() + self._arena.reusable_bytes
        if need > have:
            return f"needs {need / 1e9:.1f} GB of device memory, {have / 1e9:.1f} GB can be had"
        self._out(problem)
        self._lse(problem)
        self._make_reference(problem)
        self._sums[problem] = self._sums_now(problem)
        return None

    def launcher(self, problem: Problem, bound: BoundPlan) -> Callable[[], None]:
        """Launches ``bound``, which is bound to ``problem``."""
        q, k, v = self._inputs(problem)
        out, lse = self._out(problem).address, self._lse(problem).address
        arena, stream = self._arena, self._stream

        def launch() -> None:
            shared = workspace(arena, bound)  # asked at each launch: another config may have moved it
            bound.launch(q, k, v, out, lse, stream, shared.address if shared else 0)

        return launch

    def check(self, problem: Problem, bound: BoundPlan) -> str:
        """What is wrong with the results of ``bound``; empty if nothing is. ``problem`` has been prepared."""
        self._restore(problem)
        results = self._out(problem), self._lse(problem)
        shared = workspace(self._arena, bound)
        written = [each for each in (*results, shared) if each]
        launch = self.launcher(problem, bound)
        self._checksum.begin()
        for _ in range(2):  # equal inputs must give equal bits: a race may show
            for each in written:
                each.poison(self._stream)
            launch()
            for each in results:
                self._checksum.ask(each.begin, each.total)
            runtime.streamSynchronize(self._stream)
            if not all(each.intact() for each in written):
                return f"{problem}: wrote outside its output"
        self._ask_kept(problem)
        answers = self._checksum.answers()
        first, second, kept = answers[:2], answers[2:4], answers[4:]
        names = zip(self._kept(problem), self._sums[problem], kept, strict=True)
        if changed := [name for name, was, now in names if was != now]:
            return f"{problem}: changed its input {', '.join(changed)}"
        if first != second:
            return f"{problem}: two launches with equal inputs differ"
        return self._compare(problem, *results)

    def _compare(self, problem: Problem, out: Guarded, lse: Guarded) -> str:
        part = last_part(problem)
        reference, reference_lse = self._reference(problem)
        rows = problem.batch * problem.seqlen_q * problem.num_heads
        compared = part.batch * part.seqlen_q * part.num_heads
        # The LSE is (batch, heads, seqlen_q): the last batch entries are its end, the last rows the end of each head.
        skipped = (problem.batch - part.batch) * problem.num_heads * problem.seqlen_q
        difference = self._comparer(problem.spec).compare(
            self._arena,
            out=out.address,
            reference=reference,
            lse=lse.address + skipped * 4,
            reference_lse=reference_lse,
            total_rows=rows,
            first_row=rows - compared,
            lse_count=compared,
            lse_length=part.seqlen_q,
            lse_stride=problem.seqlen_q,
            stream=self._stream,
        )
        if difference.ok:
            return ""
        return (
            f"{problem}: {difference.bad_rows} of {rows} rows and {difference.bad_lse} of {compared} LSE values "
            f"are not right, the largest relative error of a row is {difference.worst:.3g}"
        )

    # What candidates must leave alone

    def _kept(self, problem: Problem) -> dict[str, tuple[int, int]]:
        """Address and size in bytes, by name."""
        counts, compared = elements(problem), elements(last_part(problem))
        item, offset = ITEM_BYTES[problem.dtype], skew(problem)
        kept = {
            name: (address - offset, offset + count * item)
            for name, address, count in zip("qkv", self._inputs(problem), counts[:3], strict=True)
        }
        reference, reference_lse = self._reference(problem)
        return kept | {
            "the reference": (reference, compared.out * 8),
            "the reference's LSE": (reference_lse, compared.lse * 8),
        }

    def _ask_kept(self, problem: Problem) -> None:
        for address, size in self._kept(problem).values():
            self._checksum.ask(address, size)

    def _sums_now(self, problem: Problem) -> list[int]:
        self._checksum.begin()
        self._ask_kept(problem)
        return self._checksum.answers()

    def _restore(self, problem: Problem) -> None:
        """Makes inputs and reference again if a candidate has changed them."""
        if self._sums_now(problem) == self._sums[problem]:
            return
        logger.info("%s: inputs or reference were changed by a config that was tried before; made again", problem)
        self._arena.forget(*(f"{name}-{problem.dtype}" for name in INPUT_SEEDS))
        self._make_reference(problem)
        self._sums[problem] = self._sums_now(problem)

    def _make_reference(self, problem: Problem) -> None:
        counts, part = elements(problem), last_part(problem)
        compared, item = elements(part), ITEM_BYTES[problem.dtype]
        reference, reference_lse = self._reference(problem)
        q, k, v = self._inputs(problem)
        skipped = problem.batch - part.batch
        q += (counts.q - compared.q) * item
        k += skipped * (counts.k // problem.batch) * item
        v += skipped * (counts.v // problem.batch) * item
        plan = reference_plan(problem, self._gpu)
        bound = load(plan, self._index).bind(contiguous(plan.problem), problem.default_scale)
        bound.launch(q, k, v, reference, reference_lse, self._stream)
        runtime.streamSynchronize(self._stream)

    # Where everything is

    def _inputs(self, problem: Problem) -> tuple[int, int, int]:
        """Addresses of q, k, v, which all problems of a dtype share."""
        counts = elements(problem)
        offset = skew(problem)
        spare = offset // ITEM_BYTES[problem.dtype]
        q, k, v = (
            self._arena.random(name, problem.dtype, count + spare, INPUT_SEEDS[name]) + offset
            for name, count in (("q", counts.q), ("k", counts.k), ("v", counts.v))
        )
        return q, k, v

    def _out(self, problem: Problem) -> Guarded:
        size = elements(problem).out * ITEM_BYTES[problem.spec.output]
        return Guarded.of(self._arena, "out", size, skew(problem))

    def _lse(self, problem: Problem) -> Guarded:
        return Guarded.of(self._arena, "lse", elements(problem).lse * 4)

    def _reference(self, problem: Problem) -> tuple[int, int]:
        compared = elements(last_part(problem))
        return (
            self._arena.address(f"reference-{problem.key}", compared.out * 8),
            self._arena.address(f"reference-lse-{problem.key}", compared.lse * 8),
        )

    def _comparer(self, spec: Spec) -> Comparer:
        key = spec.output, spec.value_dim
        if key not in self._comparers:
            self._comparers[key] = Comparer(spec, self._gpu)
        return self._comparers[key]
