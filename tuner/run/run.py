"""A run on some devices: workers are hired, searches are dealt to them, and whatever ends it, results are stored."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Builder
from flashtune.tuner.processes.process import RunEndedError, interrupts_held
from flashtune.tuner.results.budget import Budget, Meter
from flashtune.tuner.results.report import Progress
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.workers.process_worker import ProcessWorker, Unit, Worker
from flashtune.tuner.workers.supervisor import Supervisor

from .blocklist import Blocklist
from .coordinator import Coordinator
from .deal import deal, trial_seconds
from .device_queue import DeviceQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a run has to work with: a GPU model, devices that are one, a database, compilers."""

    gpu: Gpu
    units: Sequence[Unit] = ()
    """Each is a ``gpu``; none where nothing is measured."""
    store: Store
    builder: Builder
    hire: Callable[[Unit], Worker] = ProcessWorker
    seed: int = 0
    progress: Callable[[Progress], None] = lambda progress: None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run was. ``session`` is its id in the database."""

    session: str
    searches: Mapping[Problem, ProblemSearch]
    """Those that it came to."""
    seconds: float
    interrupted: bool
    stopped: str
    """Why it ended early, other than by Ctrl-C; empty if it did not."""
    note: str
    failed: Counter[str]
    """Trials that failed, by status."""
    flagged: Counter[str]
    """Measurements whose card was slowed down or shared, by reason."""
    blocklisted: int
    """Configs that were left alone because they have cost two workers."""

    @property
    def ended(self) -> str:
        """Why it ended early."""
        return self.stopped or ("interrupted" if self.interrupted else "")


def run_searches(
    means: Means,
    budget: Budget,
    problems: Sequence[Problem],
    seconds_of: Callable[[Problem], float],
    search_of: Callable[[Problem, Unit], tuple[ProblemSearch, Iterable[Config]]],
) -> Ran:
    """Searches ``problems``, each of which is measured on one of the devices.

    ``seconds_of`` a problem is the predicted time of a launch, by which problems are dealt; ``search_of`` a problem and
    the device that has it makes its search, with the configs that it may ask for. Workers start while these work.
    Ends early, with what is known, on Ctrl-C, or when no process can be had any more to measure or to compile.
    """
    meter = Meter(budget, means.clock)
    coordinator = Coordinator(means.gpu, means.store, means.builder, meter, means.seed, means.progress)
    supervisors: list[Supervisor] = []
    searches: dict[Problem, ProblemSearch] = {}
    interrupted, stopped = False, ""
    try:
        for unit in means.units[: len(problems)]:
            with interrupts_held():
                supervisors.append(Supervisor(unit, means.hire))
        costs = []
        for problem in problems:
            costs.append(trial_seconds(seconds_of(problem)))
            for source in means.units[0].sources(problem):
                means.builder.submit(source)
        queues = []
        for supervisor, hand in zip(supervisors, deal(costs, len(supervisors)), strict=True):
            own = [problems[at] for at in sorted(hand)]
            for problem in own:
                searches[problem], configs = search_of(problem, supervisor.unit)
                leave_alone(searches[problem], configs, coordinator.recorder.blocklist)
            queues.append(DeviceQueue(supervisor, [searches[problem] for problem in own]))
        with means.store.snapshot():  # a connection stays open: the last to close tidies SQLite's log up, at each row
            coordinator.run(queues)
    except KeyboardInterrupt:
        interrupted = True
    except RunEndedError as error:
        stopped = str(error)
    finally:
        try:
            coordinator.finish()
        finally:
            for supervisor in supervisors:
                supervisor.end()
    notes = [*coordinator.lost, *(supervisor.evidence.note for supervisor in supervisors)]
    return Ran(
        session=coordinator.recorder.session,
        searches=searches,
        seconds=meter.elapsed,
        interrupted=interrupted,
        stopped=stopped,
        note="" if stopped else "; ".join(dict.fromkeys(filter(None, notes))),
        failed=coordinator.recorder.failed,
        flagged=coordinator.recorder.flagged,
        blocklisted=len(coordinator.recorder.blocklist.met),
    )


def leave_alone(search: ProblemSearch, configs: Iterable[Config], blocklist: Blocklist) -> None:
    """Bars what is blocklisted among ``configs`` and what ``search`` knows besides."""
    spec = search.problem.spec
    for config in dict.fromkeys([*configs, search.default, *search.rows]):
        if blocklist.holds(spec, config):
            search.bar(config)
