"""Rows that say nothing of what runs here today change nothing of what the tuner asks of a database.

Those of another device model, of kernels whose source was another, and of configs that are not legal on this GPU.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tuner_fakes import FAMILY, GPU, PROBLEMS, FakeBench, FakeBuilder, means, only_sm80, problem, request

from flashtune.codegen.families.registry import unusable
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import InvalidInput
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.records.measurement import Measurement, new_id
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.commands.one_config import shared_config
from flashtune.tuner.commands.verify import verify_claims, winners
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.rows import incumbent, known, known_builds
from flashtune.tuner.run.finals import _had_final
from flashtune.tuner.run.verdict import verdict
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.tune.predicted_run import predict_problems

OTHER = gpu_by_alias("h200")
ELSEWHERE = problem(4096)
"""What the other model alone was tuned for."""


def predicted(
    path: Path, gpu: Gpu, trials: int, problems: Sequence[Problem] = PROBLEMS, builder: FakeBuilder | None = None
) -> list[tuple[Any, ...]]:
    """What a run without the GPU says of each problem."""
    with Store.open(path) as store:
        have = means(store, gpu=gpu, builder=builder or FakeBuilder())
        report = predict_problems(request(problems, trials), have, "")
    return [(row.config, row.seconds, row.next_best, row.tried, row.known) for row in report.rows]


def twice_as_fast(row: Measurement, **changes: Any) -> Measurement:
    """As if another session had measured it, in half of the default's time where it was compared with that."""
    times: dict[str, Any] = {}
    if row.ratio and row.baseline_us:
        half = 0.5 * row.baseline_us
        times |= {"paired_ratio": 0.5, "ratio_low": 0.499, "ratio_high": 0.501}
        times |= {"median_us": half, "q20_us": half, "q80_us": half}
    return dataclasses.replace(row, **{"id": new_id(), "session": "another", "unit": "GPU-other"} | times | changes)


def of_other(row: Measurement, where: Problem, agrees: bool = False) -> Measurement:
    """As if the other model had measured it."""
    model = {"gpu_key": OTHER.key, "gpu_name": OTHER.name, "problem": where}
    return dataclasses.replace(row if agrees else twice_as_fast(row), id=new_id(), unit="GPU-other", **model)


def of_config(row: Measurement, config: Config) -> Measurement:
    return twice_as_fast(row, config=config, source_digest=source_digest(row.problem.spec, config))


def illegal_here(spec: Spec) -> Config:
    """What the other model can run and this one can't."""
    return next(each for each in FAMILY.enumerate(spec, OTHER)[0] if FAMILY.illegal(each, spec, GPU))


KINDS: dict[str, Callable[[Measurement], list[Measurement]]] = {
    "another model": lambda row: [of_other(row, where) for where in (row.problem, ELSEWHERE)],
    "another model that agrees": lambda row: [of_other(row, where, True) for where in (row.problem, ELSEWHERE)],
    "an older source": lambda row: [
        twice_as_fast(row, source_digest="0" * 64, problem=where) for where in (row.problem, ELSEWHERE)
    ],
    "not legal here": lambda row: [of_config(row, illegal_here(row.problem.spec))],
}


@pytest.fixture(scope="module")
def alone(three_winners: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "tuned.db"
    path.write_bytes(three_winners)
    predicted(path, GPU, 4)
    return path


@pytest.fixture(scope="module", params=KINDS)
def beside(alone: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The same database with such rows as well, and predictions of the other model and of an older source."""
    path = tmp_path_factory.mktemp("beside") / "tuned.db"
    shutil.copy(alone, path)
    with Store.open(path) as store:
        before = store.measurements()
        store.add(each for row in before for each in KINDS[request.param](row))
        assert len(store.measurements()) > len(before)
    predicted(path, OTHER, 20)
    predicted(
        path, GPU, 20, [ELSEWHERE], FakeBuilder(lambda source: Built(digest="0" * 64, registers=96, nvrtc="13.5"))
    )
    return path


@pytest.fixture
def both(alone: Path, beside: Path, tmp_path: Path) -> list[Path]:
    """Copies of the test's own."""
    return [Path(shutil.copy(path, tmp_path / path.parent.name)) for path in (alone, beside)]


def verified(path: Path) -> list[tuple[Any, ...]]:
    with Store.open(path) as store:
        found = verify_claims(winners(path, GPU, 20, 0), means(store, FakeBench()))
    return sorted((str(each.stored.problem), each.stored.config.key, each.word, each.level) for each in found.rows)


def target(where: Problem) -> ProblemSearch:
    return ProblemSearch(where, [], only_sm80(where)[0].default(where.spec, GPU), {}, [], 0)


ASKED: dict[str, Callable[[Store, Problem], Any]] = {
    "known": lambda store, where: {
        config: row
        for config, row in known(store, where, GPU, unit="GPU-fake").items()
        if unusable(config, where, GPU) is None  # a run asks for no others
    },
    "known builds": lambda store, where: known_builds(store, where, GPU),
    "incumbent": lambda store, where: incumbent(store, where, GPU) if where in PROBLEMS else None,
    "had a final": lambda store, where: _had_final(where, store, GPU),
    "verdict": lambda store, where: verdict(where, target(where), store, GPU),
    "shared, measured": lambda store, where: shared_config(store, [where, PROBLEMS[0]], GPU, measured=True),
    "shared, predicted": lambda store, where: shared_config(store, [where, PROBLEMS[0]], GPU, measured=False),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_answers_are_the_same_with_them(name: str, alone: Path, beside: Path) -> None:
    """A hole in the tests: most of what asks for the rows of a GPU could ask for all."""
    answers = []
    for path in (alone, beside):
        with Store.open(path, readonly=True) as store:
            answers.append([ASKED[name](store, where) for where in (*PROBLEMS, ELSEWHERE)])
    assert answers[0] == answers[1]


def test_they_are_not_verified_and_witness_nothing(both: list[Path]) -> None:
    without, with_them = map(verified, both)
    assert with_them == without


def test_what_another_model_was_compared_with_is_not_what_this_one_was(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Today's default is a config that sessions of the other model alone have compared with."""
    today = dataclasses.replace(FAMILY.default(PROBLEMS[0].spec, GPU), num_stages=3)
    monkeypatch.setattr("flashtune.tuner.commands.verify.default_config", lambda where, gpu: today)
    with Store.open(tuned) as store:
        finals = [of_other(each, each.problem, agrees=True) for each in store.measurements(stage="final")]
        compared = [dataclasses.replace(each, config=today) if each.ratio == 1 else each for each in finals]
        assert compared != finals
        store.add(
            dataclasses.replace(each, source_digest=source_digest(each.problem.spec, each.config)) for each in compared
        )
    with pytest.raises(InvalidInput, match="nothing to verify"):
        winners(tuned, GPU, 20, 0)


def test_a_run_without_the_gpu_takes_no_facts_from_them(both: list[Path]) -> None:
    without, with_them = (predicted(path, GPU, 6) for path in both)
    assert with_them == without
