"""What the database says of a problem at the end of a measured run: the winner as attention() will find it, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flashtune.codegen.families.registry import predict, unusable
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.roofline import limit
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.policy.ranked import Ranked
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.results.report import Row
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.trial.failures import commonest


def verdict(problem: Problem, search: ProblemSearch | None, store: Store, gpu: Gpu) -> Row:
    """The row of the report; ``search`` is None where the run did not come to ``problem``."""
    if search is None:
        return Row(problem=problem, why="the run ended before its turn")
    failure = commonest((each.status, each.message) for each in search.rows.values() if each.status != "ok")
    base = Row(problem=problem, tried=search.tried, known=search.known, why=search.skipped, failure=failure)
    rows = store.measurements(problem=problem, gpu_key=gpu.key, status="ok")
    usable = [
        each
        for each in rank(rows, store.rejected(problem.spec, gpu.key))
        if unusable(each.config, problem, gpu) is None and each.variant[2] == source_digest(problem.spec, each.config)
    ]
    if not usable:
        nothing = "no config was correct" if search.rows else "no config was tried in time"
        return dataclasses.replace(base, why=search.skipped or nothing)
    chosen, following = usable[0], usable[1] if len(usable) > 1 else None
    seconds = chosen.median_us / 1e6
    bound = limit(problem, gpu)
    return dataclasses.replace(
        base,
        config=chosen.config,
        seconds=seconds,
        ratio=chosen.ratio,
        ratio_low=chosen.low,
        ratio_high=chosen.high,
        tied=chosen.tied,
        reached=bound.reached(seconds),
        limited_by=bound.by,
        why="; ".join(
            [reason(chosen, chosen.config == search.default), *_disputes(chosen, usable), *_speed(problem, chosen, gpu)]
        ),
        next_best=following.config if following else None,
        next_ratio=_relative(following, chosen) if following else None,
    )


def reason(chosen: Ranked, is_default: bool) -> str:
    """Why this one won, by the policy of `tuned_db.policy.winners`."""
    others = chosen.tied - 1
    if chosen.ratio is None:
        return f"fastest in {chosen.measurement.stage}, there was no final with the default"
    if is_default:
        return "the default: nothing is clearly faster" + (f", {others} may be" if others else "")
    if chosen.high is None:
        return "fastest final by its median; there is no interval"
    if not others:
        return "clearly the fastest"
    spills, registers, shared = chosen.needs
    needs = f"{registers:.0f} registers, {shared / 1024:.0f} KiB of shared memory" + (", spills" if spills else "")
    return f"not told apart from {others} other{'s' if others > 1 else ''}, needs least ({needs})"


def _disputes(chosen: Ranked, usable: Sequence[Ranked]) -> list[str]:
    """What rule 7 of the policy has to do with it, if anything."""
    if chosen.disputed:
        return ["disputed: its sessions don't say the same"]
    faster = [each for each in usable if each.disputed and (each.ratio or 0) < (chosen.ratio or 0)]
    return [f"{len(faster)} that claimed to be faster {'is' if len(faster) == 1 else 'are'} disputed"] if faster else []


def _relative(following: Ranked, chosen: Ranked) -> float:
    """Time of the next best relative to the chosen: by their ratios to the default, which other days don't change."""
    if following.ratio is not None and chosen.ratio is not None:
        return following.ratio / chosen.ratio
    return following.median_us / chosen.median_us


def _speed(problem: Problem, chosen: Ranked, gpu: Gpu) -> tuple[str, str]:
    estimate = predict(problem, chosen.config, gpu)
    blocks = "1 block/SM" if estimate.blocks_sm == 1 else f"{estimate.blocks_sm} blocks/SM"
    return f"{problem.flops / chosen.median_us / 1e6:.0f} TFLOP/s", f"{estimate.bound}-bound, {blocks}"
