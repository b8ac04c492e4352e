"""A run on a local Ray cluster of several nodes, whose GPUs are none; nodes and workers die in the middle of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeUnit, LaunchingUnit
from tuner_fakes import FAMILY, FakeBuilder, only_sm80, problem

from flashtune.codegen.compile import Compiled
from flashtune.codegen.gpu import Gpu, gpu_by_alias
from flashtune.errors import NoGpu
from flashtune.tuned_db.records import Measurement
from flashtune.tuned_db.store import Store
from flashtune.tuner.budget import parse_budget
from flashtune.tuner.build import Builder, ProcessBuilder
from flashtune.tuner.measured import measure_problems
from flashtune.tuner.ray_cluster import connect, free_gpus, live_nodes
from flashtune.tuner.ray_crew import Crew
from flashtune.tuner.records import SETTLED
from flashtune.tuner.report import Report
from flashtune.tuner.space import make_space
from flashtune.tuner.worker import Request, Unit

ray: Any = pytest.importorskip("ray", reason='needs the extra ray: pip install -e ".[ray]"')
cluster_utils: Any = pytest.importorskip("ray.cluster_utils", reason="needs the extra ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

HERE = Path(__file__).parent
GPU = gpu_by_alias("h100")
CONFIGS = make_space(problem(), GPU, FAMILY).configs
"""In the model's order, which is the order of the first trials behind the default."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without a GPU; this process is connected to it."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[1] / 'src'}:{HERE}")  # nodes inherit it, and their workers
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        assert connect(ray, found.address)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def add_gpu(cluster: Any, name: str = "H100") -> Any:
    return cluster.add_node(num_cpus=1, num_gpus=1, resources={f"accelerator_type:{name}": 1})


def no_cargo(unit: Unit, arch: str) -> Callable[[Request], Mapping[str, Compiled]]:
    """For fakes, which launch nothing."""
    return lambda request: {}


def crew(log: Path, most: int, deeds: dict[str, str] | None = None, seconds: float = 0.0) -> Crew:
    def unit(number: int, gpu: Gpu, accelerator: str) -> Unit:
        return FakeUnit(f"ray:{number}", log, deeds or {}, seconds)

    return Crew(ray, GPU, most, unit=unit, cargo=no_cargo)


def tune(
    path: Path,
    hired: Crew,
    seqlens: list[int],
    budget: str,
    started: Callable[[], object] = lambda: None,
    builder: Builder | None = None,
) -> Report:
    """Calls ``started`` between the first actors and the first measurement."""
    problems = [problem(each) for each in seqlens]
    try:
        hired.start()
        started()
        with Store.open(path) as store:
            return measure_problems(
                problems, GPU, store, hired.units, builder or FakeBuilder(), parse_budget(budget), 0, only_sm80,
                lambda progress: None, hire=hired.hire,
            )  # fmt: skip
    finally:
        hired.close()


def stored(path: Path) -> list[Measurement]:
    with Store.open(path, readonly=True) as store:
        return store.measurements()


def assert_each_once(path: Path, log: Path, trials: int) -> None:
    """Each measurement that was finished is stored, but for the one that a dead worker took along; none twice."""
    rows = Counter((each.problem.key, str(each.config)) for each in stored(path) if each.stage != "final")
    assert {each.status for each in stored(path)} <= set(SETTLED)
    assert set(rows.values()) == {1}
    assert rows.total() == trials
    done = {(each.problem, each.config) for each in FakeUnit("", log).lines("done")}
    assert done <= set(rows)


def test_a_node_that_is_lost_in_the_middle_costs_nothing_but_its_place(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [add_gpu(cluster) for _ in range(3)]
    log = tmp_path / "log"
    hired = crew(log, 3, seconds=0.02)
    lost: list[float] = []

    def lose() -> None:
        while len(FakeUnit("", log).lines("done")) < 30:
            time.sleep(0.02)
        lost.append(time.monotonic())
        cluster.remove_node(nodes[0], allow_graceful=False)

    loser = threading.Thread(target=lose)
    loser.start()
    report = tune(tmp_path / "db", hired, [512, 1024, 2048, 4096, 8192], "200")
    loser.join()
    lines = FakeUnit("", log).lines()
    assert len(hired.units) == 3
    assert {each.unit for each in lines if each.time < lost[0]} == {"ray:0", "ray:1", "ray:2"}
    assert len({each.pid for each in lines if each.what == "attempt" and each.time > lost[0] + 2}) == 2
    assert not report.stopped
    assert report.tried == 200
    assert all(row.tried == 40 and row.ratio is not None for row in report.rows)
    assert "was given up" in report.note
    assert "of those that the run began with 2 are left" in report.note
    assert_each_once(tmp_path / "db", log, 200)


def test_where_another_gpu_is_free_the_lost_worker_is_replaced_there(cluster: Any, tmp_path: Path) -> None:
    first = add_gpu(cluster)
    log = tmp_path / "log"
    hired = crew(log, 1, seconds=0.02)

    def lose() -> None:
        while len(FakeUnit("", log).lines("done")) < 5:
            time.sleep(0.02)
        cluster.remove_node(first, allow_graceful=False)

    loser = threading.Thread(target=lose)
    loser.start()
    report = tune(tmp_path / "db", hired, [1024], "200", lambda: add_gpu(cluster))
    loser.join()
    assert not report.stopped
    assert not report.note
    assert report.tried == 200
    assert len({each.pid for each in FakeUnit("", log).lines("attempt")}) == 2
    assert_each_once(tmp_path / "db", log, 200)


def test_candidates_that_kill_or_hang_cost_their_worker_alone(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashtune.tuner.coordinator.ATTEMPT_SECONDS", 5.0)
    add_gpu(cluster)
    log = tmp_path / "log"
    bad = dict(zip(CONFIGS[1:5], ("exit", "kill", "lose", "hang"), strict=True))
    deeds = {config.key: deed for config, deed in bad.items()} | {CONFIGS[6].key: "once kill", "final": "once exit"}
    report = tune(tmp_path / "db", crew(log, 1, deeds), [1024], "20")
    assert not report.stopped
    assert report.failed == {"illegal_access": 3, "timeout": 1}
    attempts = Counter(each.config for each in FakeUnit("", log).lines("attempt"))
    assert [attempts[str(each)] for each in bad] == [2, 2, 2, 1]
    said = {each.config: each.message for each in stored(tmp_path / "db") if each.status == "illegal_access"}
    assert "ended: its worker process has died" in said[CONFIGS[1]]
    assert "\n" not in said[CONFIGS[1]]
    assert "illegal memory access" in said[CONFIGS[3]]
    assert report.rows[0].ratio is not None
    assert_each_once(tmp_path / "db", log, 20)


@pytest.mark.nvrtc
def test_cubins_travel_to_workers_that_compile_nothing(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy", reason="needs NVRTC", exc_type=ImportError)
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    add_gpu(cluster)
    log = tmp_path / "log"
    hired = Crew(ray, GPU, 1, unit=lambda number, gpu, accelerator: LaunchingUnit("ray:0", log))
    builder = ProcessBuilder(GPU.arch, 2)
    try:
        report = tune(tmp_path / "db", hired, [1024], "4", builder=builder)
    finally:
        builder.close()
    assert not report.failed
    assert len(FakeUnit("", log).lines("cubin")) == 4
    assert all(each.nvrtc for each in stored(tmp_path / "db"))
    FakeUnit("", log).log.unlink()
    bare = Crew(ray, GPU, 1, unit=lambda number, gpu, accelerator: LaunchingUnit("ray:0", log), cargo=no_cargo)
    report = tune(tmp_path / "other.db", bare, [1024], "2", builder=FakeBuilder())
    assert report.failed == {"failed": 2}
    assert "was not sent" in stored(tmp_path / "other.db")[0].message


def test_gpus_are_counted_by_model_and_one_that_is_another_is_refused(cluster: Any, tmp_path: Path) -> None:
    add_gpu(cluster, "A100")
    with pytest.raises(NoGpu, match=r"offers no h100-sxm: it has no H100\. Its GPUs, by node: 1 A100$"):
        free_gpus(ray, GPU, 1)
    add_gpu(cluster)
    assert free_gpus(ray, GPU, 2) == free_gpus(ray, gpu_by_alias("a100"), 2) == 1
    assert sorted(labels for labels, _, _ in live_nodes(ray)) == [[], ["A100"], ["H100"]]
    hired = Crew(ray, GPU, 1)  # the unit is a real one, and there is no GPU
    try:
        with pytest.raises(NoGpu, match=r"the worker on \S+ can't measure for h100-sxm: (No CUDA|Using a GPU)"):
            hired.start()
    finally:
        hired.close()
