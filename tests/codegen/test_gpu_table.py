from __future__ import annotations

import pytest

from flashtune.codegen.gpu.gpu import CAPABILITIES
from flashtune.codegen.gpu.table import ALIASES, GPUS, REPORTED, ROWS, GpuRow

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.gpu.name)

REQUIRED = (
    *("t4", "a10", "a30", "a100-40gb", "a100-80gb", "a100-pcie", "a800", "3090", "4090", "5090", "a6000"),
    *("rtx-6000-ada", "rtx-pro-6000", "l4", "l40s", "h20", "h100", "h100-sxm", "h100-pcie", "h100-nvl", "h800", "h200"),
    *("gh200", "b200", "gb200", "b300", "gb300"),
)


@pytest.mark.parametrize("name", REQUIRED)
def test_every_card_that_was_promised_is_there(name: str) -> None:
    assert ALIASES.get(name, name) in GPUS


def test_no_two_rows_share_a_name_a_reported_name_or_a_key() -> None:
    assert len(GPUS) == len(ROWS)
    assert len(REPORTED) == sum(len(row.reported) for row in ROWS)
    assert len({gpu.key for gpu in GPUS.values()}) == len(ROWS)


def test_aliases_lead_to_rows_and_hide_none() -> None:
    assert set(ALIASES.values()) <= set(GPUS)
    assert not set(ALIASES) & set(GPUS)


@pytest.mark.parametrize("name", [*GPUS, *ALIASES])
def test_names_are_lower_case_with_dashes(name: str) -> None:
    assert name == name.lower().strip("-")
    assert not set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-")


@each_row
def test_a_row_says_where_its_figures_are_from_and_how_drivers_call_it(row: GpuRow) -> None:
    assert "NVIDIA" in row.source
    assert row.reported
    assert not any(name.startswith("NVIDIA") for name in row.reported)


@each_row
def test_shared_memory_is_that_of_the_capability(row: GpuRow) -> None:
    assert row.gpu.shared_memory_block == CAPABILITIES[row.gpu.capability].shared_memory_block


@each_row
def test_tensor_rate_follows_from_sms_clock_and_capability(row: GpuRow) -> None:
    """GeForce cards have half the rate with float32 accumulation, the H20 a quarter of its chip's."""
    gpu = row.gpu
    full = 2 * CAPABILITIES[gpu.capability].tensor_fma_sm * gpu.num_sms * gpu.clock_mhz / 1e6
    part = 0.5 if row.reported[0].startswith("GeForce") else 0.25 if gpu.name == "h20" else 1.0
    # Data-centre documents count tensor rates at a clock up to 14 % below the boost clock.
    assert 0.86 < gpu.tensor_tflops / (full * part) < 1.005


@each_row
def test_figures_are_of_a_plausible_size(row: GpuRow) -> None:
    gpu = row.gpu
    assert 40 <= gpu.num_sms <= 200
    assert 4 <= gpu.l2_bytes / 2**20 <= 130
    assert 16 <= gpu.memory_gb <= 288
    assert 300 <= gpu.bandwidth_gb_s <= 8000
    assert 1400 <= gpu.clock_mhz <= 2700


def test_figures_that_were_read_on_a_card() -> None:
    assert GPUS["h200"].l2_bytes == 62914560
    assert GPUS["h100-sxm"].l2_bytes == 52428800
    assert GPUS["h200"].num_sms == 132
    assert GPUS["h100-pcie"].num_sms == 114
