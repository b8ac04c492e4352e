from __future__ import annotations

import dataclasses

import pytest

from flashtune.codegen.gpu.gpu import CAPABILITIES, OLDEST, Gpu, arch_of, nearest_known
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import UnknownGpu

KIB = 1024


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_limits_fit_together(capability: tuple[int, int]) -> None:
    limits = CAPABILITIES[capability]
    total = limits.shared_memory_block + limits.shared_memory_reserved
    assert total in (64 * KIB, 100 * KIB, 164 * KIB, 228 * KIB)
    assert limits.max_threads_sm in (1024, 1536, 2048)
    assert limits.max_blocks_sm in (16, 24, 32)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 6), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120"),
        ((10, 7), "sm_107"),  # not known: nothing arch-specific is assumed
        ((14, 0), "sm_140"),
    ],
)
def test_arch_has_the_suffix_of_known_chips_only(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch


@pytest.mark.parametrize(
    ("capability", "nearest"),
    [((7, 0), OLDEST), ((8, 5), (8, 0)), ((10, 7), (10, 3)), ((12, 0), (12, 0)), ((15, 2), (12, 1))],
)
def test_an_unknown_capability_takes_the_limits_of_the_newest_older(
    capability: tuple[int, int], nearest: tuple[int, int]
) -> None:
    assert nearest_known(capability) == nearest
    gpu = dataclasses.replace(gpu_by_alias("h100"), capability=capability)
    assert gpu.max_threads_sm == CAPABILITIES[nearest].max_threads_sm


def test_shared_memory_of_an_sm_holds_one_full_block() -> None:
    assert gpu_by_alias("h200").shared_memory_sm == 228 * KIB
    assert gpu_by_alias("t4").shared_memory_sm == 64 * KIB
    assert gpu_by_alias("t4").shared_memory_reserved == 0


def test_key_names_all_that_makes_a_device_model() -> None:
    assert gpu_by_alias("h200").key == "9.0a/h200/132sm/smem232448/l2-62914560/141gb"


@pytest.mark.parametrize(
    "change",
    [
        {"capability": (10, 0)},
        {"name": "other"},
        {"num_sms": 114},
        {"shared_memory_block": 101376},
        {"l2_bytes": 52428800},
        {"memory_gb": 80},
        {"mig": "1g.18gb"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_part_of_the_identity_changes_the_key(change: dict[str, object]) -> None:
    gpu = gpu_by_alias("h200")
    assert dataclasses.replace(gpu, **change).key != gpu.key  # type: ignore[arg-type]


def test_boards_of_one_name_and_slices_of_them_are_different_identities() -> None:
    """D79. A MIG slice as drivers report it is in test_devices.py."""
    sxm, pcie = gpu_by_alias("h100-sxm"), gpu_by_alias("h100-pcie")
    assert (sxm.num_sms, pcie.num_sms) == (132, 114)
    assert len({sxm.key, pcie.key, dataclasses.replace(sxm, num_sms=16, mig="1g.10gb").key}) == 3


def test_speeds_are_not_part_of_the_key() -> None:
    gpu = gpu_by_alias("h200")
    assert dataclasses.replace(gpu, clock_mhz=1, bandwidth_gb_s=1.0, tensor_tflops=1.0).key == gpu.key


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "h100-sxm"),
        ("H100", "h100-sxm"),
        (" h100 ", "h100-sxm"),
        ("H100_PCIe", "h100-pcie"),
        ("a100", "a100-sxm-80gb"),
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("Tesla T4", "t4"),
    ],
)
def test_names_are_found_in_any_spelling(alias: str, name: str) -> None:
    assert gpu_by_alias(alias).name == name
    assert str(gpu_by_alias(alias)) == name


@pytest.mark.parametrize("alias", ["", "h1000", "x" * 5000, "../../etc/passwd"])
def test_an_unknown_name_lists_the_known(alias: str) -> None:
    with pytest.raises(UnknownGpu) as caught:
        gpu_by_alias(alias)
    message = str(caught.value)
    assert repr(alias[:60]) in message
    assert "h100-sxm" in message
    assert "rtx-pro-6000" in message
    assert len(message) < 1000


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(UnknownGpu, match=r"Did you mean h100\?"):
        gpu_by_alias("h10O")


def test_a_gpu_is_a_value() -> None:
    assert gpu_by_alias("h100") == gpu_by_alias("h100-sxm")
    assert len({gpu_by_alias("h100"), gpu_by_alias("h100-sxm")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpu_by_alias("h100").num_sms = 1  # type: ignore[misc]
    assert isinstance(gpu_by_alias("l4"), Gpu)
