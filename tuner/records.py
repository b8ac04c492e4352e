"""Between tuner and store: outcomes become measurements, stored rows become what is known and where to start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from flashtune.codegen.config import Config
from flashtune.codegen.family import family
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.problem import Problem
from flashtune.tuned_db.lookup import find, source_digest
from flashtune.tuned_db.records import SLOWDOWNS, THROTTLES, Measurement, new_id, now
from flashtune.tuned_db.store import Store

from .build import Built
from .intervals import PairedRatio
from .trial import Evidence, Outcome

SETTLED = ("ok", "wrong", "illegal_access", "timeout", "compile_error", "spills")
"""Statuses that another run would find again. The others, such as out of memory, are tried anew."""
MAX_STARTS = 6
"""Known winners that are tried first."""


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
    baseline: float | None = None,
    ratio: PairedRatio | None = None,
) -> Measurement:
    """The row that records ``outcome``. ``baseline`` is the default's median in the same final, in seconds, ``ratio``
    what that final says of this config and the default."""
    timing, readings = outcome.timing, outcome.readings
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
        baseline_us=None if baseline is None else _us(baseline),
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
        seed=seed,
        message=outcome.message,
    )


def flags(rows: Iterable[Measurement]) -> Counter[str]:
    """How many rows are worth less than others because of the card, by reason."""
    found: Counter[str] = Counter()
    for row in rows:
        if row.contended:
            found["another process had the card open"] += 1
        found.update(THROTTLES[each] for each in (row.throttle or "").split(",") if each in SLOWDOWNS)
    return found


def known(store: Store, problem: Problem, gpu: Gpu, *, unit: str) -> dict[Config, Measurement]:
    """The latest settled row of each config whose source is still what is rendered today.

    Times of another card of the same model steer the search as well as those of this one, ``unit``; where both are
    there, this one's count.
    """
    rows: dict[Config, Measurement] = {}
    for each in store.measurements(problem=problem, gpu_key=gpu.key):
        if each.status not in SETTLED or each.stage == "final":
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
        if None in facts or kind.unsupported(spec, gpu) or kind.illegal(each.config, spec, gpu):
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
    """Configs to try first besides the default: what attention() would use, then winners of near problems and chips."""
    found = [find(problem, gpu, store_path=store.path).config]
    own = store.winner(problem, gpu.key)
    if own is not None:
        found.append(own.config)
    for other in store.problems(spec=problem.spec, gpu_key=gpu.key):
        winner = store.winner(other, gpu.key)
        if winner is not None:
            found.append(winner.config)
    for key in store.gpu_keys():
        winner = store.winner(problem, key) if key != gpu.key else None
        if winner is not None:
            found.append(winner.config)
    return list(dict.fromkeys(found))[:MAX_STARTS]


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
