"""A measured run: deals problems to devices, lets the coordinator work, and says what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from flashtune.codegen.config import Config
from flashtune.codegen.family import Family
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.model import default_config
from flashtune.codegen.problem import Problem
from flashtune.tuned_db.store import Store

from .blocklist import Blocklist
from .budget import Budget, Meter
from .build import Builder
from .coordinator import Coordinator
from .lane import Lane
from .post import Post
from .process import RunEndedError, interrupts_held
from .records import incumbent, known, starts
from .report import Progress, Report
from .sharing import deal, trial_seconds
from .space import Rejected, Space, make_space
from .strategy import Strategy
from .target import Target
from .verdict import verdict
from .worker import ProcessWorker, Unit, Worker

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
    families: Callable[[Problem], Sequence[Family]],
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
    posts: list[Post] = []
    targets: dict[Problem, Target] = {}
    interrupted, stopped = False, ""
    try:
        for unit in units[: len(problems)]:
            with interrupts_held():
                posts.append(Post(unit, hire))  # it starts while configs are listed
        spaces: dict[Problem, list[Space]] = {}
        for problem in problems:
            progress(Progress(0.0, f"{problem}: listing configs"))
            spaces[problem] = search_spaces(problem, gpu, families(problem), rejected)
            for source in units[0].sources(problem):
                builder.submit(source)
        costs = [trial_seconds(_fastest(each)) for each in spaces.values()]
        dealt = {problems[at]: post for post, hand in zip(posts, deal(costs, len(posts)), strict=True) for at in hand}
        for problem, post in dealt.items():
            targets[problem] = _target(
                problem, gpu, store, post.unit, families(problem), spaces[problem], seed, chosen, first
            )
            searched = (each for space in spaces[problem] for each in space.configs)
            leave_alone(targets[problem], [*first, *searched], run.recorder.blocklist)
        lanes = [Lane(each, [targets[problem] for problem in problems if dealt[problem] is each]) for each in posts]
        with store.snapshot():  # a connection stays open: the last to close tidies SQLite's log up, at each row
            run.run(lanes)
    except KeyboardInterrupt:
        interrupted = True
    except RunEndedError as error:
        stopped = f"{error}. Everything up to here is stored: run again to go on"
    finally:
        try:
            run.finish()
        finally:
            for post in posts:
                post.end()
    notes = [*run.lost, *(post.evidence.note for post in posts)]
    return Report(
        gpu=gpu,
        measured=True,
        rows=tuple(verdict(problem, targets.get(problem), store, gpu) for problem in problems),
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


def search_spaces(problem: Problem, gpu: Gpu, families: Sequence[Family], rejected: Rejected) -> list[Space]:
    """What is searched, the most specialised family first; what is not legal is counted in ``rejected``."""
    listed = [make_space(problem, gpu, each) for each in families]
    for space in listed:
        rejected[problem.spec, space.family.name] = space.rejected
    spaces = [space for space in listed if len(space)]
    limit = HOPELESS_FAMILY * _fastest(spaces)
    return [space for space in spaces if space.estimates[0].seconds <= limit]


def leave_alone(target: Target, configs: Iterable[Config], blocklist: Blocklist) -> None:
    """Bars what is blocklisted among ``configs`` and what ``target`` knows besides."""
    spec = target.problem.spec
    for config in dict.fromkeys([*configs, target.default, *target.rows]):
        if blocklist.holds(spec, config):
            target.bar(config)


def _fastest(spaces: Sequence[Space]) -> float:
    """The best predicted time in seconds."""
    return min(space.estimates[0].seconds for space in spaces)


def _target(
    problem: Problem,
    gpu: Gpu,
    store: Store,
    unit: Unit,
    families: Sequence[Family],
    spaces: Sequence[Space],
    seed: int,
    chosen: Strategy | None,
    first: Sequence[Config],
) -> Target:
    # Of all families, whichever are searched: ratios to another default would mean something else.
    default, previous = default_config(problem, gpu), incumbent(store, problem, gpu)
    rows = {
        config: row
        for config, row in known(store, problem, gpu, unit=unit.uuid).items()
        # What was legal once may not be now.
        if config in (*first, default, previous) or any(config in space.rank for space in spaces)
    }
    return Target(problem, spaces, default, rows, starts(store, problem, gpu), seed, chosen, first, previous)
