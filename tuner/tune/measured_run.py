"""A measured run: deals problems to devices, lets the coordinator work, and says what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from flashtune.codegen.families.family import AnyFamily
from flashtune.codegen.families.model import default_config
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Builder
from flashtune.tuner.processes.process import RunEndedError, interrupts_held
from flashtune.tuner.results.budget import Budget, Meter
from flashtune.tuner.results.report import Progress, Report
from flashtune.tuner.results.rows import incumbent, known, starts
from flashtune.tuner.run.blocklist import Blocklist
from flashtune.tuner.run.coordinator import Coordinator
from flashtune.tuner.run.deal import deal, trial_seconds
from flashtune.tuner.run.device_queue import DeviceQueue
from flashtune.tuner.run.verdict import verdict
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.search.space import Rejected, Space, make_space
from flashtune.tuner.search.strategy import Strategy
from flashtune.tuner.workers.process_worker import ProcessWorker, Unit, Worker
from flashtune.tuner.workers.supervisor import Supervisor

HOPELESS_FAMILY = 6.0
"""A family whose best predicted time is this much above another's is not searched."""


def measure_problems(
    problems: Sequence[Problem],
    gpu: Gpu,
    store: Store,
    units: Sequence[Unit],
    builder: Builder,
    budget: Budget,
    seed: int,
    families: Callable[[Problem], Sequence[AnyFamily]],
    progress: Callable[[Progress], None],
    clock: Callable[[], float] = time.monotonic,
    hire: Callable[[Unit], Worker] = ProcessWorker,
    *,
    chosen: Strategy | None = None,
    first: Sequence[Config] = (),
) -> Report:
    """Tunes ``problems`` on ``units``, each of which is a ``gpu``; each problem on one of them.

    ``chosen`` says what proposes configs; ``first`` are tried before all else, and are legal for each problem.

    Ends early, with what is known, on Ctrl-C, or when no process can be had any more to measure or to compile.
    """
    meter = Meter(budget, clock)
    run = Coordinator(gpu, store, builder, meter, seed, progress)
    rejected: Rejected = {}
    supervisors: list[Supervisor] = []
    searches: dict[Problem, ProblemSearch] = {}
    interrupted, stopped = False, ""
    try:
        for unit in units[: len(problems)]:
            with interrupts_held():
                supervisors.append(Supervisor(unit, hire))  # it starts while configs are listed
        spaces: dict[Problem, list[Space]] = {}
        for problem in problems:
            progress(Progress(0.0, f"{problem}: listing configs"))
            spaces[problem] = search_spaces(problem, gpu, families(problem), rejected)
            for source in units[0].sources(problem):
                builder.submit(source)
        costs = [trial_seconds(_fastest(each)) for each in spaces.values()]
        dealt = {
            problems[at]: supervisor
            for supervisor, hand in zip(supervisors, deal(costs, len(supervisors)), strict=True)
            for at in hand
        }
        for problem, supervisor in dealt.items():
            searches[problem] = _search(
                problem, gpu, store, supervisor.unit, families(problem), spaces[problem], seed, chosen, first
            )
            searched = (each for space in spaces[problem] for each in space.configs)
            leave_alone(searches[problem], [*first, *searched], run.recorder.blocklist)
        queues = [
            DeviceQueue(each, [searches[problem] for problem in problems if dealt[problem] is each])
            for each in supervisors
        ]
        with store.snapshot():  # a connection stays open: the last to close tidies SQLite's log up, at each row
            run.run(queues)
    except KeyboardInterrupt:
        interrupted = True
    except RunEndedError as error:
        stopped = f"{error}. Everything up to here is stored: run again to go on"
    finally:
        try:
            run.finish()
        finally:
            for supervisor in supervisors:
                supervisor.end()
    notes = [*run.lost, *(supervisor.evidence.note for supervisor in supervisors)]
    return Report(
        gpu=gpu,
        measured=True,
        rows=tuple(verdict(problem, searches.get(problem), store, gpu) for problem in problems),
        session=run.recorder.session,
        seconds=meter.elapsed,
        rejected=sum(rejected.values(), Counter[str]()),
        failed=run.recorder.failed,
        blocklisted=len(run.recorder.blocklist.met),
        interrupted=interrupted,
        stopped=stopped,
        flagged=run.recorder.flagged,
        note="" if stopped else "; ".join(dict.fromkeys(filter(None, notes))),
    )


def search_spaces(problem: Problem, gpu: Gpu, families: Sequence[AnyFamily], rejected: Rejected) -> list[Space]:
    """What is searched, the most specialised family first; what is not legal is counted in ``rejected``."""
    listed = [make_space(problem, gpu, each) for each in families]
    for space in listed:
        rejected[problem.spec, space.family.name] = space.rejected
    spaces = [space for space in listed if len(space)]
    limit = HOPELESS_FAMILY * _fastest(spaces)
    return [space for space in spaces if space.estimates[0].seconds <= limit]


def leave_alone(search: ProblemSearch, configs: Iterable[Config], blocklist: Blocklist) -> None:
    """Bars what is blocklisted among ``configs`` and what ``search`` knows besides."""
    spec = search.problem.spec
    for config in dict.fromkeys([*configs, search.default, *search.rows]):
        if blocklist.holds(spec, config):
            search.bar(config)


def _fastest(spaces: Sequence[Space]) -> float:
    """The best predicted time in seconds."""
    return min(space.estimates[0].seconds for space in spaces)


def _search(
    problem: Problem,
    gpu: Gpu,
    store: Store,
    unit: Unit,
    families: Sequence[AnyFamily],
    spaces: Sequence[Space],
    seed: int,
    chosen: Strategy | None,
    first: Sequence[Config],
) -> ProblemSearch:
    # Of all families, whichever are searched: ratios to another default would mean something else.
    default, previous = default_config(problem, gpu), incumbent(store, problem, gpu)
    rows = {
        config: row
        for config, row in known(store, problem, gpu, unit=unit.uuid).items()
        # What was legal once may not be now.
        if config in (*first, default, previous) or any(config in space.rank for space in spaces)
    }
    return ProblemSearch(problem, spaces, default, rows, starts(store, problem, gpu), seed, chosen, first, previous)
