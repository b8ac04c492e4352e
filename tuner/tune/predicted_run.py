"""A predicted run, without the device: ranks by the model, compiles the best-ranked, ranks again with the facts."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import zip_longest

from flashtune.codegen.families.family import AnyFamily
from flashtune.codegen.families.model import FITTED_CAPABILITY, Estimate, preference
from flashtune.codegen.families.registry import default_config, family, predict, source_for
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.roofline import limit
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.tuned_db.records.measurement import Prediction, new_id, now
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Builder, Built, wait_for_any
from flashtune.tuner.processes.process import RunEndedError
from flashtune.tuner.results.budget import Meter
from flashtune.tuner.results.report import Progress, Report, Row
from flashtune.tuner.results.rows import known_builds, own_version
from flashtune.tuner.run.run import Means
from flashtune.tuner.search.space import Rejected, make_space
from flashtune.tuner.trial.failures import commonest
from flashtune.tuner.trial.outcome import Outcome, judge_resources

from .request import TuneRequest

COMPILED_CONFIGS = 32
"""Most configs compiled per spec: beyond these the model's ranking is not worth a compile."""


def _settings(problem: Problem, gpu: Gpu, families: Sequence[AnyFamily]) -> frozenset[object]:
    """What the parameters that are searched by problem can be for ``problem``: a long prefill and one query differ."""
    configs = [each for kind in families for each in kind.variants(kind.default(problem.spec, gpu), problem, gpu)]
    return frozenset(
        (each.family, *(getattr(each, parameter.name) for parameter in each.parameters() if parameter.by_problem))
        for each in configs
    )


class _Group:
    """Problems of one spec and alike: they share sources, so each config is compiled once for all of them."""

    def __init__(self, problems: Sequence[Problem], gpu: Gpu, families: Sequence[AnyFamily]) -> None:
        self.problems = problems
        self.families = {each.name for each in families}
        self.defaults = {problem: default_config(problem, gpu, families) for problem in problems}
        self.rejected: Rejected = {}
        self.built: dict[Config, Built] = {}
        scores: dict[Config, list[float]] = {}
        for problem in problems:
            spaces = [make_space(problem, gpu, each) for each in families]
            fastest = min(space.estimates[0].seconds for space in spaces if len(space))
            for space in spaces:
                self.rejected[problem.spec, space.family.name] = space.rejected
                for config, estimate in zip(space.configs, space.estimates, strict=True):
                    scores.setdefault(config, []).append(math.log(estimate.seconds / fastest))
        order = sorted(scores, key=lambda config: (statistics.fmean(scores[config]), config.family, config.key))
        self.candidates = list(dict.fromkeys([*self.defaults.values(), *order]))[:COMPILED_CONFIGS]


def predict_problems(request: TuneRequest, means: Means, note: str) -> Report:
    """Predicts for the problems of ``request`` on the GPU model of ``means``, and stores the rankings. ``note``: why.

    Ctrl-C ends the compiling early, and so does it where no process can be had any more that compiles: what was
    compiled is ranked. A time budget that is used up still leaves the default of each problem to be compiled.
    """
    problems, families, gpu = request.problems, request.families, means.gpu
    store, progress = means.store, means.progress
    meter = Meter(request.budget, means.clock)
    groups: list[_Group] = []
    interrupted, stopped = False, ""
    try:
        alike: dict[tuple[Spec, frozenset[object]], list[Problem]] = {}
        for problem in problems:
            alike.setdefault((problem.spec, _settings(problem, gpu, families(problem))), []).append(problem)
        for (spec, _), members in alike.items():
            progress(Progress(0.0, f"{spec}: listing configs"))
            groups.append(_Group(members, gpu, families(members[0])))
        _compile(groups, gpu, means.builder, meter, progress)
    except KeyboardInterrupt:
        interrupted = True
    except RunEndedError as error:
        stopped = str(error)
    rows: dict[Problem, Row] = {}
    # Problems, and groups of one spec too, share configs: each counts once.
    rejected: Rejected = {}
    tried: set[tuple[Spec, Config]] = set()
    failed: dict[tuple[Spec, Config], Outcome] = {}
    known: set[tuple[Spec, Config]] = set()
    for group in groups:
        spec = group.problems[0].spec
        rejected |= group.rejected
        tried |= {(spec, config) for config in group.built}
        judged = {each: judge_resources(group.problems[0], each, gpu, built) for each, built in group.built.items()}
        bad = {config: outcome for config, outcome in judged.items() if outcome is not None}
        usable = {config: built for config, built in group.built.items() if config not in bad}
        failed |= {(spec, config): outcome for config, outcome in bad.items()}
        failure = commonest((each.status, each.message) for each in bad.values())
        for problem in group.problems:
            earlier = _earlier(problem, gpu, group, store)
            known |= {(spec, config) for config in earlier}
            row = _conclude(problem, gpu, group, {**earlier, **usable}, store, known=len(earlier))
            rows[problem] = dataclasses.replace(row, failure=failure)
    return Report(
        gpu=gpu,
        measured=False,
        rows=tuple(rows.get(each, Row(problem=each, why="the run ended before its turn")) for each in problems),
        session=new_id(),
        seconds=meter.elapsed,
        rejected=sum(rejected.values(), Counter[str]()),
        failed=Counter(each.status for each in failed.values()),
        distinct_tried=len(tried),
        distinct_known=len(known - tried),
        interrupted=interrupted,
        stopped=stopped,
        note=note,
    )


def _compile(
    groups: Sequence[_Group], gpu: Gpu, builder: Builder, meter: Meter, progress: Callable[[Progress], None]
) -> None:
    """Compiles in rank order, one config of each group in turn, until the budget or the candidates end.

    Listing configs may use up a time budget: the defaults are compiled even so, for the run to say something. A count
    of trials is never exceeded.
    """
    waiting = _in_turns(groups)
    total = sum(len(group.candidates) for group in groups)
    running: dict[Future[Built], tuple[_Group, Config]] = {}
    begun, done, refused = 0, 0, 0
    more = True
    while True:
        while more and len(running) <= builder.workers:
            if meter.budget.trials is not None and begun >= meter.budget.trials:
                more = False
                break
            following = next(_defaults(waiting) if meter.spent else waiting, None)
            if following is None:
                more = False
                break
            group, config = following
            job = builder.submit(source_for(group.problems[0], config))
            running[job] = (group, config)
            begun += 1
        if not running:
            return
        wait_for_any(running)
        for job in [each for each in running if each.done()]:
            group, config = running.pop(job)
            group.built[config] = built = job.result()
            done += 1
            refused += bool(built.error)
            meter.trials = done
            failing = f", {refused} failed" if refused else ""
            text = f"compiled {done - refused} of {total}{failing}: {config}"
            progress(Progress(max(1 - meter.left, done / total), text, gpu=f"{gpu}, predicted"))


def _in_turns(groups: Sequence[_Group]) -> Iterator[tuple[_Group, Config]]:
    for configs in zip_longest(*(group.candidates for group in groups)):
        for group, config in zip(groups, configs, strict=True):
            if config is not None:
                yield group, config


def _defaults(waiting: Iterator[tuple[_Group, Config]]) -> Iterator[tuple[_Group, Config]]:
    return ((group, config) for group, config in waiting if config in group.defaults.values())


def _earlier(problem: Problem, gpu: Gpu, group: _Group, store: Store) -> dict[Config, Built]:
    """What earlier runs compiled and this one did not."""
    return {
        config: built
        for config, built in known_builds(store, problem, gpu).items()
        if config.family in group.families
        and config not in group.built
        and judge_resources(problem, config, gpu, built) is None
    }


def _conclude(
    problem: Problem, gpu: Gpu, group: _Group, usable: dict[Config, Built], store: Store, *, known: int
) -> Row:
    """Ranks with the compiler's facts, stores the ranking, and says what is best. ``known`` of ``usable`` are old."""
    wary = gpu.capability != FITTED_CAPABILITY

    def order(pair: tuple[Config, Estimate]) -> tuple[float, str, str]:
        config, estimate = pair
        return preference(estimate, usable[config].spill_bytes if wary else 0), config.family, config.key

    estimated = ((config, predict(problem, config, gpu, built)) for config, built in usable.items())
    ranking: list[tuple[Config, Estimate]] = sorted(estimated, key=order)
    if not ranking and not group.built:
        return _by_model_alone(problem, gpu, group)
    if not ranking:
        return Row(problem=problem, why="no config compiled as it must", tried=len(group.built))
    created = now()
    store.replace_predictions(
        Prediction(
            created=created,
            problem=problem,
            gpu_key=gpu.key,
            gpu_name=gpu.name,
            config=config,
            source_digest=usable[config].digest,
            predicted_us=estimate.seconds * 1e6,
            rank=number,
            registers=usable[config].registers,
            spill_bytes=usable[config].spill_bytes,
            shared_bytes=family(config.family).resources(config, problem.spec).shared_memory
            + usable[config].static_shared_bytes,
            nvrtc=usable[config].nvrtc,
            flashtune=own_version(),
        )
        for number, (config, estimate) in enumerate(ranking, start=1)
    )
    estimates = dict(ranking)
    best, estimate = ranking[0]
    default = group.defaults[problem]
    bound = limit(problem, gpu)
    return Row(
        problem=problem,
        config=best,
        seconds=estimate.seconds,
        ratio=estimate.seconds / estimates[default].seconds if default in estimates else None,
        reached=bound.reached(estimate.seconds),
        limited_by=bound.by,
        why=estimate.why,
        next_best=ranking[1][0] if len(ranking) > 1 else None,
        next_ratio=ranking[1][1].seconds / estimate.seconds if len(ranking) > 1 else None,
        tried=len(group.built),
        known=known,
    )


def _by_model_alone(problem: Problem, gpu: Gpu, group: _Group) -> Row:
    """The model's best where the run ended before anything was compiled. It is not stored: a prediction has facts."""
    estimates = {config: predict(problem, config, gpu) for config in group.candidates}
    best = min(estimates, key=lambda config: (preference(estimates[config], 0), config.family, config.key))
    seconds, bound = estimates[best].seconds, limit(problem, gpu)
    return Row(
        problem=problem,
        config=best,
        seconds=seconds,
        ratio=seconds / estimates[group.defaults[problem]].seconds,
        reached=bound.reached(seconds),
        limited_by=bound.by,
        why="by the model alone: the run ended before a config was compiled",
    )
