"""How a cluster is named and reached, and what Ray calls each GPU. No ray is needed, but for one check of the names."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest
from fake_ray import FakeRay

from flashtune.codegen.gpu.table import GPUS, ROWS, gpu_by_alias
from flashtune.errors import FlashtuneError, InvalidInput, InvalidType, MissingDependency, NoGpu, UnknownGpu
from flashtune.tuner.cluster import ray_cluster
from flashtune.tuner.cluster.ray_cluster import ACCELERATORS, asked_of_ray, connect, free_gpus, import_ray

GPU = gpu_by_alias("h100")


def test_each_gpu_of_the_table_has_a_name_in_ray() -> None:
    assert list(ACCELERATORS) == list(GPUS)


@pytest.mark.filterwarnings("default")
def test_names_are_those_that_ray_gives() -> None:
    nvidia = pytest.importorskip("ray._private.accelerators.nvidia_gpu", reason="needs the extra ray")
    named = nvidia.NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type
    for row in ROWS:
        for name in row.reported:
            assert named(name if name.startswith("Tesla") else f"NVIDIA {name}") == ACCELERATORS[row.gpu.name]


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_an_address_and_a_model_are_enough(address: str) -> None:
    assert asked_of_ray("h100", "auto", None, address) == asked_of_ray(GPU, "measure", None, address) == GPU


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"address": True}, InvalidType, "ray=True must be text"),
        ({"address": ""}, InvalidInput, "must be auto"),
        ({"address": "local"}, InvalidInput, "must be auto.* or HOST:PORT"),
        ({"address": "ray://head:10001"}, InvalidInput, "must be auto"),
        ({"devices": [0]}, InvalidInput, "devices are those of this machine"),
        ({"mode": "predict"}, InvalidInput, "measures nothing"),
        ({"gpu": None}, InvalidInput, "such as h100"),
        ({"gpu": 100}, InvalidType, "gpu is a int"),
        ({"gpu": "h1000"}, UnknownGpu, "h1000"),
    ],
    ids=str,
)
def test_what_no_cluster_can_serve_is_refused(
    changes: dict[str, Any], error: type[FlashtuneError], message: str
) -> None:
    with pytest.raises(error, match=message):
        asked_of_ray(**{"gpu": "h100", "mode": "auto", "devices": None, "address": "auto", **changes})


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r'needs ray, which .*: pip install "flashtune\[ray\]"$'):
        import_ray()


def test_an_address_where_nothing_answers_is_told_at_once() -> None:
    ray = FakeRay(connected=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(NoGpu, match=rf"nothing answers at 127\.0\.0\.1:{port} .*a Ray head\?"):
            connect(ray, f"127.0.0.1:{port}")
    with pytest.raises(NoGpu, match="nothing answers"):
        connect(ray, "127.0.0.1:99999")
    assert not ray.calls


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ConnectionError("Could not find any running Ray instance."), "`ray start --head` starts one"),
        (RuntimeError("Version mismatch:\n  3.11\n  3.12"), "cluster at auto: Version mismatch: 3.11 3.12"),
    ],
)
def test_a_cluster_that_refuses_is_one_line(failure: Exception, message: str) -> None:
    ray = FakeRay(connected=False)
    ray.failure = failure
    with pytest.raises(NoGpu, match=message) as caught:
        connect(ray, "auto")
    assert "\n" not in str(caught.value)


def test_gpus_that_others_use_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([("10.0.0.1", 4, "H100"), ("10.0.0.2", 2, "A100")])
    assert [free_gpus(ray, GPU, wanted) for wanted in (3, 4, 9)] == [3, 4, 4]
    assert free_gpus(ray, gpu_by_alias("a100-40gb"), 9) == 2
    monkeypatch.setattr(ray_cluster, "SETTLE_SECONDS", 0.0)
    ray.others = 6
    with pytest.raises(NoGpu, match=r"none of its 4 H100 is free\. Its GPUs, by node: 4 H100, 2 A100$"):
        free_gpus(ray, GPU, 1)


def test_gpus_that_were_just_given_back_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "SETTLE_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(ray_cluster, "SETTLE_SECONDS", 600.0)
    ray = FakeRay([("10.0.0.1", 4, "H100")])
    left = iter([4, 4, 1, 0])
    whole = ray.available_resources

    def available() -> dict[str, float]:
        ray.others = next(left)
        return whole()

    monkeypatch.setattr(ray, "available_resources", available)
    assert free_gpus(ray, GPU, 3) == 3
