"""The tuner on a real device: sound configs pass, sabotaged kernels don't, timing repeats."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from tuner_problem import problem

from flashtune.codegen import launch
from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.families.registry import family, source_for
from flashtune.codegen.gpu.devices import require_device, unit_uuid
from flashtune.codegen.plan.config import Config
from flashtune.codegen.plan.plan import Plan
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.bench import device_bench as bench_module
from flashtune.tuner.bench.device_bench import DeviceBench
from flashtune.tuner.bench.exact import last_part
from flashtune.tuner.processes.capacity import cores
from flashtune.tuner.processes.compile_pool import Built, ProcessBuilder, build
from flashtune.tuner.results.budget import Budget
from flashtune.tuner.run import coordinator
from flashtune.tuner.run.run import Means
from flashtune.tuner.search.space import make_space
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.tune.measured_run import measure_problems
from flashtune.tuner.tune.request import TuneRequest
from flashtune.tuner.tune.session import tune

sys.path.append(str(Path(__file__).parent))  # for worker processes, which inherit it

from sabotaged import SabotagedUnit

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench() -> DeviceBench:
    return DeviceBench(0, require_device())


def attempt(bench: DeviceBench, problem: Problem, config: Config) -> Outcome:
    assert bench.prepare(problem) is None
    return bench.attempt(problem, config, build(source_for(problem, config), bench.gpu.arch), None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fma_fwd", "sm80_fwd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_default_config_is_correct_and_timed(bench: DeviceBench, name: str, dtype: str, causal: bool) -> None:
    kind = family(name)
    asked = problem(dtype, causal=causal)
    if reason := kind.unsupported(asked.spec, bench.gpu):
        pytest.skip(reason)
    outcome = attempt(bench, asked, kind.default(asked.spec, bench.gpu))
    assert outcome.status == "ok", outcome.message
    assert outcome.stage == "measure"
    assert outcome.timing is not None
    assert 1e-6 < outcome.timing.median < 1e-2
    assert outcome.max_error is not None


def test_an_unaligned_problem_is_tuned_too(bench: DeviceBench) -> None:
    asked = dataclasses.replace(problem(), alignment=2)
    outcome = attempt(bench, asked, family("fma_fwd").default(asked.spec, bench.gpu))
    assert outcome.status == "ok", outcome.message


@pytest.mark.parametrize("seqlen", [32768], ids=lambda value: f"{value}-rows")
def test_a_problem_of_which_only_the_last_rows_are_compared(bench: DeviceBench, seqlen: int) -> None:
    asked = problem(causal=True, seqlen_q=seqlen, seqlen_k=seqlen, batch=1, num_heads=4)
    assert last_part(asked).seqlen_q < seqlen
    preferred = family("sm80_fwd")
    if reason := preferred.unsupported(asked.spec, bench.gpu):
        pytest.skip(reason)
    outcome = attempt(bench, asked, preferred.default(asked.spec, bench.gpu))
    assert outcome.status == "ok", outcome.message


SABOTAGE = {
    "even-rows-only": ("if (query >= params.seqlen_q) {", "if (query >= params.seqlen_q || query % 2) {"),
    "zeros": ("out_rmem[row][dim + part] / sum", "Accum(0)"),
    "scaled": ("out_rmem[row][dim + part] / sum", "out_rmem[row][dim + part] * 0.98f / sum"),
    "late-batch": ("const i64 batch = tile.batch;", "const i64 batch = 0;"),
    "no-lse": ("params.lse != nullptr && thread_n == 0", "false"),
    "out-of-bounds": ("if (query >= params.seqlen_q) {", "if (query >= params.seqlen_q + 1) {"),
}  # fmt: skip


@pytest.mark.parametrize("what", SABOTAGE)
def test_a_wrong_kernel_is_rejected_behind_a_right_one(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    asked = problem()
    kind = family("fma_fwd")
    config = kind.default(asked.spec, bench.gpu)
    assert attempt(bench, asked, config).status == "ok"
    old, new = SABOTAGE[what]
    real = launch.load

    def load(plan: Plan, device: int) -> Any:
        kernels = []
        for each in plan.kernels:
            assert old in each.source.text
            kernels.append(
                dataclasses.replace(
                    each, source=dataclasses.replace(each.source, text=each.source.text.replace(old, new))
                )
            )
        return real(dataclasses.replace(plan, kernels=tuple(kernels)), device)

    monkeypatch.setattr(bench_module, "load", load)
    outcome = bench.attempt(asked, config, Built(digest="0" * 63 + str(len(what) % 10) + what, registers=64), None)
    assert outcome.status == "wrong", outcome
    assert outcome.timing is None


def test_one_config_under_two_names_is_timed_alike(bench: DeviceBench) -> None:
    asked = problem(seqlen_q=2048, seqlen_k=2048)
    kind = family("sm80_fwd")
    if reason := kind.unsupported(asked.spec, bench.gpu):
        pytest.skip(reason)
    config = kind.default(asked.spec, bench.gpu)
    times = [attempt(bench, asked, config).seconds for _ in range(5)]
    assert None not in times
    found = sorted(each for each in times if each is not None)
    assert found[-1] / found[0] < 1.05


def test_a_much_slower_config_is_only_screened(bench: DeviceBench) -> None:
    asked = problem()
    config = family("fma_fwd").default(asked.spec, bench.gpu)
    assert bench.prepare(asked) is None
    outcome = bench.attempt(asked, config, build(source_for(asked, config), bench.gpu.arch), 1e-6)
    assert outcome.stage == "screen"
    assert outcome.timing is not None
    assert outcome.timing.count <= 3


def test_too_large_a_problem_is_refused_with_its_need(bench: DeviceBench) -> None:
    reason = bench.prepare(problem(batch=2**14, seqlen_q=2**14, seqlen_k=2**14))
    assert reason is not None
    assert "GB" in reason


def test_a_short_run_measures_stores_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    problems = [problem(), problem(causal=True)]
    first = tune(problems, mode="measure", database=path, budget="8")
    second = tune(problems, mode="measure", database=path, budget="8")
    assert first.measured
    assert second.measured
    assert first.tried == second.tried == 8
    assert [row.known for row in second.rows] == [4, 4]
    with Store.open(path, readonly=True) as store:
        tried = [(each.problem, each.config) for each in store.measurements() if each.stage != "final"]
    assert len(set(tried)) == len(tried) == 16
    for row in second.rows:
        assert row.config is not None
        assert row.ratio is not None
        assert row.ratio <= 1
        assert compiled(source_for(row.problem, row.config), require_device().arch).cubin


def test_candidates_that_crash_or_hang_cost_their_workers_and_nothing_else(
    bench: DeviceBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "ATTEMPT_SECONDS", 20.0)
    path, asked, kind = tmp_path / "tuned.db", problem(), family("fma_fwd")
    configs = [
        each for each in make_space(asked, bench.gpu, kind).configs if each != kind.default(asked.spec, bench.gpu)
    ]
    crashing, hanging = configs[1], configs[3]
    unit = SabotagedUnit(0, bench.gpu, unit_uuid(0), False, ((crashing.key, "illegal access"), (hanging.key, "hang")))
    builder = ProcessBuilder(bench.gpu.arch, cores())
    try:
        with Store.open(path) as store:
            report = measure_problems(
                TuneRequest(problems=[asked], budget=Budget(trials=10), families=lambda _: [kind]),
                Means(gpu=bench.gpu, units=[unit], store=store, builder=builder),
            )
    finally:
        builder.close()
    assert not report.stopped
    assert report.tried == 10
    assert report.failed == {"illegal_access": 1, "timeout": 1}
    with Store.open(path, readonly=True) as store:
        ((crashed,), (hung,)) = (store.measurements(status=each) for each in ("illegal_access", "timeout"))
    assert crashed.config == crashing
    assert "illegal memory access" in crashed.message
    assert hung.config == hanging
    assert report.rows[0].ratio is not None
    assert attempt(bench, asked, kind.default(asked.spec, bench.gpu)).status == "ok", "the device is not free"
