"""The device side of a trial: checks a compiled config on samples and on the full problem, then times it.

Correctness comes first, in two parts. The samples (`sample`) are checked in full on the host by the project's tolerance
rule: small, ragged, the same code. The problem itself is checked on the device (`compare`): every element of the
poisoned output must have been written, and its last part, the end of the address range, must agree with fma_fwd in
float64. A config that fails either is never timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import cupy
from cupy.cuda import runtime
from cupy.cuda.memory import OutOfMemoryError
from cupy_backends.cuda.api import driver

from flashtune.codegen.config import Config
from flashtune.codegen.device import device_facts
from flashtune.codegen.family import family
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.launch import BoundPlan, DeviceGuard, load
from flashtune.codegen.plan import Plan
from flashtune.codegen.problem import ITEM_BYTES, Problem, Spec
from flashtune.codegen.render import Source
from flashtune.errors import LaunchError

from .build import Built
from .check import check_sample
from .compare import Comparer, compare_source
from .measure import Timer
from .memory import POISON, Arena, contiguous, elements, free_bytes, skew, workspace_address
from .readings import Readings, Sensors, Watch
from .sample import samples
from .trial import DeviceLostError, Evidence, Outcome, judge_resources

REFERENCE_ELEMENTS = 2**22
"""Output elements, from the end of a problem, that are compared with the float64 reference: 32 MiB of it."""
SPARE_BYTES = 256 * 2**20
"""Device memory left to others."""
INPUT_SEEDS = {"q": 11, "k": 12, "v": 13}

_CUDA_ERRORS = (LaunchError, runtime.CUDARuntimeError, driver.CUDADriverError)


class DeviceBench:
    """Tries configs on CUDA device ``index``, which is ``gpu``."""

    def __init__(self, index: int, gpu: Gpu) -> None:
        self.index = index
        self.gpu = gpu
        facts = device_facts(index)
        with DeviceGuard(index):
            self._arena = Arena()
            self._timer = Timer(gpu.l2_bytes)
        self._stream = self._timer.stream
        sensors = Sensors(facts.uuid)
        self._watch = Watch(sensors.read)
        self.evidence = Evidence(unit=facts.uuid, driver=facts.driver, cupy=cupy.__version__, note=sensors.note)
        self._comparers: dict[tuple[str, int], Comparer] = {}
        self._prepared: dict[Problem, str | None] = {}
        self._sampled: dict[tuple[str, Spec, tuple[int, ...]], Outcome] = {}
        self._bound: dict[tuple[Problem, Config], BoundPlan] = {}
        self._warm = False

    def prepare(self, problem: Problem) -> str | None:
        if problem not in self._prepared:
            with DeviceGuard(self.index):
                try:
                    self._prepared[problem] = self._prepare(problem)
                except OutOfMemoryError as error:
                    self._prepared[problem] = f"not enough device memory: {error}"
                except _CUDA_ERRORS as error:
                    self._require_usable("The reference", problem, error)
                    self._prepared[problem] = f"the reference could not be computed: {error}"
        return self._prepared[problem]

    def attempt(self, problem: Problem, config: Config, built: Built, best: float | None) -> Outcome:
        if judged := judge_resources(problem, config, self.gpu, built):
            return judged
        with DeviceGuard(self.index):
            try:
                outcome = self._attempt(problem, config, built, best)
                self._bound.pop((problem, config), None)  # thousands of loaded modules would take memory
                return outcome
            except OutOfMemoryError as error:
                return Outcome(status="out_of_memory", message=str(error))
            except _CUDA_ERRORS as error:
                self._require_usable(config, problem, error)
                return Outcome(status="failed", message=str(error))

    def finals(self, problem: Problem, configs: Sequence[Config], seconds: float) -> dict[Config, list[float]]:
        with DeviceGuard(self.index):
            try:
                launches = {config: self._launcher(problem, config) for config in configs}
                return self._watch.measured(lambda: self._timer.interleaved(launches, seconds))
            except _CUDA_ERRORS as error:
                self._require_usable(configs[0], problem, error)
                raise

    def alike(self, problem: Problem, config: Config, copies: int, seconds: float) -> list[list[float]]:
        with DeviceGuard(self.index):
            try:
                launches = {number: self._launcher(problem, config) for number in range(copies)}
                rounds = self._watch.measured(lambda: self._timer.interleaved(launches, seconds))
                return list(rounds.values())
            except _CUDA_ERRORS as error:
                self._require_usable(config, problem, error)
                raise

    def readings(self) -> Readings:
        return self._watch.last

    def _attempt(self, problem: Problem, config: Config, built: Built, best: float | None) -> Outcome:
        verdict = self._check_samples(problem.spec, config, built.digest)
        if verdict.status != "ok":
            return verdict
        difference = self._check_full(problem, config)
        if difference:
            return dataclasses.replace(verdict, status="wrong", message=difference)
        launch = self._launcher(problem, config)
        if not self._warm:
            self._timer.settle(launch)
            self._warm = True
        timing, measured = self._watch.measured(lambda: self._timer.measure(launch, best))
        stage = "measure" if measured else "screen"
        return dataclasses.replace(verdict, stage=stage, timing=timing, readings=self._watch.last)

    # Correctness on samples

    def _check_samples(self, spec: Spec, config: Config, digest: str) -> Outcome:
        """Errors over all samples, or the first failure. The same code is checked once for each way to share keys."""
        kind = family(config.family)
        key = digest, spec, tuple(kind.num_splits(config, each.problem, self.gpu) for each in samples(spec))
        if key not in self._sampled:
            outcomes = [
                check_sample(sample, self._bind(sample.problem, config), self._arena, self._stream)
                for sample in samples(spec)
            ]
            wrong = next((each for each in outcomes if each.status != "ok"), None)
            self._sampled[key] = wrong or Outcome(
                status="ok",
                max_error=max(each.max_error or 0.0 for each in outcomes),
                rms_error=max(each.rms_error or 0.0 for each in outcomes),
            )
        return self._sampled[key]

    # Correctness of the full problem

    def _check_full(self, problem: Problem, config: Config) -> str:
        """What is wrong with the full-size result; empty if nothing is."""
        arena = self._arena
        counts = elements(problem)
        item = ITEM_BYTES[problem.spec.output]
        out = arena.address("out", counts.out * item + skew(problem)) + skew(problem)
        lse = arena.address("lse", counts.lse * 4)
        runtime.memsetAsync(out, POISON, counts.out * item, self._stream)
        runtime.memsetAsync(lse, POISON, counts.lse * 4, self._stream)
        self._launcher(problem, config)()
        part = last_part(problem)
        reference, reference_lse = self._reference_addresses(problem)
        rows_head = problem.batch * problem.seqlen_q * problem.num_heads
        compared = part.batch * part.seqlen_q * part.num_heads
        # The LSE is (batch, heads, seqlen_q): the last batch entries are its end, the last rows the end of each head.
        lse_begin = lse + (problem.batch - part.batch) * problem.num_heads * problem.seqlen_q * 4
        difference = self._comparer(problem.spec).compare(
            arena,
            out=out,
            reference=reference,
            lse=lse_begin,
            reference_lse=reference_lse,
            total_rows=rows_head,
            first_row=rows_head - compared,
            lse_count=compared,
            lse_length=part.seqlen_q,
            lse_stride=problem.seqlen_q,
            stream=self._stream,
        )
        if difference.ok:
            return ""
        return (
            f"{problem}: {difference.bad_rows} of {rows_head} rows and {difference.bad_lse} of {compared} LSE values "
            f"are not right, the largest relative error of a row is {difference.worst:.3g}"
        )

    def _prepare(self, problem: Problem) -> str | None:
        counts = elements(problem)
        part = last_part(problem)
        compared = elements(part)
        item = ITEM_BYTES[problem.dtype]
        tensors = (counts.q + counts.k + counts.v + counts.out) * item + counts.lse * 4
        need = tensors + (compared.out + compared.lse) * 8 + SPARE_BYTES
        have = free_bytes() + self._arena.reusable_bytes
        if need > have:
            return f"needs {need / 1e9:.1f} GB of device memory, {have / 1e9:.1f} GB can be had"
        self._arena.address("out", counts.out * item + skew(problem))
        self._arena.address("lse", counts.lse * 4)
        reference, reference_lse = self._reference_addresses(problem)
        q, k, v = self._inputs(problem)
        skipped = problem.batch - part.batch
        q += (counts.q - compared.q) * item
        k += skipped * (counts.k // problem.batch) * item
        v += skipped * (counts.v // problem.batch) * item
        plan = reference_plan(problem, self.gpu)
        bound = load(plan, self.index).bind(contiguous(plan.problem), problem.default_scale)
        bound.launch(q, k, v, reference, reference_lse, self._stream)
        runtime.streamSynchronize(self._stream)
        return None

    def _reference_addresses(self, problem: Problem) -> tuple[int, int]:
        compared = elements(last_part(problem))
        key = problem.key
        return (
            self._arena.address(f"reference-{key}", compared.out * 8),
            self._arena.address(f"reference-lse-{key}", compared.lse * 8),
        )

    # Launching

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

    def _launcher(self, problem: Problem, config: Config) -> Any:
        key = problem, config
        if key not in self._bound:
            self._bound[key] = self._bind(problem, config)
        bound = self._bound[key]
        offset = skew(problem)
        counts = elements(problem)
        q, k, v = self._inputs(problem)
        out = self._arena.address("out", counts.out * ITEM_BYTES[problem.spec.output] + offset) + offset
        lse = self._arena.address("lse", counts.lse * 4)
        arena = self._arena  # asked at each launch: another config's workspace may have moved it
        return lambda: bound.launch(q, k, v, out, lse, self._stream, workspace_address(arena, bound))

    def _bind(self, problem: Problem, config: Config) -> BoundPlan:
        plan = family(config.family).plan(problem, config, self.gpu)
        return load(plan, self.index).bind(contiguous(problem), problem.default_scale)

    def _comparer(self, spec: Spec) -> Comparer:
        key = spec.output, spec.value_dim
        if key not in self._comparers:
            self._comparers[key] = Comparer(spec, self.gpu)
        return self._comparers[key]

    def _require_usable(self, what: Config | str, problem: Problem, error: Exception) -> None:
        """Raises :class:`DeviceLostError` if the context does not outlive ``error``."""
        try:
            runtime.deviceSynchronize()
        except runtime.CUDARuntimeError as sticky:
            raise DeviceLostError(f"{what} made the GPU context unusable on {problem}: {sticky}") from error


def sources(problem: Problem, gpu: Gpu) -> list[Source]:
    """What a bench launches for ``problem`` besides candidates."""
    return [reference_plan(problem, gpu).kernels[0].source, compare_source(problem.spec)]


def reference_plan(problem: Problem, gpu: Gpu) -> Plan:
    """fma_fwd in float64 on the part of ``problem`` that is compared."""
    exact = dataclasses.replace(last_part(problem), out_dtype="float64")
    kind = family("fma_fwd")
    default = kind.default(exact.spec, gpu)
    config = kind.config_type.from_json({**default.to_json(), "accumulate": "float64"})
    return kind.plan(exact, config, gpu)


def last_part(problem: Problem) -> Problem:
    """The end of ``problem`` that is compared with the reference: whole batch entries, or the last rows of the last.

    Its queries and output are the end of those of ``problem``; with causal aligned bottom-right its mask is the same.
    """
    entry = problem.seqlen_q * problem.num_heads * problem.value_dim
    if entry <= REFERENCE_ELEMENTS:
        return dataclasses.replace(problem, batch=min(problem.batch, REFERENCE_ELEMENTS // entry))
    rows = max(1, REFERENCE_ELEMENTS // (problem.num_heads * problem.value_dim))
    return dataclasses.replace(problem, batch=1, seqlen_q=min(rows, problem.seqlen_q))
