"""Rows of another device model say nothing of this one: whatever the tuner asks of a database, they change nothing."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tuner_fakes import FAMILY, GPU, PROBLEMS, FakeBench, FakeBuilder, LocalWorker, only_sm80, problem

from flashtune.codegen.gpu import Gpu, gpu_by_alias
from flashtune.codegen.problem import Problem
from flashtune.errors import InvalidInput
from flashtune.tuned_db.lookup import source_digest
from flashtune.tuned_db.records import Measurement, new_id
from flashtune.tuned_db.store import Store
from flashtune.tuner.budget import Budget
from flashtune.tuner.finals import _had_final
from flashtune.tuner.predicted import predict_problems
from flashtune.tuner.records import incumbent, known, known_builds
from flashtune.tuner.shared import shared_config
from flashtune.tuner.target import Target
from flashtune.tuner.verdict import verdict
from flashtune.tuner.verify import verify_claims, winners

OTHER = gpu_by_alias("h200")
ELSEWHERE = problem(4096)
"""What the other model alone was tuned for."""


def predicted(path: Path, gpu: Gpu, trials: int) -> list[tuple[Any, ...]]:
    """What a run without the GPU says of each problem."""
    with Store.open(path) as store:
        report = predict_problems(
            PROBLEMS, gpu, store, FakeBuilder(), Budget(trials=trials), only_sm80, lambda progress: None, note=""
        )
    return [(row.config, row.seconds, row.next_best, row.tried, row.known) for row in report.rows]


def of_other(row: Measurement, where: Problem, agrees: bool) -> Measurement:
    """As if the other model had measured it: as fast against the default, or all configs in half of its time."""
    changes: dict[str, Any] = {}
    if row.ratio and row.baseline_us and not agrees:
        half = 0.5 * row.baseline_us
        changes |= {"paired_ratio": 0.5, "ratio_low": 0.499, "ratio_high": 0.501}
        changes |= {"median_us": half, "q20_us": half, "q80_us": half}
    names = {"id": new_id(), "session": f"of {OTHER.name}", "gpu_key": OTHER.key, "gpu_name": OTHER.name}
    return dataclasses.replace(row, problem=where, unit="GPU-other", **names, **changes)


@pytest.fixture
def alone(tuned: Path) -> Path:
    predicted(tuned, GPU, 4)
    return tuned


@pytest.fixture(params=[True, False], ids=["agrees", "disagrees"])
def beside(alone: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The same database with rows of the other model, of each config that either has and of problems of its own."""
    path = tmp_path / "beside.db"
    shutil.copy(alone, path)
    with Store.open(path) as store:
        rows = store.measurements()
        store.add([of_other(each, where, request.param) for each in rows for where in (*PROBLEMS, ELSEWHERE)])
    predicted(path, OTHER, 20)
    return path


def verified(path: Path) -> list[tuple[Any, ...]]:
    with Store.open(path) as store:
        found = verify_claims(
            winners(path, GPU, 20, 0), GPU, store, [FakeBench()], FakeBuilder(), 0, lambda _: None,
            hire=LocalWorker,
        )  # fmt: skip
    return sorted((str(each.stored.problem), each.stored.config.key, each.word, each.level) for each in found.rows)


def target(where: Problem) -> Target:
    return Target(where, [], only_sm80(where)[0].default(where.spec, GPU), {}, [], 0)


ASKED: dict[str, Callable[[Store, Problem], Any]] = {
    "known": lambda store, where: known(store, where, GPU, unit="GPU-fake"),
    "known builds": lambda store, where: known_builds(store, where, GPU),
    "incumbent": lambda store, where: incumbent(store, where, GPU),
    "had a final": lambda store, where: _had_final(where, store, GPU),
    "verdict": lambda store, where: verdict(where, target(where), store, GPU),
    "shared, measured": lambda store, where: shared_config(store, [where, PROBLEMS[0]], GPU, measured=True),
    "shared, predicted": lambda store, where: shared_config(store, [where, PROBLEMS[0]], GPU, measured=False),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_one_model_is_answered_by_its_rows(name: str, alone: Path, beside: Path) -> None:
    """A hole in the tests: most of what asks for the rows of a GPU could ask for all."""
    answers = []
    for path in (alone, beside):
        with Store.open(path, readonly=True) as store:
            answers.append([ASKED[name](store, where) for where in (*PROBLEMS, ELSEWHERE)])
    assert answers[0] == answers[1]


def test_winners_of_another_model_are_not_verified_here_and_witness_nothing(alone: Path, beside: Path) -> None:
    assert verified(beside) == verified(alone)


def test_what_another_model_was_compared_with_is_not_what_this_one_was(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Today's default is a config that sessions of the other model alone have compared with."""
    today = dataclasses.replace(FAMILY.default(PROBLEMS[0].spec, GPU), num_stages=3)
    monkeypatch.setattr("flashtune.tuner.verify.default_config", lambda where, gpu: today)
    with Store.open(alone) as store:
        finals = [of_other(each, each.problem, True) for each in store.measurements(stage="final")]
        compared = [dataclasses.replace(each, config=today) if each.ratio == 1 else each for each in finals]
        assert compared != finals
        store.add(
            dataclasses.replace(each, source_digest=source_digest(each.problem.spec, each.config)) for each in compared
        )
    with pytest.raises(InvalidInput, match="nothing to verify"):
        winners(alone, GPU, 20, 0)


def test_a_run_without_the_gpu_takes_no_facts_from_another_model(alone: Path, beside: Path) -> None:
    assert predicted(beside, GPU, 6) == predicted(alone, GPU, 6)
