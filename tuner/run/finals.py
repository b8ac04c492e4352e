"""Who takes part in a final; and from its rounds to its rows: who was how fast, against the default, how surely."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.trial.intervals import paired
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.trial.timing import summarise
from flashtune.tuner.workers.process_worker import Finished


def wanted(search: ProblemSearch, store: Store, gpu: Gpu, seconds: float) -> list[Config]:
    """Configs for a final of ``search`` of ``seconds``; none where there is nothing new to decide."""
    if search.skipped or not (search.tried or not _had_final(search.problem, store, gpu)):
        return []
    return search.finalists(seconds)


def _had_final(problem: Problem, store: Store, gpu: Gpu) -> bool:
    rows = store.measurements(problem=problem, gpu_key=gpu.key, status="ok", stage="final")
    return any(each.source_digest == source_digest(problem.spec, each.config) for each in rows)


def finalists(answer: Finished, default: Config, checked: Mapping[Config, Measurement]) -> dict[Config, Outcome]:
    """What a final says of each config. ``checked`` are the rows of when it was checked: no final does that again."""
    outcomes = {config: _outcome(times, answer, checked[config]) for config, times in answer.rounds.items()}
    baseline = outcomes[default].seconds if default in outcomes else None
    for config, outcome in outcomes.items():
        compared = baseline is not None and outcome.seconds is not None
        ratio = paired(answer.rounds[config], answer.rounds[default]) if compared else None
        outcomes[config] = dataclasses.replace(outcome, baseline=baseline, ratio=ratio)
    return outcomes


def _outcome(times: Sequence[float], answer: Finished, row: Measurement) -> Outcome:
    """A time that is no time makes it a failure, and leaves the others as they are."""
    outcome = Outcome(
        status="ok", stage="final", readings=answer.readings, max_error=row.max_error, rms_error=row.rms_error
    )
    try:
        return dataclasses.replace(outcome, timing=summarise(times))
    except ValueError as error:
        return dataclasses.replace(outcome, status="failed", message=str(error))
