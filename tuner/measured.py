"""A measured run: asks, compiles ahead, tries, records; then finals. Problems take turns and share the compiler."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from flashtune.codegen.config import Config
from flashtune.codegen.family import Family, family
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.model import predict
from flashtune.codegen.problem import Problem
from flashtune.codegen.render import Source, render_source
from flashtune.tuned_db.lookup import source_digest
from flashtune.tuned_db.records import new_id
from flashtune.tuned_db.store import Store
from flashtune.tuned_db.winners import Ranked, rank

from .budget import Budget, Meter
from .build import Builder, Built, result, wait_for_any
from .records import known, measurement, starts
from .report import Progress, Report, Row
from .space import make_space
from .target import Target
from .timing import summarise
from .trial import Bench, DeviceLostError, Outcome

FINAL_SECONDS = 0.5
FINALS_PART = 0.25
"""Most of a time budget that finals may take."""
HOPELESS_FAMILY = 6.0
"""A family whose best predicted time is this much above another's is not searched."""


@dataclass(frozen=True, slots=True)
class _Task:
    target: Target
    config: Config
    job: Future[Built]


class _Run:
    """The state of one run, so that it can end at any point and still report."""

    def __init__(
        self, gpu: Gpu, store: Store, bench: Bench, builder: Builder, seed: int, progress: Callable[[Progress], None]
    ) -> None:
        self.gpu = gpu
        self.store = store
        self.bench = bench
        self.builder = builder
        self.seed = seed
        self.progress = progress
        self.session = new_id()
        self.failed: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()

    def target(self, problem: Problem, families: Sequence[Family]) -> Target:
        spaces = [space for each in families if len(space := make_space(problem, self.gpu, each))]
        for space in spaces:
            self.rejected.update(space.rejected)
        fastest = min(space.estimates[0].seconds for space in spaces)
        kept = [
            space
            for space in spaces
            if space.family is families[0] or space.estimates[0].seconds <= HOPELESS_FAMILY * fastest
        ]
        default = families[0].default(problem.spec, self.gpu)
        rows = {
            config: row
            for config, row in known(self.store, problem, self.gpu, unit=self.bench.evidence.unit).items()
            if any(config in space.rank for space in kept)  # what was legal once may not be now
        }
        for source in self.bench.sources(problem):
            self.builder.submit(source)
        return Target(problem, kept, default, rows, starts(self.store, problem, self.gpu), self.seed)

    def search(self, targets: Sequence[Target], meter: Meter, until: float) -> None:
        """Tries configs until ``until`` of the budget is used or nothing is left to try."""
        pending: list[_Task] = []
        exhausted: set[int] = set()
        ahead = 2 * self.builder.workers
        while meter.left > 1 - until or (meter.budget.trials is not None and not meter.spent):
            while len(pending) < ahead and len(exhausted) < len(targets) and self._may_ask(meter, len(pending)):
                number = min(set(range(len(targets))) - exhausted, key=lambda each: (targets[each].asked, each))
                config = targets[number].ask()
                if config is None:
                    exhausted.add(number)
                    continue
                pending.append(_Task(targets[number], config, self._submit(targets[number].problem, config)))
            if not pending:
                return
            task = next((each for each in pending if each.job.done()), None)
            if task is None:
                wait_for_any((each.job for each in pending), seconds=1.0)
                continue
            pending.remove(task)
            self._try(task, meter)

    def _may_ask(self, meter: Meter, pending: int) -> bool:
        return meter.budget.trials is None or meter.trials + pending < meter.budget.trials

    def _submit(self, problem: Problem, config: Config) -> Future[Built]:
        return self.builder.submit(render(problem, config))

    def _try(self, task: _Task, meter: Meter) -> None:
        target, config = task.target, task.config
        if target.skipped:
            return
        if reason := self.bench.prepare(target.problem):
            target.skipped = reason
            return
        built = result(task.job)
        try:
            outcome = self.bench.attempt(target.problem, config, built, target.best)
        except DeviceLostError as error:
            self._record(target, config, built, Outcome(status="illegal_access", message=str(error)))
            raise
        self._record(target, config, built, outcome)
        meter.trials += 1
        time_text = f"{outcome.seconds * 1e3:.3f} ms" if outcome.seconds else outcome.status
        self.progress(Progress(1 - meter.left, f"{target.problem}: {config} {time_text}"))

    def _record(self, target: Target, config: Config, built: Built, outcome: Outcome) -> None:
        row = self.store.record(
            measurement(
                outcome, target.problem, config, self.gpu, built, self.bench.evidence,
                session=self.session, seed=self.seed,
            )
        )  # fmt: skip
        ok = row.status == "ok"
        if not ok:
            self.failed[row.status] += 1
        target.tell(config, row, outcome.seconds if ok else None)

    def final(self, target: Target, seconds: float) -> None:
        """Measures the finalists of ``target`` again, interleaved with the default, and records them."""
        configs = target.finalists()
        if not configs or self.bench.prepare(target.problem):
            return
        jobs = {config: self._submit(target.problem, config) for config in configs}
        built = {config: result(job) for config, job in jobs.items()}
        rounds = self.bench.finals(target.problem, configs, seconds)
        clock = self.bench.clock_mhz()
        timings = {config: summarise(times) for config, times in rounds.items()}
        baseline = timings[target.default].median if target.default in timings else None
        self.store.record_all(
            measurement(
                Outcome(
                    status="ok",
                    stage="final",
                    timing=timing,
                    clock_mhz=clock,
                    max_error=target.rows[config].max_error,
                    rms_error=target.rows[config].rms_error,
                ),
                target.problem, config, self.gpu, built[config], self.bench.evidence,
                session=self.session, seed=self.seed, baseline=baseline,
            )
            for config, timing in timings.items()
        )  # fmt: skip

    def row(self, target: Target) -> Row:
        """What the database now says is the best for ``target``, which is what attention() will use."""
        base = Row(problem=target.problem, tried=target.tried, known=target.known, why=target.skipped)
        problem = target.problem
        rows = self.store.measurements(problem=problem, gpu_key=self.gpu.key, status="ok")
        ranked = [
            each
            for each in rank(rows, self.store.rejected(problem.spec))
            if family(each.config.family).illegal(each.config, problem.spec, self.gpu) is None
            and each.variant[2] == source_digest(problem.spec, each.config)
        ]
        if not ranked:
            return dataclasses.replace(base, why=target.skipped or "no config was correct, or none was tried in time")
        chosen, *others = ranked
        following = others[0] if others else None
        return dataclasses.replace(
            base,
            config=chosen.config,
            seconds=chosen.median_us / 1e6,
            ratio=chosen.ratio,
            why=_why(problem, chosen, self.gpu),
            next_best=following.config if following else None,
            next_ratio=following.median_us / chosen.median_us if following else None,
        )


def measure_problems(
    problems: Sequence[Problem],
    gpu: Gpu,
    store: Store,
    bench: Bench,
    builder: Builder,
    budget: Budget,
    seed: int,
    families: Callable[[Problem], Sequence[Family]],
    progress: Callable[[Progress], None],
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Tunes ``problems`` on ``bench``, which is ``gpu``. Ends early, with what is known, on Ctrl-C or a lost device."""
    run = _Run(gpu, store, bench, builder, seed, progress)
    meter = Meter(budget, clock)
    targets: list[Target] = []
    interrupted, stopped = False, ""
    try:
        for problem in problems:
            progress(Progress(0.0, f"{problem}: listing configs"))
            targets.append(run.target(problem, families(problem)))
        part = 0.0
        if budget.seconds is not None:
            part = min(FINALS_PART, FINAL_SECONDS * len(targets) / budget.seconds)
        run.search(targets, meter, 1 - part)
        for number, target in enumerate(targets):
            progress(Progress(1 - part * (1 - number / len(targets)), f"{target.problem}: finals"))
            if target.tried or not _had_final(store, target.problem, gpu):
                run.final(target, FINAL_SECONDS)
    except KeyboardInterrupt:
        interrupted = True
    except DeviceLostError as error:
        stopped = (
            f"{error}. Everything up to here is stored, and this config will not be tried again: run again to go on"
        )
    missed = [Row(problem=each, why="the run ended before its turn") for each in problems[len(targets) :]]
    return Report(
        gpu=gpu,
        measured=True,
        rows=(*(run.row(target) for target in targets), *missed),
        session=run.session,
        seconds=meter.elapsed,
        rejected=run.rejected,
        failed=run.failed,
        interrupted=interrupted,
        stopped=stopped,
    )


def render(problem: Problem, config: Config) -> Source:
    """The source of ``config`` for ``problem``."""
    names = family(config.family).names(config, problem.spec)
    return render_source(config.family, problem.spec, config, names)


def _had_final(store: Store, problem: Problem, gpu: Gpu) -> bool:
    rows = store.measurements(problem=problem, gpu_key=gpu.key, status="ok", stage="final")
    return any(each.source_digest == source_digest(problem.spec, each.config) for each in rows)


def _why(problem: Problem, chosen: Ranked, gpu: Gpu) -> str:
    estimate = predict(problem, chosen.config, gpu)
    rate = problem.flops / chosen.median_us / 1e6
    blocks = "1 block/SM" if estimate.blocks_sm == 1 else f"{estimate.blocks_sm} blocks/SM"
    return f"{rate:.0f} TFLOP/s, {chosen.measurement.stage}; {estimate.bound}-bound, {blocks}"
