"""What the caller asks for (`Problem`) and the part of it that is compiled in (`Spec`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashtune import values
from flashtune.errors import InvalidInput

from .mask import Mask

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of one element by dtype name."""

INPUT_DTYPES = ("float16", "bfloat16", "float32")
VECTOR_ALIGNMENT = 16
"""Bytes: the alignment of every row that 16-byte accesses need."""

MAX_LENGTH = 2**31 - 1024
"""The longest sequence: kernels count rows and keys in 32 bits, also those of the tile that ends behind the last."""

Shape = tuple[int, int, int, int]
"""(batch, length, heads, columns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a kernel is compiled for. Everything else of a problem is a run-time argument.

    ``alignment`` is 16 when every row of every tensor starts on a 16-byte boundary, else the size of one element.
    ``out_dtype`` empty means the dtype of the inputs; the device reference asks for float32 or float64.
    ``head_dim_v`` are the columns of v and of the output, 0 where they are ``head_dim``.
    """

    dtype: str
    head_dim: int
    op: str = "forward"
    causal: bool = False
    alignment: int = VECTOR_ALIGNMENT
    out_dtype: str = ""
    head_dim_v: int = 0

    @property
    def key(self) -> str:
        return values.key(self)

    @property
    def output(self) -> str:
        """Dtype of the output tensor."""
        return self.out_dtype or self.dtype

    @property
    def value_dim(self) -> int:
        """Columns of v and of the output."""
        return self.head_dim_v or self.head_dim

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call, without its pointers and strides.

    q is (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_kv, head_dim); v and the output are as k
    and q with ``head_dim_v`` columns, where 0 means ``head_dim``. Query head h reads key head
    ``h // (num_heads // num_heads_kv)``. ``causal`` is aligned bottom-right: key j is visible to query i when
    ``j <= i + seqlen_k - seqlen_q``. A field of a wrong type raises :class:`InvalidType`, a value that is not allowed
    :class:`InvalidInput`.
    """

    dtype: str
    head_dim: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    op: str = "forward"
    causal: bool = False
    alignment: int = VECTOR_ALIGNMENT
    out_dtype: str = ""
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        values.check_types(self)
        if self.op != "forward":
            raise InvalidInput(f"op={values.shown(self.op)} is not known. Known: forward")
        if self.dtype not in INPUT_DTYPES:
            raise InvalidInput(
                f"dtype={values.shown(self.dtype)} is not supported. Supported: {', '.join(INPUT_DTYPES)}"
            )
        if self.out_dtype not in ("", "float32", "float64"):
            raise InvalidInput(f"out_dtype={values.shown(self.out_dtype)} must be empty, float32 or float64")
        if self.out_dtype == self.dtype:
            object.__setattr__(self, "out_dtype", "")
        for name in ("head_dim", "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim_v"):
            got = getattr(self, name)
            least = 0 if name in ("seqlen_k", "head_dim_v") else 1
            most = MAX_LENGTH if name.startswith("seqlen") else 2**31 - 1
            if got < least:
                raise InvalidInput(f"{name}={values.shown(got)} must be at least {least}")
            if got > most:
                raise InvalidInput(f"{name}={values.shown(got)} must be at most {most}")
        if self.num_heads % self.num_heads_kv:
            raise InvalidInput(f"num_heads={self.num_heads} must be a multiple of num_heads_kv={self.num_heads_kv}")
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", 0)
        if self.seqlen_q == 1 and self.causal:  # the last query sees every key
            object.__setattr__(self, "causal", False)
        if self.alignment not in (VECTOR_ALIGNMENT, ITEM_BYTES[self.dtype]):
            raise InvalidInput(
                f"alignment={self.alignment} must be {VECTOR_ALIGNMENT} or one element ({ITEM_BYTES[self.dtype]} bytes)"
            )

    @property
    def key(self) -> str:
        return values.key(self)

    @property
    def spec(self) -> Spec:
        return Spec(
            dtype=self.dtype,
            head_dim=self.head_dim,
            op=self.op,
            causal=self.causal,
            alignment=self.alignment,
            out_dtype=self.out_dtype,
            head_dim_v=self.head_dim_v,
        )

    @property
    def value_dim(self) -> int:
        """Columns of v and of the output."""
        return self.head_dim_v or self.head_dim

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        """Of q, k, v and the output."""
        queries, keys = (self.batch, self.seqlen_q, self.num_heads), (self.batch, self.seqlen_k, self.num_heads_kv)
        width, value_width = self.head_dim, self.value_dim
        return (*queries, width), (*keys, width), (*keys, value_width), (*queries, value_width)

    @property
    def default_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def mask(self) -> Mask:
        """Which keys each query sees."""
        return Mask(self.seqlen_q, self.seqlen_k, self.causal)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask leaves visible, per batch entry and head."""
        return self.mask.pairs

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products over visible pairs (softmax not counted)."""
        return 2 * self.batch * self.num_heads * self.visible_pairs * (self.head_dim + self.value_dim)

    @property
    def min_bytes(self) -> int:
        """Fewest bytes through device memory: each input read once, the output written once."""
        q, k, v, output = map(math.prod, self.shapes)
        return (q + k + v) * ITEM_BYTES[self.dtype] + output * ITEM_BYTES[self.spec.output]

    def __str__(self) -> str:
        width = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        heads = f"h{self.num_heads}" + ("" if self.num_heads == self.num_heads_kv else f"/{self.num_heads_kv}")
        lengths = f"s{self.seqlen_q}" + ("" if self.seqlen_q == self.seqlen_k else f"x{self.seqlen_k}")
        mask = " causal" if self.causal else ""
        align = "" if self.alignment == VECTOR_ALIGNMENT else f" align{self.alignment}"
        return f"{self.dtype} {width} b{self.batch} {lengths} {heads}{mask}{align}"
