"""Predicted runs: what is compiled and stored where no GPU is at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuner_fakes import FAMILY, GPU, FakeBuilder, means, problem, request, run

from flashtune.cli.common.tables import console, print_report
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.families.model import SPILL_MARGIN
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.budget import Budget
from flashtune.tuner.results.report import Report
from flashtune.tuner.search.space import make_space
from flashtune.tuner.tune.predicted_run import COMPILED_CONFIGS, predict_problems
from flashtune.tuner.tune.session import tune

PROBLEM = problem()


def predict_into(path: Path, problems: list[Problem], budget: Budget, builder: FakeBuilder | None = None) -> Report:
    with Store.open(path) as store:
        asked = request(problems, budget=budget)
        return predict_problems(asked, means(store, builder=builder or FakeBuilder()), "not here")


def test_predictions_are_ranked_and_nothing_is_called_measured(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    report = predict_into(path, [PROBLEM], Budget(trials=8))
    with Store.open(path, readonly=True) as store:
        found = store.predictions(problem=PROBLEM, gpu_key=GPU.key)
        assert store.measurements() == []
    assert [each.rank for each in found] == list(range(1, 9))
    assert [each.predicted_us for each in found] == sorted(each.predicted_us for each in found)
    assert FAMILY.default(PROBLEM.spec, GPU) in [each.config for each in found]
    assert not report.measured
    assert report.note == "not here"
    assert report.rows[0].config == found[0].config
    assert report.rows[0].tried == 8


@pytest.mark.parametrize(("gpu", "wary"), [("h100", False), ("a100", True)])
def test_spills_weigh_more_where_the_model_was_not_fitted(tmp_path: Path, gpu: str, wary: bool) -> None:
    """Every second source spills a little: on an A100 those without come first where times are near."""
    chip = gpu_by_alias(gpu)
    seen: list[str] = []

    def facts(source: Source) -> Built:
        if source.digest not in seen:
            seen.append(source.digest)
        return Built(digest=source.digest, registers=128, spill_bytes=4 * (seen.index(source.digest) % 2))

    with Store.open(tmp_path / "tuned.db") as store:
        predict_problems(request([PROBLEM], 12), means(store, gpu=chip, builder=FakeBuilder(facts)), "")
        found = store.predictions(problem=PROBLEM, gpu_key=chip.key)
    assert {bool(each.spill_bytes) for each in found} == {False, True}
    times = [each.predicted_us for each in found]
    weighed = [each.predicted_us * (SPILL_MARGIN if each.spill_bytes else 1) for each in found]
    assert (weighed if wary else times) == sorted(weighed if wary else times)


def test_problems_of_one_spec_share_compiles(tmp_path: Path) -> None:
    builder = FakeBuilder()
    report = predict_into(tmp_path / "tuned.db", [problem(512), problem(4096)], Budget(trials=6), builder)
    assert len(builder.submitted) == 6
    assert set(builder.submitted.values()) == {1}
    assert all(row.config is not None for row in report.rows)


def test_specs_take_turns(tmp_path: Path) -> None:
    problems = [problem(), problem(causal=True), problem(head_dim=128)]
    report = predict_into(tmp_path / "tuned.db", problems, Budget(trials=9))
    assert [row.tried for row in report.rows] == [3, 3, 3]


def test_no_more_is_compiled_than_is_worth_it(tmp_path: Path) -> None:
    builder = FakeBuilder()
    predict_into(tmp_path / "tuned.db", [PROBLEM], Budget(trials=10_000), builder)
    assert len(builder.submitted) == COMPILED_CONFIGS


@pytest.mark.parametrize(
    ("built", "status"),
    [
        (Built(digest="0" * 64, error="NVRTC refused it"), "compile_error"),
        (Built(digest="0" * 64, registers=255, spill_bytes=4000), "spills"),
        (Built(digest="0" * 64, registers=96, static_shared_bytes=10**6), "spills"),
    ],
    ids=["refused", "spilled", "too-much-shared-memory"],
)
def test_what_the_compiler_rules_out_is_counted_and_not_predicted(tmp_path: Path, built: Built, status: str) -> None:
    path = tmp_path / "tuned.db"
    report = predict_into(path, [PROBLEM], Budget(trials=4), FakeBuilder(lambda source: built))
    assert report.failed == {status: 4}
    assert report.rows[0].config is None
    with Store.open(path, readonly=True) as store:
        assert store.predictions() == []


def test_ctrl_c_stores_a_ranking_of_what_was_compiled(tmp_path: Path) -> None:
    def facts(source: Source) -> Built:
        if len(builder.submitted) == 4:
            raise KeyboardInterrupt
        return Built(digest=source.digest, registers=96)

    builder = FakeBuilder(facts)
    path = tmp_path / "tuned.db"
    report = predict_into(path, [PROBLEM], Budget(trials=20), builder)
    assert report.interrupted
    assert report.rows[0].config is not None
    with Store.open(path, readonly=True) as store:
        assert 0 < len(store.predictions(problem=PROBLEM)) < 4


def test_a_shorter_run_loses_nothing_that_an_earlier_one_found(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    first = predict_into(path, [PROBLEM], Budget(trials=8))
    second = predict_into(path, [PROBLEM], Budget(trials=2))
    with Store.open(path, readonly=True) as store:
        assert [each.rank for each in store.predictions(problem=PROBLEM)] == list(range(1, 9))
    assert second.rows[0].config == first.rows[0].config
    assert (second.rows[0].tried, second.rows[0].known) == (2, 6)


def test_predictions_of_another_source_are_not_carried_over(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    predict_into(path, [PROBLEM], Budget(trials=8), FakeBuilder(lambda _: Built(digest="0" * 64, registers=96)))
    predict_into(path, [PROBLEM], Budget(trials=2))
    with Store.open(path, readonly=True) as store:
        assert len(store.predictions(problem=PROBLEM)) == 2


def test_registers_of_the_compiler_change_the_ranking(tmp_path: Path) -> None:
    """All configs get so many registers that fewer blocks fit: predicted times can only grow."""
    few = predict_into(tmp_path / "a.db", [problem(8192)], Budget(trials=8))
    many = predict_into(
        tmp_path / "b.db",
        [problem(8192)],
        Budget(trials=8),
        FakeBuilder(lambda source: Built(digest=source.digest, registers=250)),
    )
    assert few.rows[0].seconds is not None
    assert many.rows[0].seconds is not None
    assert many.rows[0].seconds > few.rows[0].seconds


@pytest.mark.nvrtc
def test_one_small_problem_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "tuned.db"
    small = problem(256, head_dim=32)
    texts: list[str] = []
    report = tune(
        [small], "a100", mode="predict", database=path, budget="3", families=["sm80_fwd"],
        progress=lambda each: texts.append(each.text),
    )  # fmt: skip
    assert not report.measured
    with Store.open(path, readonly=True) as store:
        found = store.predictions(problem=small)
    assert len(found) + sum(report.failed.values()) == 3
    assert report.rows[0].config == found[0].config
    assert all(each.nvrtc and each.registers for each in found)
    assert sum("compiled" in text for text in texts) == 3
    assert len(list((tmp_path / "cache" / "cubins").glob("*.cubin"))) == 3


def test_a_budget_that_listing_used_up_still_compiles_the_defaults(tmp_path: Path) -> None:
    problems = [problem(), problem(causal=True), problem(head_dim=128)]
    ticks = iter(range(0, 10**9, 10))
    with Store.open(tmp_path / "tuned.db") as store:
        clock = means(store, clock=lambda: float(next(ticks)))
        report = predict_problems(request(problems, budget=Budget(seconds=5)), clock, "")
        assert len(store.predictions()) == 3
    assert [row.config is not None and row.tried for row in report.rows] == [1, 1, 1]


def test_without_a_compile_the_models_best_is_reported_and_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.db"
    report = predict_into(path, [problem(), problem(causal=True)], Budget(trials=1))
    bare = report.rows[1]
    assert bare.config is not None
    assert bare.tried == 0
    assert "model alone" in bare.why
    with Store.open(path, readonly=True) as store:
        assert len(store.predictions()) == 1
    print_report(console(), replace(report, rows=(bare,), distinct_tried=0), "tuned.db")
    output = capsys.readouterr().out
    assert "stored as predictions" not in output
    assert "Nothing was stored" in output


def test_what_problems_share_is_counted_once(tmp_path: Path) -> None:
    one = predict_into(tmp_path / "one.db", [problem(512)], Budget(trials=6))
    two = predict_into(tmp_path / "two.db", [problem(512), problem(4096)], Budget(trials=6))
    again = predict_into(tmp_path / "two.db", [problem(512), problem(4096)], Budget(trials=2))
    assert (one.tried, two.tried) == (6, 6)
    assert one.rejected == two.rejected
    assert (again.tried, again.known) == (2, 4)


def test_configs_that_are_not_legal_count_once_for_a_spec_in_measured_runs_too(tmp_path: Path) -> None:
    other = problem(causal=True)
    problems = [problem(512), PROBLEM, problem(4096), other]
    expected = make_space(PROBLEM, GPU, FAMILY).rejected + make_space(other, GPU, FAMILY).rejected
    assert sum(expected.values()) > 0
    assert predict_into(tmp_path / "predicted.db", problems, Budget(trials=1)).rejected == expected
    assert run(tmp_path / "measured.db", problems, 4).rejected == expected
