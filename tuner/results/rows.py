"""Between tuner and store: outcomes become measurements, stored rows become what is known and where to start."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from flashtune import settings
from flashtune.codegen.families.registry import family, unusable
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.lookup.lookup import find, source_digest
from flashtune.tuned_db.lookup.sources import RowSource, bundled
from flashtune.tuned_db.policy.distance import chip_distance, problem_distance
from flashtune.tuned_db.policy.plausible import impossible
from flashtune.tuned_db.policy.winners import best_first
from flashtune.tuned_db.records.measurement import SLOWDOWNS, THROTTLES, Measurement, capability, new_id, now
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.trial.outcome import Evidence, Outcome

SETTLED = ("ok", "wrong", "illegal_access", "timeout", "compile_error", "spills")
"""Statuses that another run would find again. The others, such as out of memory, are tried anew."""
NEAR_PROBLEMS, NEAR_STARTS, MAX_STARTS = 8, 4, 6
"""Near problems whose winners are looked at, how many different ones of these are tried first, and how many in all."""


def measurement(
    outcome: Outcome,
    problem: Problem,
    config: Config,
    gpu: Gpu,
    built: Built,
    evidence: Evidence,
    *,
    session: str,
    seed: int,
) -> Measurement:
    """The row that records ``outcome``."""
    timing, readings, ratio = outcome.timing, outcome.readings, outcome.ratio
    return Measurement(
        id=new_id(),
        created=now(),
        session=session,
        problem=problem,
        gpu_key=gpu.key,
        gpu_name=gpu.name,
        config=config,
        source_digest=built.digest,
        status=outcome.status,
        stage=outcome.stage,
        median_us=_us(timing.median) if timing else None,
        q20_us=_us(timing.q20) if timing else None,
        q80_us=_us(timing.q80) if timing else None,
        samples=timing.count if timing else 0,
        baseline_us=None if outcome.baseline is None else _us(outcome.baseline),
        paired_ratio=ratio.median if ratio else None,
        ratio_low=ratio.low if ratio else None,
        ratio_high=ratio.high if ratio else None,
        rounds=ratio.rounds if ratio else None,
        max_error=outcome.max_error,
        rms_error=outcome.rms_error,
        registers=built.registers or None,
        spill_bytes=None if built.error else built.spill_bytes,
        shared_bytes=family(config.family).resources(config, problem.spec).shared_memory + built.static_shared_bytes,
        clock_mhz=readings.clock_mhz,
        power_w=readings.power_w,
        temperature_c=readings.temperature_c,
        throttle=readings.throttle,
        contended=readings.contended,
        unit=evidence.unit,
        driver=evidence.driver,
        nvrtc=built.nvrtc,
        cupy=evidence.cupy,
        flashtune=own_version(),
        author=settings.author(),
        seed=seed,
        message=outcome.message,
    )


def flags(rows: Iterable[Measurement]) -> Counter[str]:
    """How many rows are worth less than others because of the card, by reason."""
    found: Counter[str] = Counter()
    for row in rows:
        if row.contended:
            found["another process had the card open"] += 1
        found.update(THROTTLES[each] for each in row.reasons if each in SLOWDOWNS)
    return found


def known(store: Store, problem: Problem, gpu: Gpu, *, unit: str) -> dict[Config, Measurement]:
    """The latest settled row of each config whose source is still what is rendered today.

    Times of another card of the same model steer the search as well as those of this one, ``unit``; where both are
    there, this one's count.
    """
    rows: dict[Config, Measurement] = {}
    for each in store.measurements(problem=problem, gpu_key=gpu.key):
        if each.status not in SETTLED or each.stage == "final" or impossible(each):
            continue
        if each.source_digest and each.source_digest != source_digest(problem.spec, each.config):
            continue
        if each.config in rows and rows[each.config].unit == unit != each.unit:
            continue
        rows[each.config] = each
    return rows


def known_builds(store: Store, problem: Problem, gpu: Gpu) -> dict[Config, Built]:
    """The compiler's facts of each predicted config that is still legal and rendered the same today."""
    found: dict[Config, Built] = {}
    for each in store.predictions(problem=problem, gpu_key=gpu.key):
        kind, spec = family(each.family), problem.spec
        facts = each.registers, each.spill_bytes, each.shared_bytes
        if None in facts or kind.refuses_config(each.config, spec, gpu):
            continue
        if each.source_digest != source_digest(spec, each.config):
            continue
        registers, spill_bytes, shared = (fact or 0 for fact in facts)
        found[each.config] = Built(
            digest=each.source_digest,
            registers=registers,
            spill_bytes=spill_bytes,
            static_shared_bytes=max(0, shared - kind.resources(each.config, spec).shared_memory),
            nvrtc=each.nvrtc,
        )
    return found


def starts(store: Store, problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs to try first besides the default, each at most once and legal here, at most `MAX_STARTS`, in this order:

    1. what attention() would use now;
    2. this problem's winner, which may be of an older source, and those of near problems on this GPU, nearest first;
    3. the winners of this problem on other GPUs, the nearest of the same capability first.

    Rows of ``store`` and those that ship count alike. A winner of another problem or GPU is changed where its family
    knows that it must be (`Family.fitted`).
    """
    own = capability(gpu.key)
    sources: list[RowSource] = [store, bundled(own)]
    known = {each.key: each for source in sources for each in source.problems(spec=problem.spec, gpu_key=gpu.key)}
    near = sorted(known.values(), key=lambda each: (problem_distance(problem, each), each.key))[:NEAR_PROBLEMS]
    keys = {*store.gpu_keys(), *bundled(own).gpu_keys(capability=own)} - {gpu.key}
    chips = sorted(keys, key=lambda key: (capability(key) != own, chip_distance(gpu.key, key), key))

    def winners(places: Iterable[tuple[Problem, str]]) -> Iterator[Config]:
        for (place, key), source in itertools.product(places, sources):
            config = _winner(source, place, key)
            if config is not None:
                config = family(config.family).fitted(config, problem, gpu)
                if unusable(config, problem, gpu) is None:
                    yield config

    found = dict.fromkeys([find(problem, gpu, store_path=store.path).config])
    for most, places in (
        (1 + NEAR_STARTS, [(each, gpu.key) for each in near]),
        (MAX_STARTS, [(problem, key) for key in chips]),
    ):
        for config in winners(places):
            if len(found) < most:
                found[config] = None
    return list(found)


def _winner(source: RowSource, problem: Problem, gpu_key: str) -> Config | None:
    """The winner for ``problem`` among the rows of ``source``, of whatever source text: it is measured anew."""
    barred = source.rejected(problem.spec, gpu_key)
    ranked = best_first(
        lambda stage: source.measurements(problem=problem, gpu_key=gpu_key, status="ok", stage=stage), barred
    )
    best = next(ranked, None)
    return best.config if best else None


def incumbent(store: Store, problem: Problem, gpu: Gpu) -> Config | None:
    """What attention() runs today because it was measured for ``problem`` on ``gpu``: to be beaten in a final."""
    choice = find(problem, gpu, store_path=store.path)
    return choice.config if choice.level in ("exact", "older_source") else None


def own_version() -> str:
    """Version of flashtune; empty where it is used from a checkout without being installed."""
    try:
        return version("flashtune")
    except PackageNotFoundError:
        return ""


def _us(seconds: float) -> float:
    return seconds * 1e6
