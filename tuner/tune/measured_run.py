"""A measured run: lists what is to be searched for each problem, lets the devices measure, and says what came of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from flashtune.codegen.families.family import AnyFamily
from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.results.report import Progress, Report
from flashtune.tuner.results.rows import incumbent, known, starts
from flashtune.tuner.run.run import Means, run_searches
from flashtune.tuner.run.verdict import verdict
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.search.space import Rejected, Space, make_space
from flashtune.tuner.workers.process_worker import Unit

from .request import TuneRequest

HOPELESS_FAMILY = 6.0
"""A family whose best predicted time is this much above another's is not searched."""


def measure_problems(request: TuneRequest, means: Means) -> Report:
    """Tunes the problems of ``request`` on the devices of ``means``, each of them on one.

    Ends early, with what is known, on Ctrl-C, or when no process can be had any more to measure or to compile.
    """
    rejected: Rejected = {}
    spaces: dict[Problem, list[Space]] = {}

    def fastest(problem: Problem) -> float:
        means.progress(Progress(0.0, f"{problem}: listing configs"))
        spaces[problem] = search_spaces(problem, means.gpu, request.families(problem), rejected)
        return _fastest(spaces[problem])

    def search(problem: Problem, unit: Unit) -> tuple[ProblemSearch, Iterable[Config]]:
        searched = itertools.chain.from_iterable(space.configs for space in spaces[problem])
        return _search(problem, request, means, unit, spaces[problem]), [*request.first, *searched]

    ran = run_searches(means, request.budget, request.problems, fastest, search)
    return Report(
        gpu=means.gpu,
        measured=True,
        rows=tuple(verdict(each, ran.searches.get(each), means.store, means.gpu) for each in request.problems),
        session=ran.session,
        seconds=ran.seconds,
        rejected=sum(rejected.values(), Counter[str]()),
        failed=ran.failed,
        blocklisted=ran.blocklisted,
        interrupted=ran.interrupted,
        stopped=f"{ran.stopped}. Everything up to here is stored: run again to go on" if ran.stopped else "",
        flagged=ran.flagged,
        note=ran.note,
    )


def search_spaces(problem: Problem, gpu: Gpu, families: Sequence[AnyFamily], rejected: Rejected) -> list[Space]:
    """What is searched, the most specialised family first; what is not legal is counted in ``rejected``."""
    listed = [make_space(problem, gpu, each) for each in families]
    for space in listed:
        rejected[problem.spec, space.family.name] = space.rejected
    spaces = [space for space in listed if len(space)]
    limit = HOPELESS_FAMILY * _fastest(spaces)
    return [space for space in spaces if space.estimates[0].seconds <= limit]


def _fastest(spaces: Sequence[Space]) -> float:
    """The best predicted time in seconds."""
    return min(space.estimates[0].seconds for space in spaces)


def _search(problem: Problem, request: TuneRequest, means: Means, unit: Unit, spaces: Sequence[Space]) -> ProblemSearch:
    gpu, store = means.gpu, means.store
    # Of all families, whichever are searched: ratios to another default would mean something else.
    default, previous = default_config(problem, gpu), incumbent(store, problem, gpu)
    rows = {
        config: row
        for config, row in known(store, problem, gpu, unit=unit.uuid).items()
        # What was legal once may not be now.
        if config in (*request.first, default, previous) or any(config in space.rank for space in spaces)
    }
    first = starts(store, problem, gpu)
    return ProblemSearch(problem, spaces, default, rows, first, means.seed, request.strategy, request.first, previous)
