"""The device side of a trial: checks a compiled config on samples and on the full problem, then times it.

Correctness comes first, in three parts. The samples (`sample`) are checked in full on the host by the project's
tolerance rule: small, ragged, the same code. The problem itself is checked on the device (`full`), and so is a ragged
neighbour of it where that takes little time. A config that fails any of them is never timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from flashtune.codegen.families.registry import family, predict, unusable
from flashtune.codegen.gpu.cuda import OutOfMemoryError, cupy, driver, runtime
from flashtune.codegen.gpu.devices import device_facts
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.launch import BoundPlan, DeviceGuard, load
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import LaunchError
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.trial.outcome import DeviceLostError, Evidence, Outcome, judge_resources
from flashtune.tuner.trial.sensors import Readings, Sensors, Watch
from flashtune.tuner.trial.timing import summarise

from .exact import ragged
from .full_size import FullSize
from .memory import Arena, contiguous
from .sample_check import check_sample
from .samples import samples
from .timer import Timer

NEIGHBOUR_SECONDS = 0.02
"""A config whose launch is predicted to take longer is not checked at a neighbour too: at its own size it is in any
case, and an attempt is some ten launches there."""

_CUDA_ERRORS = (LaunchError, runtime.CUDARuntimeError, driver.CUDADriverError)


class DeviceBench:
    """Tries configs on CUDA device ``index``, a ``gpu`` that ``ours`` processes of the session have open."""

    def __init__(self, index: int, gpu: Gpu, ours: int = 1) -> None:
        self.index = index
        self.gpu = gpu
        facts = device_facts(index)
        with DeviceGuard(index):
            self._arena = Arena()
            self._timer = Timer(gpu.l2_bytes)
            self._stream = self._timer.stream
            self._full = FullSize(index, gpu, self._arena, self._stream)
        sensors = Sensors(facts.uuid, ours)
        self._watch = Watch(sensors.read, noticed=self._timer.noticed)
        self.evidence = Evidence(unit=facts.uuid, driver=facts.driver, cupy=cupy.__version__, note=sensors.note)
        self._prepared: dict[Problem, str | None] = {}
        self._sampled: dict[tuple[str, Spec, tuple[int, ...]], Outcome] = {}
        self._bound: dict[tuple[Problem, Config], BoundPlan] = {}
        self._warm = False

    def prepare(self, problem: Problem) -> str | None:
        if problem not in self._prepared:
            with DeviceGuard(self.index):
                try:
                    self._prepared[problem] = self._full.prepare(problem)
                except OutOfMemoryError as error:
                    self._prepared[problem] = f"not enough device memory: {error}"
                except _CUDA_ERRORS as error:
                    self._require_usable("The reference", problem, error)
                    self._prepared[problem] = f"the reference could not be computed: {error}"
        return self._prepared[problem]

    def attempt(
        self, problem: Problem, config: Config, built: Built, best: float | None, default: Config | None = None
    ) -> Outcome:
        if judged := judge_resources(problem, config, self.gpu, built):
            return judged
        with DeviceGuard(self.index):
            try:
                outcome = self._attempt(problem, config, built, best, default)
                self._forget(problem, [config])
                return outcome
            except OutOfMemoryError as error:
                return Outcome(status="out_of_memory", message=str(error))
            except _CUDA_ERRORS as error:
                self._require_usable(config, problem, error)
                return Outcome(status="failed", message=str(error))

    def finals(
        self, problem: Problem, configs: Sequence[Config], seconds: float, margin: float | None = None
    ) -> dict[Config, list[float]]:
        with DeviceGuard(self.index):
            try:
                launches = {config: self._launcher(problem, config) for config in configs}
                return self._watch.measured(lambda: self._timer.interleaved(launches, seconds, margin))
            except _CUDA_ERRORS as error:
                self._require_usable(configs[0], problem, error)
                raise
            finally:
                self._forget(problem, configs)

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

    def _forget(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Thousands of loaded modules would take memory."""
        for config in configs:
            self._bound.pop((problem, config), None)

    def _attempt(
        self, problem: Problem, config: Config, built: Built, best: float | None, default: Config | None
    ) -> Outcome:
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
        beside = None if default is None else self._launcher(problem, default)
        found = self._watch.measured(lambda: self._timer.measure(launch, best, beside))
        return dataclasses.replace(
            verdict,
            stage="screen" if found.screened else "measure",
            timing=summarise(found.own),
            baseline=summarise(found.default).median if found.default else None,
            ratio=found.ratio,
            readings=self._watch.last,
        )

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
        """What is wrong with the results at the problem's own size, or its neighbour's; empty if nothing is."""
        wrong = self._full.check(problem, self._bound_to(problem, config))
        if not wrong and (near := self._neighbour(problem, config)):
            wrong = self._full.check(near, self._bind(near, config))
        return wrong

    def _neighbour(self, problem: Problem, config: Config) -> Problem | None:
        """A ragged neighbour that ``config`` serves, unless it takes too much time or memory."""
        near = ragged(problem)
        if near == problem or unusable(config, near, self.gpu):
            return None
        if predict(problem, config, self.gpu).seconds > NEIGHBOUR_SECONDS:
            return None
        return near if self.prepare(near) is None else None

    # Launching

    def _launcher(self, problem: Problem, config: Config) -> Callable[[], None]:
        return self._full.launcher(problem, self._bound_to(problem, config))

    def _bound_to(self, problem: Problem, config: Config) -> BoundPlan:
        key = problem, config
        if key not in self._bound:
            self._bound[key] = self._bind(problem, config)
        return self._bound[key]

    def _bind(self, problem: Problem, config: Config) -> BoundPlan:
        plan = family(config.family).plan(problem, config, self.gpu)
        return load(plan, self.index).bind(contiguous(problem), problem.default_scale)

    def _require_usable(self, what: Config | str, problem: Problem, error: Exception) -> None:
        """Raises :class:`DeviceLostError` if the context does not outlive ``error``."""
        try:
            runtime.deviceSynchronize()
        except runtime.CUDARuntimeError as sticky:
            raise DeviceLostError(f"{what} made the GPU context unusable on {problem}: {sticky}") from error
