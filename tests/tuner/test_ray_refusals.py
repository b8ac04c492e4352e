"""What is refused on a Ray cluster before anything is measured, where ray is a fake. No ray is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_ray import THREE, FakeRay
from tuner_fakes import FakeBench, problem

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import InvalidInput, NoGpu
from flashtune.tuner.cluster import ray_cluster, ray_crew
from flashtune.tuner.cluster.ray_actor import Host, RayUnit
from flashtune.tuner.cluster.ray_crew import Crew
from flashtune.tuner.tune import session
from flashtune.tuner.workers.process_worker import Lost

pytestmark = pytest.mark.usefixtures("quick_ray")

PROBLEM = problem()
GPU = gpu_by_alias("h100")


def start(ray: FakeRay, place: Any = RayUnit) -> None:
    crew = Crew(ray, GPU, 2, unit=place)
    try:
        crew.start()
    finally:
        crew.close()
        assert not [each for node in ray.all for each in node.actors]


def test_a_gpu_that_is_another_than_the_one_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.codegen.gpu import devices

    monkeypatch.setattr(devices, "gpu_of_device", lambda index: gpu_by_alias("h100-pcie"))
    with pytest.raises(NoGpu, match=r"can't measure for h100-sxm: its GPU is h100-pcie .* Ray calls both H100$"):
        start(FakeRay(THREE))


def test_another_flashtune_on_a_node_is_refused() -> None:
    opened = Host(FakeBench(), "0.0.0").open()
    assert isinstance(opened.said, Lost)
    assert "0.0.0 here" in opened.said.message


def test_a_node_without_flashtune_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Host, *arguments: Any) -> None:
        raise ModuleNotFoundError("No module named 'flashtune'")

    monkeypatch.setattr(Host, "__init__", broken)
    with pytest.raises(NoGpu, match=r"ended: No module named 'flashtune'\. Each node needs .*pip install"):
        start(FakeRay(THREE))


def test_a_cluster_without_the_gpu_leaves_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([("10.0.0.2", 8, "A100")], connected=False)
    monkeypatch.setattr(ray_crew, "import_ray", lambda: ray)
    with pytest.raises(NoGpu, match=r"offers no h100-sxm: it has no H100\. Its GPUs, by node: 8 A100"):
        session.tune([PROBLEM], "h100", database=tmp_path / "db", ray="auto")
    with pytest.raises(InvalidInput, match="name the GPU model"):
        session.tune([PROBLEM], database=tmp_path / "db", ray="auto")
    assert not (tmp_path / "db").exists()
    assert ray.calls == ["auto", "shutdown"]
    ray.connected = True
    assert ray_cluster.free_gpus(ray, session.gpu_by_alias("a100"), 9) == 8
