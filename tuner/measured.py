"""A measured run: deals problems to devices, lets the coordinator work, and says what came of it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence

from flashtune.codegen.config import Config
from flashtune.codegen.family import Family, family
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.model import default_config, predict
from flashtune.codegen.problem import Problem
from flashtune.tuned_db.lookup import source_digest
from flashtune.tuned_db.store import Store
from flashtune.tuned_db.winners import Ranked, rank

from .budget import Budget, Meter
from .build import Builder, interrupts_held
from .coordinator import Coordinator, Lane, NoDeviceLeftError
from .post import Post
from .records import known, starts
from .report import Progress, Report, Row
from .sharing import deal, trial_seconds
from .space import Space, make_space
from .strategy import Strategy
from .target import Target
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

    Ends early, with what is known, on Ctrl-C, or when no device can have a worker any more.
    """
    meter = Meter(budget, clock)
    run = Coordinator(gpu, store, builder, meter, seed, progress)
    rejected: Counter[str] = Counter()
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
        lanes = [Lane(each, [targets[problem] for problem in problems if dealt[problem] is each]) for each in posts]
        with store.snapshot():  # a connection stays open: the last to close tidies SQLite's log up, at each row
            run.run(lanes)
    except KeyboardInterrupt:
        interrupted = True
    except NoDeviceLeftError as error:
        stopped = f"{error}. Everything up to here is stored: run again to go on"
    finally:
        try:
            run.finish()
        finally:
            for post in posts:
                post.end()
    return Report(
        gpu=gpu,
        measured=True,
        rows=tuple(_row(problem, targets.get(problem), store, gpu) for problem in problems),
        session=run.session,
        seconds=meter.elapsed,
        rejected=rejected,
        failed=run.failed,
        interrupted=interrupted,
        stopped=stopped,
        note="" if stopped else "; ".join(run.lost),
    )


def search_spaces(problem: Problem, gpu: Gpu, families: Sequence[Family], rejected: Counter[str]) -> list[Space]:
    """What is searched, the most specialised family first; what is not legal is counted in ``rejected``."""
    spaces = [space for each in families if len(space := make_space(problem, gpu, each))]
    for space in spaces:
        rejected.update(space.rejected)
    limit = HOPELESS_FAMILY * _fastest(spaces)
    return [space for space in spaces if space.estimates[0].seconds <= limit]


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
    rows = {
        config: row
        for config, row in known(store, problem, gpu, unit=unit.uuid).items()
        if config in first or any(config in space.rank for space in spaces)  # what was legal once may not be now
    }
    default = default_config(problem, gpu, families)
    return Target(problem, spaces, default, rows, starts(store, problem, gpu), seed, chosen, first)


def _row(problem: Problem, target: Target | None, store: Store, gpu: Gpu) -> Row:
    """What the database now says is the best, which is what attention() will use."""
    if target is None:
        return Row(problem=problem, why="the run ended before its turn")
    base = Row(problem=problem, tried=target.tried, known=target.known, why=target.skipped)
    rows = store.measurements(problem=problem, gpu_key=gpu.key, status="ok")
    usable = (
        each
        for each in rank(rows, store.rejected(problem.spec))
        if family(each.config.family).illegal(each.config, problem.spec, gpu) is None
        and each.variant[2] == source_digest(problem.spec, each.config)
    )
    chosen, following = next(usable, None), next(usable, None)
    if chosen is None:
        return dataclasses.replace(base, why=target.skipped or "no config was correct, or none was tried in time")
    return dataclasses.replace(
        base,
        config=chosen.config,
        seconds=chosen.median_us / 1e6,
        ratio=chosen.ratio,
        why=_why(problem, chosen, gpu),
        next_best=following.config if following else None,
        next_ratio=following.median_us / chosen.median_us if following else None,
    )


def _why(problem: Problem, chosen: Ranked, gpu: Gpu) -> str:
    estimate = predict(problem, chosen.config, gpu)
    rate = problem.flops / chosen.median_us / 1e6
    blocks = "1 block/SM" if estimate.blocks_sm == 1 else f"{estimate.blocks_sm} blocks/SM"
    return f"{rate:.0f} TFLOP/s, {chosen.measurement.stage}; {estimate.bound}-bound, {blocks}"
