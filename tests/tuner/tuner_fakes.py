"""A device and a compiler that are none: times and facts come from formulas, so runs are fast and repeat exactly."""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.families.family import Family
from flashtune.codegen.families.registry import families, family
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.budget import Budget
from flashtune.tuner.results.report import Progress, Report
from flashtune.tuner.run.run import Means
from flashtune.tuner.search.strategy import DEFAULT_SAMPLER, strategy
from flashtune.tuner.trial.intervals import paired
from flashtune.tuner.trial.outcome import DeviceLostError, Evidence, Outcome, judge_resources
from flashtune.tuner.trial.sensors import Readings
from flashtune.tuner.trial.timing import Timing
from flashtune.tuner.tune.measured_run import measure_problems
from flashtune.tuner.tune.request import TuneRequest
from flashtune.tuner.workers.process_worker import Lost, Request, Unit, WorkerReady, answer

GPU = gpu_by_alias("a100")
READINGS = Readings(clock_mhz=1980.0, power_w=612.5, temperature_c=61.0, throttle="power_cap", contended=False)
FAMILY = family("sm80_fwd")
FAMILIES = families()


def problem(seqlen: int = 1024, *, causal: bool = False, head_dim: int = 64) -> Problem:
    return Problem(
        dtype="float16",
        head_dim=head_dim,
        batch=2,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads=8,
        num_heads_kv=8,
        causal=causal,
    )


PROBLEMS = [problem(512), problem(1024), problem(2048)]
"""Those that the fixture `tuned` has winners for."""


def only_sm80(_: Problem) -> Sequence[Family]:
    return [FAMILY]


def landscape(config: Config) -> float:
    """Seconds: smooth in the parameters with one best region, and 4 % of ruggedness that depends on the config."""
    values = config.to_json()
    if config.family != FAMILY.name:
        return 4e-3
    miss = (int(values["block_m"]) - 128) ** 2 / 128**2 + (int(values["block_n"]) - 80) ** 2 / 80**2
    miss += 0.2 * abs(int(values["num_stages"]) - 2) + (0.0 if values["q_in_registers"] else 0.15)
    return 1e-3 * (1 + miss) * (1 + zlib.crc32(config.key.encode()) % 100 / 2500)


def slower(winner: Config, factor: float) -> Callable[[Config], float]:
    """The landscape where ``winner`` takes ``factor`` as long."""
    return lambda config: landscape(config) * (factor if config == winner else 1)


class FakeBuilder:
    """Compiles nothing. ``facts`` may replace what is said of a source; all that was asked for is counted."""

    workers = 2

    def __init__(self, facts: Callable[[Source], Built] | None = None) -> None:
        self.facts = facts or (lambda source: Built(digest=source.digest, registers=96, nvrtc="13.5"))
        self.submitted: Counter[str] = Counter()
        self.closed = False

    def submit(self, source: Source) -> Future[Built]:
        assert not self.closed, "a builder that was closed takes nothing"
        self.submitted[source.digest] += 1
        job: Future[Built] = Future()
        job.set_result(self.facts(source))
        return job

    def close(self) -> None:
        self.closed = True


JITTER = 1e-9
"""Part of a time by which rounds differ around one that is exact: an interval of no width is a lie (`plausible.py`)."""


class FakeBench:
    """A unit and its bench that times by a formula. ``attempts`` and ``finalists`` tell what it was asked."""

    def __init__(
        self,
        seconds: Callable[[Config], float] = landscape,
        *,
        unit: str = "GPU-fake",
        outcome: Callable[[Config, int], Outcome | None] = lambda config, number: None,
        final: Callable[[Config], float] | None = None,
        unprepared: str = "",
        gpu: Gpu = GPU,
    ) -> None:
        self.gpu = gpu
        self.evidence = Evidence(unit=unit, driver="580.1", cupy="14.0")
        self.name = unit
        self.uuid = unit
        self.seconds = seconds
        self.outcome = outcome
        self.final = final or seconds
        self.unprepared = unprepared
        self.attempts: list[tuple[Problem, Config]] = []
        self.defaults: list[Config | None] = []
        """What each attempt was timed in turns with."""
        self.drift: Callable[[int], float] = lambda number: 1.0
        """How much slower the card is at an attempt."""
        self.finalists: dict[Problem, list[Config]] = {}
        self.opened = 0
        self.ready: set[Problem] = set()
        """Problems with inputs and reference in the worker of now."""

    def open(self) -> FakeBench:
        self.opened += 1
        self.ready = set()
        return self

    def sources(self, problem: Problem) -> list[Source]:
        return []

    def prepare(self, problem: Problem) -> str | None:
        if self.unprepared and problem.seqlen_q > 4096:
            return self.unprepared
        self.ready.add(problem)
        return None

    def attempt(
        self, problem: Problem, config: Config, built: Built, best: float | None, default: Config | None = None
    ) -> Outcome:
        assert problem in self.ready, "attempted before it was prepared"
        assert FAMILIES[config.family].illegal(config, problem.spec, self.gpu) is None
        self.attempts.append((problem, config))
        self.defaults.append(default)
        if judged := judge_resources(problem, config, self.gpu, built):
            return judged
        special = self.outcome(config, len(self.attempts))
        if special is not None:
            return special
        slower = self.drift(len(self.attempts))
        seconds = self.seconds(config) * slower
        baseline = None if default is None else self.seconds(default) * slower
        return Outcome(
            status="ok",
            stage="measure",
            timing=Timing(seconds, 0.99 * seconds, 1.01 * seconds, 20),
            baseline=baseline,
            ratio=None if baseline is None else paired([seconds] * 20, [baseline] * 20),
            max_error=1e-3,
            rms_error=1e-4,
            readings=READINGS,
        )

    def finals(
        self, problem: Problem, configs: Sequence[Config], seconds: float, margin: float | None = None
    ) -> dict[Config, list[float]]:
        assert problem in self.ready, "a final before it was prepared"
        assert configs, "a final of nothing"
        self.finalists[problem] = list(configs)
        return {
            config: [self.final(config) * (1 + place * JITTER * (number % 3 - 1)) for number in range(9)]
            for place, config in enumerate(configs, start=1)
        }

    def alike(self, problem: Problem, config: Config, copies: int, seconds: float) -> list[list[float]]:
        assert problem in self.ready, "timed before it was prepared"
        return [[self.final(config) for _ in range(9)] for _ in range(copies)]

    def readings(self) -> Readings:
        return READINGS


class ShutBench(FakeBench):
    """A device that can't be opened."""

    def open(self) -> FakeBench:
        super().open()
        raise DeviceLostError("no memory for a context")


class LocalWorker:
    """A worker without a process: it answers while it is asked."""

    def __init__(self, unit: FakeBench) -> None:
        self.connection, self._answers = Pipe(duplex=False)
        try:
            self.bench = unit.open()
        except DeviceLostError as error:
            self._answers.send(Lost(str(error)))
            self.kill()
        else:
            self._answers.send(WorkerReady(self.bench.evidence))

    def send(self, request: Request) -> None:
        if self._answers.closed:
            raise BrokenPipeError
        said = answer(pickle.loads(pickle.dumps(request)), self.bench)
        self._answers.send(said)
        if isinstance(said, Lost):
            self.kill()

    def receive(self) -> Any:
        return self.connection.recv()

    def kill(self) -> None:
        self._answers.close()

    def end(self) -> None:
        self.kill()
        self.connection.close()

    def fate(self) -> str:
        return "was closed" if self._answers.closed else ""


def request(
    problems: Sequence[Problem], trials: int | None = None, *, budget: Budget | None = None, **more: Any
) -> TuneRequest:
    """For configs of `FAMILY`: so many trials, or another budget."""
    limit = budget or Budget(trials=trials)
    return TuneRequest(problems=problems, budget=limit, families=more.pop("families", only_sm80), **more)


def means(store: Store, *units: Unit, **more: Any) -> Means:
    """Of a fake compiler, and workers in this process."""
    return Means(**{"gpu": GPU, "store": store, "units": units, "builder": FakeBuilder(), "hire": LocalWorker} | more)


def run(
    path: Path,
    problems: Sequence[Problem],
    trials: int,
    *,
    bench: FakeBench | None = None,
    benches: Sequence[FakeBench] = (),
    builder: FakeBuilder | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] = lambda progress: None,
    sampler: str = DEFAULT_SAMPLER,
    first: Sequence[Config] = (),
) -> Report:
    """A measured run of ``trials`` trials into the database at ``path``."""
    with Store.open(path) as store:
        units = benches or [bench or FakeBench()]
        return measure_problems(
            request(problems, trials, strategy=strategy(sampler), first=first),
            means(store, *units, builder=builder or FakeBuilder(), seed=seed, progress=progress),
        )


def stored(path: Path, **wanted: str) -> list[Config]:
    """Configs of the rows of `problem()`."""
    with Store.open(path, readonly=True) as store:
        return [each.config for each in store.measurements(problem=problem(), **wanted)]
