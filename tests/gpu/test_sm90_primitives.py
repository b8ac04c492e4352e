"""mbarriers, TMA and wgmma on the device: the kernels that the emulator runs, to the same expectations.

What passes here and in tests/codegen/emulator/test_sm90.py is modelled as the hardware does it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.plan.tensor_map import MAP_BYTES, TensorMap
from flashtune.codegen.problem.bits import from_memory, to_memory

sys.path.append(str(Path(__file__).parent))  # for worker processes, which inherit it
sys.path.append(str(Path(__file__).parents[1] / "codegen" / "emulator"))  # the toys

from sm90_launcher import Launch, Launcher, LaunchFailed
from sm90_toys import ENTRY, HEAD, device_source, one_step
from toy_attention import ATTENTION, ATTENTION_ERROR, ATTENTIONS, Attention
from toy_box import BOX, BOXES, MISUSES, Box, Misuse
from toy_gemm import GEMM, GEMMS, Gemm, gemm_inputs, gemm_product
from toy_ring import RING, RINGS, Ring

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper() -> None:
    gpu = require_device()
    if gpu.arch != "sm_90a":
        pytest.skip(f"these instructions are those of sm_90a, and this is {gpu}")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def test_dynamic_shared_memory_starts_where_the_toys_need_it(launcher: Launcher) -> None:
    text = f"""{HEAD}
extern "C" __global__ void toy(u32* out) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  out[0] = shared_address(smem);
}}
"""
    source = device_source(text, {"element": "Half", **one_step()})
    (found,) = launcher.run(Launch(source, ENTRY, {"out": np.zeros(1, np.uint32)}, ("out",), 32, 65536))
    assert found["out"][0] % 1024 == 0


@pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS)
def test_products_through_tma_and_wgmma_are_exact(gemm: Gemm, launcher: Launcher) -> None:
    a, b = gemm_inputs(gemm)
    arrays = {
        "a": to_memory(a, gemm.dtype),
        "b": to_memory(b, gemm.dtype),
        "c": np.full((64, gemm.n), np.nan, np.float32),
    }
    source = device_source(GEMM, gemm.names())
    (found,) = launcher.run(Launch(source, ENTRY, arrays, tuple(gemm.maps().items()), 128, gemm.shared_memory))
    np.testing.assert_array_equal(found["c"], gemm_product(gemm, a, b))


@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS)
def test_a_producer_and_consumers_share_a_ring_of_tiles(ring: Ring, launcher: Launcher) -> None:
    a, b = ring.inputs()
    arrays = {
        "a": to_memory(a, ring.dtype),
        "b": to_memory(b, ring.dtype),
        "c": np.full((ring.rows, 64), 0xFFFF, np.uint16),
    }
    source = device_source(RING, ring.names())
    arguments = (*ring.maps().items(), np.int32(ring.tiles))
    expected = from_memory(to_memory(ring.product(a, b).astype(np.float32), ring.dtype), ring.dtype)
    for found in launcher.run(
        Launch(source, ENTRY, arrays, arguments, 256, ring.shared_memory, ring.blocks, repeat=20)
    ):
        np.testing.assert_array_equal(from_memory(found["c"], ring.dtype), expected)


@pytest.mark.parametrize("case", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_in_a_pipeline(case: Attention, launcher: Launcher) -> None:
    values = case.inputs()
    arrays = {name: to_memory(each, case.dtype) for name, each in zip("qkv", values, strict=True)}
    arrays["o"] = np.full((case.heads, case.rows, 64), 0xFFFF, np.uint16)
    source = device_source(ATTENTION, case.names())
    arguments = (*case.maps().items(), *case.numbers())
    for found in launcher.run(
        Launch(source, ENTRY, arrays, arguments, 384, case.shared_memory, case.blocks, repeat=20)
    ):
        error = case.error(from_memory(found["o"], case.dtype), case.expected(*values))
        assert error < ATTENTION_ERROR[case.dtype]


def outcome(box: Box, launcher: Launcher) -> str:
    """As `Box.outcome`, or the launch's error."""
    arrays = {"first": box.memory(), "second": box.target(), "seen": np.zeros(box.map().box_bytes // 2, np.uint16)}
    arguments = (("first", box.map()), ("second", box.map()), "seen", *box.numbers())
    source = device_source(BOX, box.names())
    try:
        (found,) = launcher.run(Launch(source, ENTRY, arrays, arguments, 32, box.shared_memory))
    except LaunchFailed as error:
        return str(error)
    return box.outcome(found["seen"], found["second"])


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_tiles_at_the_edges_of_tensors(box: Box, launcher: Launcher) -> None:
    assert outcome(box, launcher) == "right"


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_what_the_emulator_refuses_the_device_does_wrong(misuse: Misuse, launcher: Launcher) -> None:
    assert misuse.device in outcome(misuse.box, launcher)


DESCRIBED = {
    "dimensions in any order": TensorMap(
        0, "bfloat16", (64, 256, 4, 2), (512, 128, 131072), (64, 256, 1, 1), swizzle=128
    ),
    "a stride of 0": TensorMap(0, "float16", (8, 100, 2, 1), (16, 0, 1600), (8, 100, 1, 1)),
    "a box of 128 KiB": TensorMap(0, "bfloat16", (256, 256, 1, 1), (512, 16, 16), (256, 256, 1, 1)),
    "the largest dimension": TensorMap(16, "float16", (2**32, 1, 1, 1, 1), (16, 16, 16, 16), (32, 1, 1, 1, 1), 64),
    "the largest stride": TensorMap(16, "float16", (64, 2, 1, 1), (2**40 - 16, 16, 16), (32, 1, 1, 1), swizzle=64),
}


@pytest.mark.parametrize("described", DESCRIBED.values(), ids=DESCRIBED)
def test_the_driver_takes_what_the_description_allows(described: TensorMap) -> None:
    from flashtune.codegen.gpu.cuda import cupy

    memory = cupy.asarray(np.zeros(1 << 20, np.uint16))
    assert len(replace(described, address=memory.data.ptr + described.address).encode()) == MAP_BYTES
