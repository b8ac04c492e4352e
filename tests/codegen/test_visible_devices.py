"""Devices that are there, facts of each with NVML and without it, and one sentence where there are none."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import DRIVER, FakeNvml, real
from fake_runtime import H200, fake_runtime

from flashtune.codegen.gpu import devices
from flashtune.codegen.gpu.table import GPUS
from flashtune.errors import InvalidInput, MissingDependency, NoGpu

UNIT = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    devices.gpu_of_device.cache_clear()
    yield lambda runtime: monkeypatch.setattr(devices, "_runtime", lambda: runtime)
    devices.gpu_of_device.cache_clear()


def test_devices_are_recognised(use: Any) -> None:
    use(fake_runtime([H200, dataclasses.replace(H200, name="NVIDIA Zeta 9")]))
    assert [gpu.name for gpu in devices.visible_gpus()] == ["h200", "zeta-9"]
    assert devices.gpu_of_device(0) is GPUS["h200"]
    assert devices.require_device() is GPUS["h200"]
    assert devices.device_attributes(0) == H200
    assert devices.missing_device() is None


@pytest.mark.parametrize("index", [-1, 1, 99])
def test_an_index_beyond_the_devices_is_refused(use: Any, index: int) -> None:
    use(fake_runtime([H200]))
    with pytest.raises(InvalidInput, match=f"device {index} does not exist. Devices: 0 to 0"):
        devices.gpu_of_device(index)


def test_no_driver_is_said_in_one_sentence(use: Any) -> None:
    use(fake_runtime([], driver=0, error="cudaErrorInsufficientDriver: CUDA driver version is insufficient"))
    assert devices.visible_gpus() == []
    with pytest.raises(NoGpu) as caught:
        devices.require_device()
    assert str(caught.value) == "No CUDA device can be used: no NVIDIA driver is installed"


def test_a_driver_that_is_too_old_is_told_apart(use: Any) -> None:
    use(fake_runtime([], driver=12040, error="cudaErrorInsufficientDriver: CUDA driver version is insufficient"))
    with pytest.raises(NoGpu, match=r"supports CUDA 12\.4, and the CuPy installed needs CUDA 13\.2"):
        devices.require_device()


def test_hidden_devices_are_told_apart(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    use(fake_runtime([], error="cudaErrorNoDevice: no CUDA-capable device is detected"))
    with pytest.raises(NoGpu, match=r"cudaErrorNoDevice.*CUDA_VISIBLE_DEVICES='7'"):
        devices.require_device()


def test_no_cupy_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    devices.gpu_of_device.cache_clear()
    assert devices.visible_gpus() == []
    with pytest.raises(MissingDependency, match=re.escape('pip install "flashtune[cuda13]"')):
        devices.require_device()


def test_facts_of_the_card_without_nvml(use: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)  Tue Sep 23 2025\n"
        "GCC version:  gcc version 12.3.0\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(devices, "_DRIVER_FILE", version)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(devices, "_driver_uuid", lambda index: bytes(range(16)))
    use(fake_runtime([H200, dataclasses.replace(H200, name="NVIDIA H200 MIG 1g.18gb")]))
    facts = devices.device_facts(0)
    assert facts == devices.DeviceFacts(
        name="NVIDIA H200",
        uuid="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        pci_bus="0000:00:00.0",
        driver="580.95.05",
        cuda_driver="13.0",
        cuda_runtime="13.2",
        power_limit_w=0.0,
    )
    assert devices.device_facts(1).uuid == "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f"


IDENTITIES = [bytes(range(16)), bytes([7, 0, *range(100, 114)]), bytes([255] * 16)]
"""Of the cards of :func:`driver_of_cards`, by number. One holds a zero byte in the middle."""


def driver_of_cards(failing: str = "") -> SimpleNamespace:
    """libcuda with prototypes, against which ctypes checks each argument. Needs `cuInit` first, as the real one."""
    started: list[bool] = []

    def answer(name: str, work: Any) -> int:
        if name == failing:
            return 999  # CUDA_ERROR_UNKNOWN
        if name != "cuInit" and not started:
            return 3  # CUDA_ERROR_NOT_INITIALIZED
        work()
        return 0

    def get(device: Any, index: int) -> int:
        if index not in range(len(IDENTITIES)):
            return 101  # CUDA_ERROR_INVALID_DEVICE
        return answer("cuDeviceGet", lambda: device.__setitem__(0, 10 + index))

    def uuid(raw: Any, device: int) -> int:
        return answer("cuDeviceGetUuid_v2", lambda: ctypes.memmove(raw, IDENTITIES[device - 10], 16))

    code = ctypes.c_int
    return SimpleNamespace(
        cuInit=ctypes.CFUNCTYPE(code, ctypes.c_uint)(lambda flags: answer("cuInit", lambda: started.append(True))),
        cuDeviceGet=ctypes.CFUNCTYPE(code, ctypes.POINTER(code), code)(get),
        cuDeviceGetUuid_v2=ctypes.CFUNCTYPE(code, ctypes.c_void_p, code)(uuid),
    )


def test_the_driver_tells_all_bytes_of_each_cards_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole in the tests: the calls of libcuda ran nowhere without a GPU, so their arguments could be anything."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver_of_cards())
    assert [devices._driver_uuid(index) for index in range(3)] == IDENTITIES
    assert devices._driver_uuid(3) == b""


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceGetUuid_v2"])
def test_a_driver_that_refuses_leaves_the_uuid_unknown(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver_of_cards(failing))
    assert devices._driver_uuid(0) == b""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        ("something else", ""),
    ],
)
def test_driver_version_is_read_where_nvml_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(devices, "_DRIVER_FILE", tmp_path / "version")
    assert devices.driver_version() == ""
    (tmp_path / "version").write_text(text, encoding="utf-8")
    assert devices.driver_version() == version


@pytest.fixture
def nvml(use: Any, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A machine of two cards, of which CUDA sees one."""
    made = FakeNvml("GPU-ffffffff-0000-0000-0000-000000000000", UNIT)
    made.cards[UNIT].limit = 650_000
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(devices, "_driver_uuid", lambda index: bytes(16))
    use(fake_runtime([H200]))
    return made


def test_nvml_adds_the_power_limit_of_the_card(nvml: FakeNvml) -> None:
    """A hole in the tests: a fake that answered before `nvmlInit` let the call of it be left out."""
    facts = devices.device_facts(0)
    assert (facts.uuid, facts.power_limit_w, facts.driver) == (UNIT, 650.0, DRIVER)
    assert nvml.initialisation == 2
    assert nvml.uses == 0


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetEnforcedPowerLimit"])
def test_what_nvml_may_not_say_is_not_known(
    nvml: FakeNvml, refused: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_DRIVER_FILE", tmp_path / "none")
    nvml.refused.add(refused)
    facts = devices.device_facts(0)
    assert facts.power_limit_w == 0.0
    assert facts.driver == ("" if refused == "nvmlInit" else DRIVER)
    assert nvml.uses == 0


def test_an_end_that_nvml_refuses_costs_no_answer(nvml: FakeNvml) -> None:
    nvml.refused.add("nvmlShutdown")
    facts = devices.device_facts(0)
    assert (facts.power_limit_w, facts.driver) == (650.0, DRIVER)


def test_a_card_that_nvml_does_not_know_has_no_power_limit(nvml: FakeNvml) -> None:
    del nvml.cards[UNIT]
    assert devices.device_facts(0).power_limit_w == 0.0


def test_the_fake_takes_what_nvidia_ml_py_takes() -> None:
    compared = 0
    for name, function in vars(FakeNvml).items():
        if name.startswith("nvml") and hasattr(real, name):
            ours, theirs = (list(inspect.signature(each).parameters) for each in (function, getattr(real, name)))
            assert ours[1:] == theirs, name
            compared += 1
    assert compared >= 10


def test_this_machine_is_described_without_a_traceback() -> None:
    """Runs on any machine: with a GPU it lists it, without one it prints an empty list."""
    code = "from flashtune.codegen.gpu.devices import visible_gpus; print(visible_gpus())"
    environment = {**os.environ, "PYTHONPATH": str(Path(devices.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")


@pytest.mark.gpu
def test_facts_of_a_real_card() -> None:
    gpu = devices.require_device()
    assert gpu in devices.visible_gpus()
    facts = devices.device_facts(0)
    assert re.fullmatch(r"(GPU|MIG)(-[0-9a-f]+){5}", facts.uuid)
    assert re.fullmatch(r"\d+(\.\d+)+", facts.driver)
    assert re.fullmatch(r"\d+\.\d+", facts.cuda_driver)
    assert re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", facts.pci_bus)
