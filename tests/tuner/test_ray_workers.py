"""Workers on a Ray cluster, where ray is a fake: what Ray is asked for, what travels. No ray is needed.

Deaths, lost nodes and whatever else a real cluster shows are in test_ray_cluster.py.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_ray import THREE, FakeRay
from tuner_fakes import FAMILY, FakeBench, FakeBuilder, means, problem, request

from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.cluster import ray_actor, ray_cluster, ray_crew, ray_worker
from flashtune.tuner.cluster.ray_actor import Host, RayUnit
from flashtune.tuner.cluster.ray_crew import Crew
from flashtune.tuner.cluster.ray_worker import ended, launched
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.report import Report
from flashtune.tuner.search.space import make_space
from flashtune.tuner.tune import session
from flashtune.tuner.tune.measured_run import measure_problems
from flashtune.tuner.workers.process_worker import Attempt, Final, Prepare, Prepared, WorkerReady

pytestmark = pytest.mark.usefixtures("quick_ray")

PROBLEM = problem()
GPU = gpu_by_alias("h100")
CONFIGS = make_space(PROBLEM, GPU, FAMILY).configs


class Place:
    """Makes a bench for each unit, and keeps them all."""

    def __init__(self) -> None:
        self.benches: list[FakeBench] = []

    def __call__(self, number: int, gpu: Gpu, accelerator: str) -> FakeBench:
        assert (gpu, accelerator) == (GPU, "H100")
        self.benches.append(FakeBench(unit=f"ray:{number}", gpu=gpu))
        return self.benches[-1]


def tune(ray: FakeRay, place: Place, path: Path, seqlens: list[int], trials: int, most: int = 9) -> Report:
    crew = Crew(ray, GPU, most, unit=place, cargo=lambda unit, arch: lambda request: {})
    try:
        crew.start()
        with Store.open(path) as store:
            problems = [problem(each) for each in seqlens]
            return measure_problems(request(problems, trials), means(store, *crew.units, gpu=GPU, hire=crew.hire))
    finally:
        crew.close()
        assert not [each for node in ray.all for each in node.actors]
        assert not [each for each in threading.enumerate() if each.name.startswith("flashtune ray")]


def test_each_gpu_of_the_model_measures_and_ray_retries_nothing(tmp_path: Path) -> None:
    ray, place = FakeRay([*THREE, ("10.0.0.4", 8, "A100"), ("10.0.0.5", 0, "")]), Place()
    report = tune(ray, place, tmp_path / "db", [512, 1024, 2048], 30)
    assert report.tried == 30
    assert [len(each.attempts) for each in place.benches] == [10, 10, 10]
    assert all(row.ratio is not None for row in report.rows)
    options = {"num_gpus": 1, "num_cpus": 1, "accelerator_type": "H100", "max_restarts": 0, "max_task_retries": 0}
    assert ray.asked == [options | {"max_concurrency": 1}] * 3


def test_no_more_gpus_are_taken_than_there_are_problems_or_free_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay([("10.0.0.2", 8, "H100")])
    assert tune(ray, Place(), tmp_path / "db", [512, 1024], 8, most=2).tried == 8
    assert len(ray.asked) == 2
    ray.others = 5
    monkeypatch.setattr(ray_cluster, "SETTLE_SECONDS", 0.0)
    assert tune(ray, Place(), tmp_path / "db", [512, 1024, 2048, 4096], 16).tried == 16
    assert len(ray.asked) == 2 + 3


# What travels


def test_a_request_travels_with_all_that_it_launches_besides_what_is_there() -> None:
    from flashtune.tuner.bench.samples import samples

    unit, built = FakeBench(), Built(digest="a" * 64)
    for config in CONFIGS[:4]:
        (source,) = launched(Attempt(PROBLEM, config, built, None), unit)
        (kernel,) = FAMILY.plan(PROBLEM, config, GPU).kernels
        assert source.digest == kernel.source.digest
        for sample in samples(PROBLEM.spec):
            assert FAMILY.plan(sample.problem, config, GPU).kernels[0].source.digest == source.digest
    assert len(launched(Final(PROBLEM, tuple(CONFIGS[:4]), 0.5), unit)) == 4
    assert not launched(Attempt(PROBLEM, CONFIGS[0], dataclasses.replace(built, error="no"), None), unit)


def test_what_a_preparation_brought_stays_and_the_rest_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[set[str]] = []
    monkeypatch.setattr(ray_actor, "serve_only", lambda cubins: served.append(set(cubins)))
    bench = FakeBench()
    host = Host(bench, ray_crew.own_version())
    assert host.open().said == WorkerReady(bench.evidence)
    cubin: Any = object()
    assert host.answer(Prepare(PROBLEM), {"reference": cubin}) == Prepared("")
    attempt = Attempt(PROBLEM, CONFIGS[0], Built(digest="a" * 64), None)
    for name in ("one", "two"):
        host.answer(attempt, {name: cubin})
    assert served == [{"reference"}, {"reference", "one"}, {"reference", "two"}]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: Host\n\tip: 10.0.0.3\nThe actor is "
            "dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
            "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ...",
            "ended: its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
            "unexpectedly exits with a connection error code 2. End of file",
        ),
        ("The actor 1d47 is unavailable: RpcError: Socket closed.", "ended: unavailable: RpcError: Socket closed"),
        ("", "ended: ValueError"),
    ],
)
def test_a_death_is_told_in_a_line(text: str, line: str) -> None:
    assert ended(ValueError(text)) == line


# The whole way


def test_tune_measures_on_the_cluster_and_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray, bench = FakeRay(THREE, connected=False), FakeBench()
    sent: list[str] = []

    def compiled(source: Any, arch: str) -> Compiled:
        sent.append(source.digest)
        return Compiled(b"cubin", arch, "13.5", 96, 0, 0, 0, 0.1, "")

    monkeypatch.setattr(ray_crew, "import_ray", lambda: ray)
    monkeypatch.setattr(ray_worker, "compiled", compiled)
    monkeypatch.setattr(RayUnit, "open", lambda self: bench)
    monkeypatch.setattr(RayUnit, "sources", lambda self, problem: [])
    monkeypatch.setattr(session, "ProcessBuilder", lambda arch, workers: FakeBuilder())
    path = tmp_path / "db"
    report = session.tune([PROBLEM], "h100", budget="6", database=path, ray="auto", families=["sm80_fwd"])
    assert report.measured
    assert report.tried == 6
    assert ray.calls == ["auto", "shutdown"]
    with Store.open(path, readonly=True) as store:
        rows = store.measurements()
    assert {each.unit for each in rows} == {"GPU-fake"}
    assert {each.nvrtc for each in rows} == {"13.5"}
    assert set(sent) == {each.source_digest for each in rows}
    ray.connected = True  # by the program that calls
    session.tune([PROBLEM], "h100", budget="2", database=path, ray="auto", families=["sm80_fwd"])
    assert ray.calls == ["auto", "shutdown"]
