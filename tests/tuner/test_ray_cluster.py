"""A run on a local Ray cluster of several nodes, whose GPUs are none; nodes and workers die in the middle of it."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_worker import FakeUnit, LaunchingUnit
from tuner_fakes import FAMILY, FakeBuilder, means, problem, request

from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import NoGpu
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.cluster import ray_crew
from flashtune.tuner.cluster.ray_cluster import connect, free_gpus, live_nodes
from flashtune.tuner.cluster.ray_crew import Crew
from flashtune.tuner.processes.compile_pool import Builder, ProcessBuilder
from flashtune.tuner.results.budget import parse_budget
from flashtune.tuner.results.report import Progress, Report
from flashtune.tuner.results.rows import SETTLED
from flashtune.tuner.search.space import make_space
from flashtune.tuner.tune.measured_run import measure_problems
from flashtune.tuner.workers.process_worker import Attempt, Request, Unit

ray: Any = pytest.importorskip("ray", reason='needs the extra ray: pip install -e ".[ray]"')
cluster_utils: Any = pytest.importorskip("ray.cluster_utils", reason="needs the extra ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

HERE = Path(__file__).parent
GPU = gpu_by_alias("h100")
CONFIGS = make_space(problem(), GPU, FAMILY).configs
"""In the model's order, which is the order of the first trials behind the default."""


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without a GPU; this process is connected to it. A node that is gone is known to be after some 2 s."""
    # The path of a socket has 107 bytes at most, and /tmp/ray may be another user's.
    short = tempfile.mkdtemp(prefix="r")
    monkeypatch.setenv("RAY_TMPDIR", short)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for each in (HERE, HERE.parents[1] / "src"):  # nodes inherit it, and their workers
        monkeypatch.setenv("PYTHONPATH", str(each), prepend=os.pathsep)
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": {"health_check_period_ms": 400}}
    found = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        assert connect(ray, found.address)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()
        shutil.rmtree(short, ignore_errors=True)


def add_gpu(ray_cluster: Any, name: str = "H100") -> Any:
    return ray_cluster.add_node(num_cpus=1, num_gpus=1, resources={f"accelerator_type:{name}": 1})


Cargo = Callable[[Unit, str], Callable[[Request], Mapping[str, Compiled]]]


class Unreadable:
    """What can be sent and not be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def no_cargo(unit: Unit, arch: str) -> Callable[[Request], Mapping[str, Compiled]]:
    """For fakes, which launch nothing."""
    return lambda request: {}


def crew(
    log: Path, most: int, deeds: dict[str, str] | None = None, seconds: float = 0.0, cargo: Cargo = no_cargo
) -> Crew:
    def unit(number: int, gpu: Gpu, accelerator: str) -> Unit:
        return FakeUnit(f"ray:{number}", log, deeds or {}, seconds)

    return Crew(ray, GPU, most, unit=unit, cargo=cargo)


def tune(
    path: Path,
    hired: Crew,
    seqlens: list[int],
    budget: str,
    started: Callable[[], object] = lambda: None,
    builder: Builder | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Report:
    """Calls ``started`` between the first actors and the first measurement."""
    problems = [problem(each) for each in seqlens]
    try:
        hired.start()
        started()
        with Store.open(path) as store:
            return measure_problems(
                request(problems, budget=parse_budget(budget)),
                means(
                    store, *hired.units, gpu=GPU, builder=builder or FakeBuilder(), hire=hired.hire, progress=progress
                ),
            )
    finally:
        hired.close()


def stored(path: Path) -> list[Measurement]:
    with Store.open(path, readonly=True) as store:
        return store.measurements()


def assert_each_once(path: Path, log: Path, trials: int, lost: int = 0) -> None:
    """Each measurement that was finished is stored, none twice; but for those that the last worker took along."""
    rows = Counter((each.problem.key, str(each.config)) for each in stored(path) if each.stage != "final")
    assert {each.status for each in stored(path)} <= set(SETTLED)
    assert set(rows.values()) == {1}
    assert rows.total() == trials
    done = {(each.problem, each.config) for each in FakeUnit("", log).lines("done")}
    assert len(done - set(rows)) <= lost


def test_a_node_that_is_lost_in_the_middle_costs_nothing_but_its_place(ray_cluster: Any, tmp_path: Path) -> None:
    """Two problems each: those of the lost node go on on the two that are left, one on each.

    Ray takes seconds to see that a node is gone, in which the others would have come to their ends. Their finals wait.
    """
    nodes = [add_gpu(ray_cluster) for _ in range(3)]
    log = tmp_path / "log"
    hired = crew(log, 3, {"final": "wait"}, seconds=0.02)
    watched = FakeUnit("", log)

    def lose() -> None:
        while len({(each.unit, each.problem) for each in watched.lines("done")}) < 6:
            time.sleep(0.02)
        ray_cluster.remove_node(nodes[0], allow_graceful=False)

    def tell(said: Progress) -> None:
        if "was given up" in said.text:
            watched.may_go.touch()

    loser = threading.Thread(target=lose)
    loser.start()
    report = tune(tmp_path / "db", hired, [512, 1024, 1536, 2048, 4096, 8192], "240", progress=tell)
    loser.join()
    assert len(hired.units) == 3
    at_work = watched.lines("attempt", "final")
    units = {each.problem: {line.unit for line in at_work if line.problem == each.problem} for each in at_work}
    moved = [each for each in units.values() if len(each) > 1]
    assert (len(units), len(moved)) == (6, 2)
    assert len(moved[0] & moved[1]) == 1
    assert moved[0] | moved[1] == {"ray:0", "ray:1", "ray:2"}
    assert len({each.pid for each in watched.lines("start")}) == 3, "there is no GPU for another worker"
    assert not report.stopped
    assert report.tried == 240
    assert all(row.tried == 40 and row.ratio is not None for row in report.rows)
    assert "was given up" in report.note
    assert "of those that the run began with 2 are left" in report.note
    assert_each_once(tmp_path / "db", log, 240)


def test_a_lost_worker_is_replaced_where_a_gpu_is_free_and_the_last_one_ends_the_run(
    ray_cluster: Any, tmp_path: Path
) -> None:
    nodes = [add_gpu(ray_cluster)]
    log = tmp_path / "log"
    watched = FakeUnit("", log)

    def lose() -> None:
        for number in (1, 2):
            while min(Counter(each.pid for each in watched.lines("done")).values(), default=0) < 5 or (
                len({each.pid for each in watched.lines("done")}) < number
            ):
                time.sleep(0.02)
            ray_cluster.remove_node(nodes[number - 1], allow_graceful=False)

    loser = threading.Thread(target=lose)
    loser.start()
    hired = crew(log, 1, seconds=0.02)
    report = tune(tmp_path / "db", hired, [1024], "30m", lambda: nodes.append(add_gpu(ray_cluster)))
    loser.join()
    assert "of those that the run began with 0 are left" in report.stopped
    assert not report.note
    assert len({each.pid for each in watched.lines("start")}) == 2
    assert_each_once(tmp_path / "db", log, report.tried, lost=1)


def test_candidates_that_kill_or_hang_cost_their_worker_alone(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashtune.tuner.run.coordinator.ATTEMPT_SECONDS", 5.0)
    add_gpu(ray_cluster)
    log = tmp_path / "log"
    bad = dict(zip(CONFIGS[1:5], ("exit", "kill", "lose", "hang"), strict=True))
    deeds = {config.key: deed for config, deed in bad.items()} | {CONFIGS[6].key: "once kill", "final": "once exit"}
    unreadable: list[Any] = [Unreadable()]

    def cargo(unit: Unit, arch: str) -> Callable[[Request], Mapping[str, Any]]:
        """With the first candidate comes what the actor can't read: Ray calls nothing, and it lives."""
        return lambda request: {"a": unreadable.pop()} if unreadable and isinstance(request, Attempt) else {}

    report = tune(tmp_path / "db", crew(log, 1, deeds, cargo=cargo), [1024], "20")
    assert not unreadable
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
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    add_gpu(ray_cluster)
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


def test_gpus_are_counted_by_model_and_one_that_is_another_is_refused(ray_cluster: Any, tmp_path: Path) -> None:
    add_gpu(ray_cluster, "A100")
    with pytest.raises(NoGpu, match=r"offers no h100-sxm: it has no H100\. Its GPUs, by node: 1 A100$"):
        free_gpus(ray, GPU, 1)
    add_gpu(ray_cluster)
    assert free_gpus(ray, GPU, 2) == free_gpus(ray, gpu_by_alias("a100"), 2) == 1
    assert sorted(labels for labels, _, _ in live_nodes(ray)) == [[], ["A100"], ["H100"]]
    refused(Crew(ray, GPU, 1), r"the worker on \S+ can't measure for h100-sxm: (No CUDA|Using a GPU)")  # a real unit


def test_a_worker_that_finds_no_place_is_told(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_crew, "START_SECONDS", 1.0)
    ray_cluster.add_node(num_cpus=0, num_gpus=1, resources={"accelerator_type:H100": 1})
    refused(
        crew(tmp_path / "log", 1), r"found no place for a worker within 1 s\. Each needs .*a free CPU.* `ray status`"
    )


def refused(hired: Crew, message: str) -> None:
    try:
        with pytest.raises(NoGpu, match=message):
            hired.start()
    finally:
        hired.close()
