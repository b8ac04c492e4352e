from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashtune.codegen.plan import tensor_map
from flashtune.codegen.plan.tensor_map import MAP_BYTES, TensorMap
from flashtune.emulator.tensors import MAP_ADDRESS, encode_for_emulator
from flashtune.errors import InvalidInput, NoGpu

GOOD = TensorMap(
    address=1 << 20,
    dtype="bfloat16",
    dims=(128, 1000, 8, 2),
    strides=(2048, 256, 2048000),
    box=(64, 128, 1, 1),
    swizzle=128,
)


def test_bytes_count_the_whole_box() -> None:
    assert GOOD.box_bytes == 64 * 128 * 2
    assert GOOD.rank == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "float8"}, "dtype='float8' is not one of float16, bfloat16, float32, uint8"),
        ({"swizzle": 16}, "swizzle=16 is not one of 0, 32, 64, 128"),
        ({"fill": "one"}, "fill='one' is not one of zero, nan"),
        ({"l2_bytes": 32}, "l2_bytes=32 is not one of 0, 64, 128, 256"),
        ({"address": 8}, "address 0x8 is not a multiple of 16"),
        ({"address": -16}, "address -0x10 is not a multiple"),
        ({"dims": (128, 1000, 8)}, "3 dims, 3 strides, 4 box lengths"),
        ({"dims": (1,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "6 dims, 5 strides"),
        ({"dims": (128, 0, 8, 2)}, r"dims\[1\]=0 is not from 1"),
        ({"dims": (128, 2**32 + 1, 8, 2)}, r"dims\[1\]=4294967297"),
        ({"box": (64, 257, 1, 1)}, r"box\[1\]=257 is not from 1 to 256"),
        ({"box": (64, 0, 1, 1)}, r"box\[1\]=0 is not from 1 to 256"),
        ({"strides": (2048, 8, 2048000)}, r"strides\[1\]=8 is not a multiple of 16"),
        ({"strides": (2048, 2**40, 2048000)}, r"strides\[1\]=1099511627776"),
        ({"strides": (2048, -16, 2048000)}, r"strides\[1\]=-16"),
        ({"box": (4, 8, 1, 1), "swizzle": 0}, "a row of the box has 8 bytes, which is not a multiple of 16"),
        ({"box": (256, 256, 2, 1), "swizzle": 0}, "the box has 262144 bytes, more than the 232448 of a block's shared"),
        ({"box": (72, 8, 1, 1)}, "a row of the box has 144 bytes, more than the swizzle's 128"),
        ({"dtype": "uint8", "fill": "nan"}, "fill='nan' needs a dtype of floats"),
    ],
)
def test_what_the_driver_would_refuse_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=f"^tensor map: {text}"):
        replace(GOOD, **changes)


def test_the_emulator_reads_the_fields_in_order() -> None:
    encoded = encode_for_emulator(GOOD)
    assert len(encoded) == MAP_BYTES
    numbers = [int.from_bytes(encoded[start : start + 8], "little") for start in range(0, 88, 8)]
    assert encoded[:8] == b"tnsormap"
    assert numbers[MAP_ADDRESS // 8] == 0
    assert numbers[2:] == [128, 1000, 8, 2, 1, 2048, 256, 2048000, 0]
    assert list(encoded[88:102]) == [64, 0, 128, 0, 1, 0, 1, 0, 1, 0, 4, 2, 128, 0]


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(tensor_map.ctypes, "CDLL", missing)
    tensor_map._driver_function.cache_clear()
    with pytest.raises(NoGpu, match=r"encoded by the CUDA driver, which can't be loaded: libcuda.so.1"):
        GOOD.encode()
