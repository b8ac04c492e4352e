"""Tensor maps: what TMA copies to and from. Described here, checked against the driver's rules, encoded by the driver.

The driver fills in 128 bytes that a kernel takes as ``const __grid_constant__ TensorMap`` (``templates/lib/
ptx_sm90.cuh``). They hold the address. Encoding needs libcuda but no GPU work; it takes microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

from flashtune.errors import InvalidInput, LaunchError, NoGpu
from flashtune.values import shown

MAP_BYTES = 128
MAX_RANK = 5
ALIGNMENT = 16
"""Bytes: of the address, of strides and of a row of the box."""
TILE_ALIGNMENT = 128
"""Bytes: of a tile in shared memory. A swizzled one that wgmma reads starts on a whole pattern, 8 times the swizzle."""
MAX_DIM = 2**32
MAX_STRIDE = 2**40
MAX_BOX = 256
MAX_BOX_BYTES = 232448
"""What a thread block can have in shared memory on sm_90. The driver refused a box of 256 KiB there."""

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""The driver's code (``CUtensorMapSwizzle``) by bytes."""
FILLS = {"zero": 0, "nan": 1}

_DTYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor of up to 5 dimensions, innermost first, and the box of it that one copy moves.

    ``dims`` and ``box`` count elements; ``strides`` are bytes between neighbours in dimensions 1 and up (dimension 0 is
    contiguous). ``swizzle`` is the bytes of a permuted row in shared memory, 0 for none; ``fill`` what a load writes
    for elements outside of the tensor: "zero" or "nan". ``l2_bytes`` is how much the L2 cache fetches at once.

    Copies start at multiples of 16 bytes in dimension 0, stores at no negative coordinate. A store writes 16 bytes at a
    time: a tensor whose rows end within 16 bytes (a slice of another one) loses what lies behind them.

    Breaking a rule of the driver raises :class:`InvalidInput`.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fill: str = "zero"
    l2_bytes: int = 256

    def __post_init__(self) -> None:
        if reason := self._wrong():
            raise InvalidInput(f"tensor map: {reason}")

    def _wrong(self) -> str | None:
        for name, value, known in (
            ("dtype", self.dtype, ITEM_BYTES),
            ("swizzle", self.swizzle, SWIZZLES),
            ("fill", self.fill, FILLS),
            ("l2_bytes", self.l2_bytes, _L2_PROMOTIONS),
        ):
            if value not in known:
                return f"{name}={shown(value)} is not one of {', '.join(map(str, known))}"
        if not 1 <= self.rank <= MAX_RANK or len(self.strides) != self.rank - 1 or len(self.box) != self.rank:
            return (
                f"{self.rank} dims, {len(self.strides)} strides, {len(self.box)} box lengths; 1 to {MAX_RANK} dims, "
                "a stride less, as many box lengths"
            )
        if self.address % ALIGNMENT or not 0 <= self.address < 2**64:
            return f"address {self.address:#x} is not a multiple of {ALIGNMENT}"
        for axis, (dim, length) in enumerate(zip(self.dims, self.box, strict=True)):
            if not 1 <= dim <= MAX_DIM:
                return f"dims[{axis}]={dim} is not from 1 to 2**32"
            if not 1 <= length <= MAX_BOX:
                return f"box[{axis}]={length} is not from 1 to {MAX_BOX}"
        for axis, stride in enumerate(self.strides):
            if stride % ALIGNMENT or not 0 <= stride < MAX_STRIDE:
                return f"strides[{axis}]={stride} is not a multiple of {ALIGNMENT} from 0 to below 2**40"
        if self.box_bytes > MAX_BOX_BYTES:
            return f"the box has {self.box_bytes} bytes, more than the {MAX_BOX_BYTES} of a block's shared memory"
        row = self.box[0] * self.item_bytes
        if row % ALIGNMENT:
            return f"a row of the box has {row} bytes, which is not a multiple of {ALIGNMENT}"
        if self.swizzle and row > self.swizzle:
            return f"a row of the box has {row} bytes, more than the swizzle's {self.swizzle}"
        if self.fill == "nan" and self.dtype == "uint8":
            return "fill='nan' needs a dtype of floats"
        return None

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def box_bytes(self) -> int:
        """What a load brings to its mbarrier, also where the box is partly outside of the tensor."""
        return math.prod(self.box) * self.item_bytes

    def encode(self) -> bytes:
        """The 128 bytes that a kernel takes, made by the driver. :class:`NoGpu` without one."""
        function = _driver_function()
        memory = ctypes.create_string_buffer(2 * MAP_BYTES)
        start = -ctypes.addressof(memory) % MAP_BYTES
        status = function(
            ctypes.byref(memory, start),
            _DTYPES[self.dtype],
            self.rank,
            ctypes.c_void_p(self.address),
            (ctypes.c_uint64 * self.rank)(*self.dims),
            (ctypes.c_uint64 * MAX_RANK)(*self.strides),
            (ctypes.c_uint32 * self.rank)(*self.box),
            (ctypes.c_uint32 * self.rank)(*[1] * self.rank),
            0,  # no interleave
            SWIZZLES[self.swizzle],
            _L2_PROMOTIONS[self.l2_bytes],
            FILLS[self.fill],
        )
        if status:
            raise LaunchError(f"the driver refused {self} (cuTensorMapEncodeTiled: error {status})")
        return memory.raw[start : start + MAP_BYTES]


@functools.cache
def _driver_function() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except OSError as error:
        raise NoGpu(f"Tensor maps are encoded by the CUDA driver, which can't be loaded: {error}") from error
    except AttributeError as error:
        raise NoGpu("Tensor maps need a CUDA driver of 12.0 or newer: cuTensorMapEncodeTiled is not in it") from error
    pointer, enum = ctypes.c_void_p, ctypes.c_int
    function.argtypes = (
        pointer, enum, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer, enum, enum, enum, enum
    )  # fmt: skip
    function.restype = ctypes.c_int
    return function
