"""A CUDA device that travels to a worker: who has it open."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuner.tune import session
from flashtune.tuner.workers import cuda_device
from flashtune.tuner.workers.cuda_device import CudaUnit, is_open


class Driver:
    """libcuda with one device."""

    def __init__(self, active: int) -> None:
        self.active = active

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0 if index == 0 else 101

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:  # noqa: N802
        active._obj.value = self.active
        return 0


@pytest.mark.parametrize(("index", "active", "expected"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_a_device_is_open_where_its_context_is(
    monkeypatch: pytest.MonkeyPatch, index: int, active: int, expected: bool
) -> None:
    monkeypatch.setattr(cuda_device.ctypes, "CDLL", lambda name: Driver(active))
    assert is_open(index) is expected


def test_without_a_driver_nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda_device.ctypes, "CDLL", missing)
    assert is_open(0) is False


@pytest.mark.parametrize(("shared", "ours"), [(False, 1), (True, 2)])
def test_a_worker_counts_the_session_where_that_has_the_card_open(
    monkeypatch: pytest.MonkeyPatch, shared: bool, ours: int
) -> None:
    """Point 9: else every row of a tuning run in a notebook is one of a card that is shared."""
    bench = pytest.importorskip("flashtune.tuner.bench.device_bench", reason="needs CuPy", exc_type=ImportError)
    monkeypatch.setattr(session, "unit_uuid", lambda index: "GPU-1")
    monkeypatch.setattr(session, "is_open", lambda index: shared)
    (made,) = session._units([0], gpu_by_alias("h200"))
    opened: list[Any] = []
    monkeypatch.setattr(bench, "DeviceBench", lambda *given: opened.append(given))
    monkeypatch.setattr("cupy.cuda.runtime", SimpleNamespace(setDevice=lambda index: None))
    there: CudaUnit = pickle.loads(pickle.dumps(made))
    there.open()
    assert opened == [(0, gpu_by_alias("h200"), ours)]
