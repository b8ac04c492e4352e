from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashtune.codegen import device
from flashtune.codegen.device import DeviceAttributes, gpu_from_attributes
from flashtune.codegen.gpu_table import GPUS, ROWS, Row
from flashtune.errors import InvalidInput, MissingDependency, NoGpu

H200 = DeviceAttributes(
    name="NVIDIA H200",
    capability=(9, 0),
    num_sms=132,
    shared_memory_block=232448,
    l2_bytes=62914560,
    memory_bytes=150_110_011_392,
    clock_khz=1_980_000,
    memory_clock_khz=3_201_000,
    memory_bus_bits=6144,
)


def attributes_of(row: Row, name: str) -> DeviceAttributes:
    gpu = row.gpu
    return DeviceAttributes(
        name=name,
        capability=gpu.capability,
        num_sms=gpu.num_sms,
        shared_memory_block=gpu.shared_memory_block,
        l2_bytes=gpu.l2_bytes,
        memory_bytes=gpu.memory_gb * 10**9,
    )


@pytest.mark.parametrize("prefix", ["", "NVIDIA "])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.gpu.name)
def test_a_reported_name_with_the_figures_of_a_row_is_that_row(row: Row, prefix: str) -> None:
    for name in row.reported:
        assert gpu_from_attributes(attributes_of(row, prefix + name)) is row.gpu


def test_memory_and_clocks_that_drivers_report_differently_do_not_change_the_identity() -> None:
    other = dataclasses.replace(H200, memory_bytes=149_000_000_000, clock_khz=1_500_000, l2_bytes=52428800)
    assert gpu_from_attributes(other) is GPUS["h200"]


def test_a_mig_slice_is_a_device_model_of_its_own() -> None:
    """D79."""
    piece = gpu_from_attributes(
        DeviceAttributes(
            name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            capability=(9, 0),
            num_sms=16,
            shared_memory_block=232448,
            l2_bytes=6553600,
            memory_bytes=10_468_982_784,
            clock_khz=1_980_000,
            memory_clock_khz=2_619_000,
            memory_bus_bits=640,
        )
    )
    assert piece.key == "9.0a/h100-sxm/16sm/smem232448/l2-6553600/10gb/mig-1g.10gb"
    assert piece.bandwidth_gb_s == 419
    assert piece.tensor_tflops == pytest.approx(989.4 * 16 / 132, abs=0.1)


def test_the_whole_gpu_as_one_slice_is_still_not_the_gpu() -> None:
    whole = gpu_from_attributes(dataclasses.replace(H200, name="NVIDIA H200 MIG 7g.141gb"))
    assert whole.mig == "7g.141gb"
    assert whole.key != GPUS["h200"].key


def test_another_sku_under_a_known_name_keeps_the_rate_of_its_row() -> None:
    """The H20's tensor rate is a quarter of what its capability could do."""
    row = next(row for row in ROWS if row.gpu.name == "h20")
    other = gpu_from_attributes(dataclasses.replace(attributes_of(row, "NVIDIA H20"), num_sms=39))
    assert other.name == "h20"
    assert other.key != row.gpu.key
    assert other.tensor_tflops == 74.0
    assert other.bandwidth_gb_s == row.gpu.bandwidth_gb_s / 2
    assert other.clock_mhz == row.gpu.clock_mhz


def test_a_known_name_on_other_silicon_is_not_the_row() -> None:
    other = gpu_from_attributes(dataclasses.replace(H200, capability=(10, 0)))
    assert other.key != GPUS["h200"].key
    assert other.tensor_tflops > GPUS["h200"].tensor_tflops


def test_an_unknown_card_is_built_from_its_attributes() -> None:
    card = gpu_from_attributes(
        DeviceAttributes(
            name="NVIDIA GeForce RTX 3080",
            capability=(8, 6),
            num_sms=68,
            shared_memory_block=101376,
            l2_bytes=5242880,
            memory_bytes=10_504_896_512,
            clock_khz=1_710_000,
            memory_clock_khz=9_501_000,
            memory_bus_bits=320,
        )
    )
    assert card.name == "rtx-3080"
    assert card.key == "8.6/rtx-3080/68sm/smem101376/l2-5242880/10gb"
    assert card.arch == "sm_86"
    assert card.bandwidth_gb_s == 760
    assert card.tensor_tflops == 59.5  # with float32 accumulation; the datasheet's 119 is with float16
    assert card.fp32_tflops == pytest.approx(29.8, abs=0.1)


def test_a_workstation_card_has_the_full_rate_and_a_gtx_none() -> None:
    base = DeviceAttributes(
        name="NVIDIA RTX A5000",
        capability=(8, 6),
        num_sms=64,
        shared_memory_block=101376,
        l2_bytes=6291456,
        memory_bytes=25_402_343_424,
        clock_khz=1_695_000,
    )
    assert gpu_from_attributes(base).tensor_tflops == pytest.approx(111.1, abs=0.1)
    gtx = dataclasses.replace(base, name="NVIDIA GeForce GTX 1660", capability=(7, 5))
    assert gpu_from_attributes(gtx).tensor_tflops == 0.0


@pytest.mark.parametrize("capability", [(7, 0), (8, 7), (9, 0), (10, 7), (12, 1), (15, 0)])
def test_what_a_driver_leaves_out_is_estimated_for_any_capability(capability: tuple[int, int]) -> None:
    card = gpu_from_attributes(
        dataclasses.replace(
            H200, name="NVIDIA Zeta 9", capability=capability, clock_khz=0, memory_clock_khz=0, memory_bus_bits=0
        )
    )
    assert card.name == "zeta-9"
    assert 1000 <= card.clock_mhz <= 3000
    assert 100 <= card.bandwidth_gb_s <= 20_000
    assert card.tensor_tflops > 10
    assert card.num_sms == 132


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop-gpu"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("NVIDIA Thor / é", "thor"),
        ("", "unnamed"),
    ],
)
def test_names_of_unknown_cards_are_normalised(name: str, expected: str) -> None:
    assert gpu_from_attributes(dataclasses.replace(H200, name=name)).name == expected


@pytest.mark.parametrize("memory", [79.2, 79.6, 80.0])
def test_memory_does_not_depend_on_what_the_driver_keeps_of_it(memory: float) -> None:
    card = gpu_from_attributes(dataclasses.replace(H200, name="NVIDIA Zeta 9", memory_bytes=int(memory * 2**30)))
    assert card.memory_gb == 80


class FakeCudaError(RuntimeError):
    pass


def fake_runtime(cards: list[DeviceAttributes], *, driver: int = 13000, error: str = "") -> Any:
    """Stands in for ``cupy.cuda.runtime`` with the attributes of ``cards``."""

    def count() -> int:
        if error:
            raise FakeCudaError(error)
        return len(cards)

    def properties(index: int) -> dict[str, object]:
        card = cards[index]
        major, minor = card.capability
        return {"name": card.name.encode(), "major": major, "minor": minor, "totalGlobalMem": card.memory_bytes}

    fields = {
        "MultiProcessorCount": "num_sms",
        "MaxSharedMemoryPerBlockOptin": "shared_memory_block",
        "L2CacheSize": "l2_bytes",
        "ClockRate": "clock_khz",
        "MemoryClockRate": "memory_clock_khz",
        "GlobalMemoryBusWidth": "memory_bus_bits",
    }
    return SimpleNamespace(
        CUDARuntimeError=FakeCudaError,
        getDeviceCount=count,
        getDeviceProperties=properties,
        deviceGetAttribute=lambda field, index: getattr(cards[index], field),
        deviceGetPCIBusId=lambda index: f"0000:{index:02X}:00.0",
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13020,
        **{f"cudaDevAttr{name}": field for name, field in fields.items()},
    )


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    device.gpu_of_device.cache_clear()
    yield lambda runtime: monkeypatch.setattr(device, "_runtime", lambda: runtime)
    device.gpu_of_device.cache_clear()


def test_devices_are_recognised(use: Any) -> None:
    use(fake_runtime([H200, dataclasses.replace(H200, name="NVIDIA Zeta 9")]))
    assert [gpu.name for gpu in device.visible_gpus()] == ["h200", "zeta-9"]
    assert device.gpu_of_device(0) is GPUS["h200"]
    assert device.require_device() is GPUS["h200"]
    assert device.device_attributes(0) == H200
    assert device.missing_device() is None


@pytest.mark.parametrize("index", [-1, 1, 99])
def test_an_index_beyond_the_devices_is_refused(use: Any, index: int) -> None:
    use(fake_runtime([H200]))
    with pytest.raises(InvalidInput, match=f"device {index} does not exist. Devices: 0 to 0"):
        device.gpu_of_device(index)


def test_no_driver_is_said_in_one_sentence(use: Any) -> None:
    use(fake_runtime([], driver=0, error="cudaErrorInsufficientDriver: CUDA driver version is insufficient"))
    assert device.visible_gpus() == []
    with pytest.raises(NoGpu) as caught:
        device.require_device()
    assert str(caught.value) == "No CUDA device can be used: no NVIDIA driver is installed"


def test_a_driver_that_is_too_old_is_told_apart(use: Any) -> None:
    use(fake_runtime([], driver=12040, error="cudaErrorInsufficientDriver: CUDA driver version is insufficient"))
    with pytest.raises(NoGpu, match=r"supports CUDA 12\.4, and the CuPy installed needs CUDA 13\.2"):
        device.require_device()


def test_hidden_devices_are_told_apart(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    use(fake_runtime([], error="cudaErrorNoDevice: no CUDA-capable device is detected"))
    with pytest.raises(NoGpu, match=r"cudaErrorNoDevice.*CUDA_VISIBLE_DEVICES='7'"):
        device.require_device()


def test_no_cupy_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    device.gpu_of_device.cache_clear()
    assert device.visible_gpus() == []
    with pytest.raises(MissingDependency, match=re.escape('pip install "flashtune[cuda13]"')):
        device.require_device()


def test_facts_of_the_card_without_nvml(use: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)  Tue Sep 23 2025\n"
        "GCC version:  gcc version 12.3.0\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(device, "_DRIVER_FILE", version)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(device, "_driver_uuid", lambda index: bytes(range(16)))
    use(fake_runtime([H200, dataclasses.replace(H200, name="NVIDIA H200 MIG 1g.18gb")]))
    facts = device.device_facts(0)
    assert facts == device.DeviceFacts(
        name="NVIDIA H200",
        uuid="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        pci_bus="0000:00:00.0",
        driver="580.95.05",
        cuda_driver="13.0",
        cuda_runtime="13.2",
        power_limit_w=0.0,
    )
    assert device.device_facts(1).uuid == "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f"


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
    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
    assert device.driver_version() == ""
    (tmp_path / "version").write_text(text, encoding="utf-8")
    assert device.driver_version() == version


class FakeNvmlError(Exception):
    pass


def fake_nvml(*, refuse: bool = False) -> Any:
    def limit(handle: str) -> int:
        if refuse:
            raise FakeNvmlError
        return 700_000

    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.95.05",
        nvmlDeviceGetHandleByUUID=lambda unit: unit,
        nvmlDeviceGetEnforcedPowerLimit=limit,
    )


@pytest.mark.parametrize(("refuse", "watts"), [(False, 700.0), (True, 0.0)])
def test_nvml_adds_the_power_limit_where_it_may(
    use: Any, monkeypatch: pytest.MonkeyPatch, refuse: bool, watts: float
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(refuse=refuse))
    monkeypatch.setattr(device, "_driver_uuid", lambda index: bytes(16))
    use(fake_runtime([H200]))
    facts = device.device_facts(0)
    assert facts.power_limit_w == watts
    assert facts.driver == "580.95.05"


def test_this_machine_is_described_without_a_traceback() -> None:
    """Runs on any machine: with a GPU it lists it, without one it prints an empty list."""
    code = "from flashtune.codegen.device import visible_gpus; print(visible_gpus())"
    environment = {**os.environ, "PYTHONPATH": str(Path(device.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")


@pytest.mark.gpu
def test_facts_of_a_real_card() -> None:
    gpu = device.require_device()
    assert gpu in device.visible_gpus()
    facts = device.device_facts(0)
    assert re.fullmatch(r"(GPU|MIG)(-[0-9a-f]+){5}", facts.uuid)
    assert re.fullmatch(r"\d+(\.\d+)+", facts.driver)
    assert re.fullmatch(r"\d+\.\d+", facts.cuda_driver)
    assert re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", facts.pci_bus)


@pytest.mark.gpu
def test_a_real_card_gives_attributes_that_fit_its_row() -> None:
    attributes = device.device_attributes(0)
    gpu = device.gpu_of_device(0)
    assert gpu.num_sms == attributes.num_sms
    assert gpu.l2_bytes == attributes.l2_bytes
    built = gpu_from_attributes(dataclasses.replace(attributes, name="NVIDIA Zeta 9"))
    assert built.bandwidth_gb_s == pytest.approx(gpu.bandwidth_gb_s, rel=0.05)
