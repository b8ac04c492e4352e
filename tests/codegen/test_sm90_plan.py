"""What sm90_fwd takes and launches: shared memory, registers, grids, and the boxes of its tensor maps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sm90_points import FAMILY, H200, SPEC, config, problem, source

from flashtune.codegen.families.resources import register_cap
from flashtune.codegen.plan.plan import Strides, TensorBox, describe_map
from flashtune.errors import InvalidInput

# ---- Resources and the plan ----


def test_shared_memory_is_counted_as_the_kernel_lays_it_out() -> None:
    def bytes_of(head_dim: int, head_dim_v: int = 0, **changes: object) -> int:
        spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim_v)
        return FAMILY.resources(config(**changes), spec).shared_memory

    # Barriers, Q of two tiles of two warpgroups, K and V of two stages of 128 keys, in rows of 256 bytes.
    assert bytes_of(128) == 1024 + (2 * 2 * 64 + 2 * 2 * 128) * 256
    assert bytes_of(128, q_buffers=1, num_stages=3, block_n=96) == 1024 + (2 * 64 + 2 * 3 * 96) * 256
    # Columns come in panels of 32 or 64.
    assert bytes_of(72) == bytes_of(96) == 1024 + (2 * 2 * 64 + 2 * 2 * 128) * 192
    assert bytes_of(8) == 1024 + (2 * 2 * 64 + 2 * 2 * 128) * 64
    # O leaves through the memory of Q, whichever is wider.
    assert bytes_of(192, 128, block_n=64) == 1024 + 2 * 2 * 64 * 384 + 2 * 64 * (384 + 256)
    assert bytes_of(64, 128) == 1024 + 2 * 2 * 64 * 256 + 2 * 128 * (128 + 256)


def test_registers_are_those_of_accumulators_weights_and_output() -> None:
    needs = FAMILY.resources(config(), SPEC)
    assert (needs.threads, needs.registers) == (3 * 128, 128 // 2 + 128 // 4 + 128 // 2 + 32)
    assert FAMILY.resources(config(warpgroups=1), SPEC).threads == 2 * 128


@pytest.mark.parametrize(("warpgroups", "blocks_per_sm"), [(1, 1), (1, 2), (2, 1), (3, 1)])
def test_registers_that_warpgroups_keep_fit_an_sm(warpgroups: int, blocks_per_sm: int) -> None:
    chosen = config(warpgroups=warpgroups, blocks_per_sm=blocks_per_sm, block_n=64)
    threads = FAMILY.resources(chosen, SPEC).threads
    entry = register_cap(threads, blocks_per_sm)
    kept = FAMILY.names(chosen, SPEC)["registers"]
    assert isinstance(kept, tuple)
    loads, computes = kept
    if loads:
        assert loads % 8 == computes % 8 == 0
        assert 24 <= loads <= entry <= computes <= 255
        assert 128 * (loads + warpgroups * computes) <= threads * entry
    assert threads * entry * blocks_per_sm <= 65536


def test_a_plan_has_as_many_blocks_as_its_scheduler_takes() -> None:
    asked = problem(1000, 500)  # 8 tiles of 128 rows in each of 16 heads
    small = replace(H200, num_sms=5)
    for scheduler, blocks, workspace in (("tile", 128, (0, 0)), ("static", 5, (0, 0)), ("dynamic", 5, (16, 16))):
        plan = FAMILY.plan(asked, config(scheduler=scheduler, q_buffers=1, heads_per_section=8), small)
        (kernel,) = plan.kernels
        assert kernel.grid == (blocks, 1, 1)
        assert kernel.threads == 384
        assert (plan.workspace_bytes, plan.zeroed_bytes) == workspace
        assert plan.heads_per_section == 8
    two = config(warpgroups=1, block_n=64, q_buffers=1, blocks_per_sm=2)
    assert FAMILY.plan(asked, two, small).kernels[0].grid == (10, 1, 1)
    assert FAMILY.plan(problem(60, 500, num_heads=4, batch=1), two, small).kernels[0].grid == (4, 1, 1)


def test_heads_per_section_is_not_in_the_source() -> None:
    one, many = (source(SPEC, config(heads_per_section=each)) for each in (1, 16))
    assert one.text == many.text


# ---- Tensor maps ----

STRIDES: tuple[Strides, ...] = ((90000, 1032, 128), (80000, 640, 136), (70000, 520, 0), (1000000, 1024, 144))


def test_boxes_are_tiles_of_one_warpgroup_and_blocks_of_keys() -> None:
    def boxes(head_dim: int, head_dim_v: int = 0, **changes: object) -> list[tuple[str, int, int]]:
        found = FAMILY.tensor_boxes(config(**changes), replace(SPEC, head_dim=head_dim, head_dim_v=head_dim_v))
        return [(each.tensor, each.rows, each.columns) for each in found]

    assert boxes(128) == [("q", 64, 64), ("k", 128, 64), ("v", 128, 64), ("out", 64, 64)]
    assert boxes(72, block_n=80) == [("q", 64, 32), ("k", 80, 32), ("v", 80, 32), ("out", 64, 32)]
    assert boxes(56) == boxes(128)
    assert boxes(8) == [("q", 64, 32), ("k", 128, 32), ("v", 128, 32), ("out", 64, 32)]
    assert boxes(192, head_dim_v=72) == [("q", 64, 64), ("k", 128, 64), ("v", 128, 32), ("out", 64, 32)]
    plan = FAMILY.plan(problem(100, 100), config(), H200)
    assert plan.kernels[0].boxes == tuple(FAMILY.tensor_boxes(config(), SPEC))


def test_a_map_has_the_sizes_and_strides_of_its_tensor() -> None:
    asked = problem(100, 300, head_dim=72)
    q, k, v, out = (
        describe_map(box, asked, STRIDES, 4096) for box in FAMILY.tensor_boxes(config(block_n=80), asked.spec)
    )
    assert (q.address, q.dtype, q.fill, q.swizzle) == (4096, "float16", "zero", 64)
    assert (q.dims, q.strides, q.box) == ((72, 100, 8, 2), (2064, 256, 180000), (32, 64, 1, 1))
    assert (k.dims, k.strides, k.box) == ((72, 300, 4, 2), (1280, 272, 160000), (32, 80, 1, 1))
    assert (v.dims, v.strides, v.box) == ((72, 300, 4, 2), (1040, 0, 140000), (32, 80, 1, 1))
    assert (out.dims, out.strides, out.box) == ((72, 100, 8, 2), (2048, 288, 2000000), (32, 64, 1, 1))
    wide = describe_map(TensorBox(tensor="q", rows=64, columns=64), asked, STRIDES, 0)
    assert (wide.swizzle, wide.box_bytes) == (128, 64 * 128)


def test_maps_of_v_and_the_output_have_the_columns_of_values() -> None:
    asked = problem(100, 300, head_dim=192, head_dim_v=128)
    maps = [describe_map(box, asked, STRIDES, 0) for box in FAMILY.tensor_boxes(config(block_n=64), asked.spec)]
    assert [each.dims[0] for each in maps] == [192, 192, 128, 128]


@pytest.mark.parametrize("stride", [0, 1, 3, -5, 2**50])
def test_a_dimension_of_one_has_a_legal_stride_whatever_the_array_says(stride: int) -> None:
    asked = problem(1, 1, batch=1, num_heads=1, num_heads_kv=1)
    odd = ((stride, stride, stride),) * 4
    for box in FAMILY.tensor_boxes(config(), asked.spec):
        found = describe_map(box, asked, odd, 16)
        assert found.dims == (128, 1, 1, 1)
        assert found.strides == (16, 16, 16)


def test_strides_of_longer_dimensions_are_taken_as_they_are() -> None:
    box = TensorBox(tensor="k", rows=64, columns=64)
    for strides in ((-256, 128, 128), (256, -128, 128), (256, 1, 128)):
        with pytest.raises(InvalidInput, match=r"is not a multiple of 16 from 0"):
            describe_map(box, problem(9, 9), (strides,) * 4, 0)


def test_an_empty_tensor_has_no_map() -> None:
    with pytest.raises(InvalidInput, match=r"dims\[1\]=0"):
        describe_map(TensorBox(tensor="k", rows=64, columns=64), problem(9, 0), ((0, 512, 128),) * 4, 16)
