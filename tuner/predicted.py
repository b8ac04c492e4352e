"""A predicted run, without the device: ranks by the model, compiles the best-ranked, ranks again with the facts."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import zip_longest

from flashtune.codegen.config import Config
from flashtune.codegen.family import Family, family
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.model import FITTED_CAPABILITY, Estimate, default_config, predict, preference
from flashtune.codegen.problem import Problem, Spec
from flashtune.codegen.roofline import limit
from flashtune.tuned_db.records import Prediction, new_id, now
from flashtune.tuned_db.store import Store

from .budget import Budget, Meter
from .build import Builder, Built, result, wait_for_any
from .coordinator import render
from .records import known_builds, own_version
from .report import Progress, Report, Row
from .space import make_space
from .trial import judge_resources

COMPILED_CONFIGS = 32
"""Most configs compiled per spec: beyond these the model's ranking is not worth a compile."""


def _settings(problem: Problem, gpu: Gpu, families: Sequence[Family]) -> frozenset[object]:
    """What the parameters that are searched by problem can be for ``problem``: a long prefill and one query differ."""
    configs = [each for kind in families for each in kind.variants(kind.default(problem.spec, gpu), problem, gpu)]
    return frozenset(
        (each.family, *(getattr(each, parameter.name) for parameter in each.parameters() if parameter.by_problem))
        for each in configs
    )


class _Group:
    """Problems of one spec and alike: they share sources, so each config is compiled once for all of them."""

    def __init__(self, problems: Sequence[Problem], gpu: Gpu, families: Sequence[Family]) -> None:
        self.problems = problems
        self.families = {each.name for each in families}
        self.defaults = {problem: default_config(problem, gpu, families) for problem in problems}
        self.rejected: Counter[str] = Counter()
        self.built: dict[Config, Built] = {}
        scores: dict[Config, list[float]] = {}
        for problem in problems:
            spaces = [make_space(problem, gpu, each) for each in families]
            fastest = min(space.estimates[0].seconds for space in spaces if len(space))
            for space in spaces:
                self.rejected.update(space.rejected)
                for config, estimate in zip(space.configs, space.estimates, strict=True):
                    scores.setdefault(config, []).append(math.log(estimate.seconds / fastest))
        order = sorted(scores, key=lambda config: (statistics.fmean(scores[config]), config.family, config.key))
        self.candidates = list(dict.fromkeys([*self.defaults.values(), *order]))[:COMPILED_CONFIGS]


def predict_problems(
    problems: Sequence[Problem],
    gpu: Gpu,
    store: Store,
    builder: Builder,
    budget: Budget,
    families: Callable[[Problem], Sequence[Family]],
    progress: Callable[[Progress], None],
    *,
    note: str,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Predicts for ``problems`` on ``gpu`` and stores the rankings. Ctrl-C ends the compiling early."""
    meter = Meter(budget, clock)
    groups: list[_Group] = []
    failed: Counter[str] = Counter()
    interrupted = False
    try:
        alike: dict[tuple[Spec, frozenset[object]], list[Problem]] = {}
        for problem in problems:
            alike.setdefault((problem.spec, _settings(problem, gpu, families(problem))), []).append(problem)
        for (spec, _), members in alike.items():
            progress(Progress(0.0, f"{spec}: listing configs"))
            groups.append(_Group(members, gpu, families(members[0])))
        _compile(groups, gpu, builder, meter, progress)
    except KeyboardInterrupt:
        interrupted = True
    rows: dict[Problem, Row] = {}
    rejected: Counter[str] = Counter()
    for group in groups:
        rejected.update(group.rejected)
        usable: dict[Config, Built] = {}
        for config, built in group.built.items():
            judged = judge_resources(group.problems[0], config, gpu, built)
            if judged is None:
                usable[config] = built
            else:
                failed[judged.status] += 1
        for problem in group.problems:
            rows[problem] = _conclude(problem, gpu, group, usable, store)
    return Report(
        gpu=gpu,
        measured=False,
        rows=tuple(rows.get(each, Row(problem=each, why="interrupted before its turn")) for each in problems),
        session=new_id(),
        seconds=meter.elapsed,
        rejected=rejected,
        failed=failed,
        interrupted=interrupted,
        note=note,
    )


def _compile(
    groups: Sequence[_Group], gpu: Gpu, builder: Builder, meter: Meter, progress: Callable[[Progress], None]
) -> None:
    """Compiles in rank order, one config of each group in turn, until the budget or the candidates end."""
    waiting = _in_turns(groups)
    total = sum(len(group.candidates) for group in groups)
    running: dict[Future[Built], tuple[_Group, Config]] = {}
    begun, done = 0, 0
    more = True
    while True:
        while more and len(running) <= builder.workers:
            if meter.spent or (meter.budget.trials is not None and begun >= meter.budget.trials):
                more = False
                break
            following = next(waiting, None)
            if following is None:
                more = False
                break
            group, config = following
            job = builder.submit(render(group.problems[0], config))
            running[job] = (group, config)
            begun += 1
        if not running:
            return
        wait_for_any(running)
        for job in [each for each in running if each.done()]:
            group, config = running.pop(job)
            group.built[config] = result(job)
            done += 1
            meter.trials = done
            text = f"compiled {done} of {total}: {config}"
            progress(Progress(max(1 - meter.left, done / total), text, gpu=f"{gpu}, predicted"))


def _in_turns(groups: Sequence[_Group]) -> Iterator[tuple[_Group, Config]]:
    for configs in zip_longest(*(group.candidates for group in groups)):
        for group, config in zip(groups, configs, strict=True):
            if config is not None:
                yield group, config


def _conclude(problem: Problem, gpu: Gpu, group: _Group, usable: dict[Config, Built], store: Store) -> Row:
    """Ranks with the compiler's facts, those of earlier runs too, stores the ranking, and says what is best."""
    earlier = {
        config: built
        for config, built in known_builds(store, problem, gpu).items()
        if config.family in group.families
        and config not in group.built
        and judge_resources(problem, config, gpu, built) is None
    }
    usable = {**earlier, **usable}
    wary = gpu.capability != FITTED_CAPABILITY

    def order(pair: tuple[Config, Estimate]) -> tuple[float, str, str]:
        config, estimate = pair
        return preference(estimate, usable[config].spill_bytes if wary else 0), config.family, config.key

    estimated = ((config, predict(problem, config, gpu, built)) for config, built in usable.items())
    ranking: list[tuple[Config, Estimate]] = sorted(estimated, key=order)
    if not ranking:
        why = "the run ended before a config was compiled" if not group.built else "no config compiled as it must"
        return Row(problem=problem, why=why, tried=len(group.built))
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
        known=len(earlier),
    )
