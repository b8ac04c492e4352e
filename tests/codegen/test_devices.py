"""Which device model a card is, from what its driver reports."""

from __future__ import annotations

import dataclasses

import pytest
from fake_runtime import H200

from flashtune.codegen.gpu import devices
from flashtune.codegen.gpu.devices import DeviceAttributes, gpu_from_attributes
from flashtune.codegen.gpu.table import GPUS, ROWS, GpuRow


def attributes_of(row: GpuRow, name: str) -> DeviceAttributes:
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
def test_a_reported_name_with_the_figures_of_a_row_is_that_row(row: GpuRow, prefix: str) -> None:
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


@pytest.mark.gpu
def test_a_real_card_gives_attributes_that_fit_its_row() -> None:
    attributes = devices.device_attributes(0)
    gpu = devices.gpu_of_device(0)
    assert gpu.num_sms == attributes.num_sms
    assert gpu.l2_bytes == attributes.l2_bytes
    built = gpu_from_attributes(dataclasses.replace(attributes, name="NVIDIA Zeta 9"))
    assert built.bandwidth_gb_s == pytest.approx(gpu.bandwidth_gb_s, rel=0.05)
