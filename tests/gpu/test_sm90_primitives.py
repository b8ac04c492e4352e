"""mbarriers, TMA and wgmma on the device: the kernels that the emulator runs, to the same expectations.

What passes here and in tests/codegen/emulator/test_sm90.py is modelled as the hardware does it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashtune.codegen.bits import from_memory, to_memory
from flashtune.codegen.compile import compile_source
from flashtune.codegen.device import require_device
from flashtune.codegen.render import Source
from flashtune.codegen.tensor_map import MAP_BYTES, TensorMap

pytestmark = pytest.mark.gpu

Array = NDArray[Any]


def load_toys() -> ModuleType:
    if "sm90_toys" not in sys.modules:
        path = Path(__file__).parents[1] / "codegen" / "emulator" / "sm90_toys.py"
        spec = importlib.util.spec_from_file_location("sm90_toys", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["sm90_toys"] = module
        spec.loader.exec_module(module)
    return sys.modules["sm90_toys"]


toys = load_toys()


@pytest.fixture(autouse=True)
def _hopper() -> None:
    gpu = require_device()
    if gpu.arch != "sm_90a":
        pytest.skip(f"these instructions are those of sm_90a, and this is {gpu}")


def on_device(memory: Array) -> Any:
    import cupy

    return cupy.asarray(np.ascontiguousarray(memory))


def launch(
    source: Source, arguments: Sequence[Any], grid: int, threads: int, shared: int, entry: str = toys.ENTRY
) -> None:
    """``arguments``: encoded tensor maps, arrays on the device, NumPy numbers. Waits for the kernel."""
    import cupy
    from cupy.cuda.function import Module
    from cupy_backends.cuda.api import driver

    module = Module()
    module.load(compile_source(source, "sm_90a").cubin)
    function = module.get_function(entry)
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    buffers = []
    for argument in arguments:
        if isinstance(argument, bytes):
            assert len(argument) == MAP_BYTES
            content = argument
        elif isinstance(argument, np.generic):
            content = argument.tobytes()
        else:
            content = np.uint64(argument.data.ptr).tobytes()
        buffers.append(ctypes.create_string_buffer(content, len(content)))
    pointers = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(each) for each in buffers])
    stream = cupy.cuda.get_current_stream()
    driver.launchKernel(
        function.ptr, grid, 1, 1, threads, 1, 1, shared, stream.ptr, ctypes.addressof(pointers), 0
    )  # fmt: skip
    stream.synchronize()


def encoded(described: TensorMap, memory: Any) -> bytes:
    return replace(described, address=memory.data.ptr + described.address).encode()


def test_dynamic_shared_memory_starts_where_the_toys_need_it() -> None:
    text = f"""{toys.HEAD}
extern "C" __global__ void toy(u32* out) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  out[0] = shared_address(smem);
}}
"""
    out = on_device(np.zeros(1, np.uint32))
    launch(toys.device_source(text, {"element": "Half", "wgmma_widths": []}), [out], 1, 32, 65536)
    assert out.get()[0] % 1024 == 0


@pytest.mark.parametrize("gemm", toys.GEMMS.values(), ids=toys.GEMMS)
def test_products_through_tma_and_wgmma_are_exact(gemm: Any) -> None:
    a, b = toys.gemm_inputs(gemm)
    arrays = {
        "a": on_device(to_memory(a, gemm.dtype)),
        "b": on_device(to_memory(b, gemm.dtype)),
        "c": on_device(np.full((64, gemm.n), np.nan, np.float32)),
    }
    maps = [encoded(described, arrays[name]) for name, described in gemm.maps().items()]
    launch(toys.device_source(toys.GEMM, gemm.names()), maps, 1, 128, gemm.shared_memory)
    np.testing.assert_array_equal(arrays["c"].get(), toys.gemm_product(gemm, a, b))


@pytest.mark.parametrize("ring", toys.RINGS.values(), ids=toys.RINGS)
def test_a_producer_and_consumers_share_a_ring_of_tiles(ring: Any) -> None:
    a, b = ring.inputs()
    arrays = {
        "a": on_device(to_memory(a, ring.dtype)),
        "b": on_device(to_memory(b, ring.dtype)),
        "c": on_device(np.full((ring.rows, 64), 0xFFFF, np.uint16)),
    }
    maps = [encoded(described, arrays[name]) for name, described in ring.maps().items()]
    source = toys.device_source(toys.RING, ring.names())
    expected = from_memory(to_memory(ring.product(a, b).astype(np.float32), ring.dtype), ring.dtype)
    for _ in range(20):
        arrays["c"].set(np.full((ring.rows, 64), 0xFFFF, np.uint16))
        launch(source, [*maps, np.int32(ring.tiles)], ring.blocks, 256, ring.shared_memory)
        np.testing.assert_array_equal(from_memory(arrays["c"].get(), ring.dtype), expected)


@pytest.mark.parametrize("case", toys.ATTENTIONS.values(), ids=toys.ATTENTIONS)
def test_attention_in_a_pipeline(case: Any) -> None:
    values = case.inputs()
    arrays = {name: on_device(to_memory(each, case.dtype)) for name, each in zip("qkv", values, strict=True)}
    arrays["o"] = on_device(np.zeros((case.heads, case.rows, 64), np.uint16))
    arguments = [*(encoded(described, arrays[name]) for name, described in case.maps().items()), *case.numbers()]
    source = toys.device_source(toys.ATTENTION, case.names())
    for _ in range(20):
        arrays["o"].set(np.full((case.heads, case.rows, 64), 0xFFFF, np.uint16))
        launch(source, arguments, case.blocks, 384, case.shared_memory)
        found = from_memory(arrays["o"].get(), case.dtype)
        assert case.error(found, case.expected(*values)) < toys.ATTENTION_ERROR[case.dtype]


@pytest.mark.parametrize("box", toys.BOXES.values(), ids=toys.BOXES)
def test_tiles_at_the_edges_of_tensors(box: Any) -> None:
    memory = box.memory()
    target = memory.copy()
    box.view(target)[...] = 0
    first, second = on_device(memory), on_device(target)
    seen = on_device(np.zeros(box.map().box_bytes // 2, np.uint16))
    at = [np.int32(each) for each in (*box.at, 0)[:5]]
    arguments = [encoded(box.map(), first), encoded(box.map(), second), seen, *at, np.int32(box.map().box_bytes)]
    launch(toys.device_source(toys.BOX, box.names()), arguments, 1, 32, box.shared_memory)
    found, expected = seen.get(), box.expected()
    fits = np.where(expected < 0, (found & 0x7FFF) > 0x7C00, found == expected)
    assert fits.all(), np.flatnonzero(~fits)
    np.testing.assert_array_equal(second.get(), box.stored())


DESCRIBED = {
    "dimensions in any order": TensorMap(
        0, "bfloat16", (64, 256, 4, 2), (512, 128, 131072), (64, 256, 1, 1), swizzle=128
    ),
    "a stride of 0": TensorMap(0, "float16", (8, 100, 2, 1), (16, 0, 1600), (8, 100, 1, 1)),
    "the largest box": TensorMap(0, "float32", (256, 256, 1, 1), (1024, 16, 16), (256, 256, 1, 1)),
    "the largest dimension": TensorMap(16, "float16", (2**32, 1, 1, 1, 1), (16, 16, 16, 16), (32, 1, 1, 1, 1), 64),
    "the largest stride": TensorMap(16, "float16", (64, 2, 1, 1), (2**40 - 16, 16, 16), (32, 1, 1, 1), swizzle=64),
}


@pytest.mark.parametrize("described", DESCRIBED.values(), ids=DESCRIBED)
def test_the_driver_takes_what_the_description_allows(described: TensorMap) -> None:
    assert len(encoded(described, on_device(np.zeros(1 << 20, np.uint16)))) == MAP_BYTES
