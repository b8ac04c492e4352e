"""What is launched: a `Plan` names kernels, grids and memory; it holds no pointers and needs no GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem

from .config import Config
from .tensor_map import ALIGNMENT, TensorMap

if TYPE_CHECKING:
    from flashtune.codegen.compiler.render import Source

PARAMS_FIELDS: tuple[tuple[str, str], ...] = (
    ("q", "Q"),
    ("k", "Q"),
    ("v", "Q"),
    ("out", "Q"),
    ("lse", "Q"),
    ("workspace", "Q"),
    ("q_stride_batch", "q"),
    ("q_stride_row", "q"),
    ("q_stride_head", "q"),
    ("k_stride_batch", "q"),
    ("k_stride_row", "q"),
    ("k_stride_head", "q"),
    ("v_stride_batch", "q"),
    ("v_stride_row", "q"),
    ("v_stride_head", "q"),
    ("out_stride_batch", "q"),
    ("out_stride_row", "q"),
    ("out_stride_head", "q"),
    ("batch", "i"),
    ("seqlen_q", "i"),
    ("seqlen_k", "i"),
    ("num_heads", "i"),
    ("num_heads_kv", "i"),
    ("num_splits", "i"),
    ("heads_per_section", "i"),
    ("scale", "f"),
)
"""Members of ``struct Params`` in ``templates/lib/params.cuh``, in order, with their `struct` codes.

Strides count elements. ``lse`` is a contiguous (batch, num_heads, seqlen_q) array or null, ``workspace`` null where the
plan wants none.
"""

POINTERS = struct.Struct("<6Q")
ARGUMENTS = struct.Struct("<" + "".join(code for name, code in PARAMS_FIELDS[6:]))
PARAMS_BYTES = POINTERS.size + ARGUMENTS.size

TENSORS = ("q", "k", "v", "out")
"""Those with strides, in the order in which strides are given."""

Strides = tuple[int, int, int]
"""Elements between batch entries, rows and heads of one tensor, in this order; the last dimension has stride 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBox:
    """How a kernel that uses TMA sees a tensor: boxes of ``rows`` rows and ``columns`` columns of one head.

    ``tensor`` is q, k, v or out. A row of the box is one swizzled line of shared memory, of 64 or 128 bytes.
    """

    tensor: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of a plan."""

    source: Source
    entry: str
    grid: tuple[int, int, int]
    threads: int
    shared_memory: int
    """Bytes of dynamic shared memory."""
    boxes: tuple[TensorBox, ...] = ()
    """Tensor maps that it takes behind ``struct Params``, in order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a launch of ``problem`` on ``gpu`` needs, but the pointers."""

    problem: Problem
    config: Config
    gpu: Gpu
    kernels: tuple[Kernel, ...]
    num_splits: int = 1
    """Thread blocks that share the keys of one tile of queries."""
    workspace_bytes: int = 0
    """Device memory that each launch needs for itself while it runs."""
    zeroed_bytes: int = 0
    """So much of its start must be 0 at the launch."""
    heads_per_section: int = 1
    """Heads whose tiles are listed together, for kernels whose thread blocks take several tiles."""

    @property
    def family(self) -> str:
        return self.config.family


def pack_arguments(plan: Plan, strides: tuple[Strides, Strides, Strides, Strides], scale: float) -> bytes:
    """The part of ``struct Params`` behind the pointers. ``strides`` are those of q, k, v and out."""
    flat = [stride for tensor in strides for stride in tensor]
    problem = plan.problem
    return ARGUMENTS.pack(
        *flat,
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_heads_kv,
        plan.num_splits,
        plan.heads_per_section,
        scale,
    )


def describe_map(box: TensorBox, problem: Problem, strides: tuple[Strides, ...], address: int) -> TensorMap:
    """The tensor map of ``box``: dimensions (columns, length, heads, batch), ``strides`` those of `TENSORS`."""
    item = 2  # what uses TMA computes with 16-bit floats
    batch, row, head = strides[TENSORS.index(box.tensor)]
    of_keys = box.tensor in ("k", "v")
    length, heads = (problem.seqlen_k, problem.num_heads_kv) if of_keys else (problem.seqlen_q, problem.num_heads)
    counts = (length, heads, problem.batch)
    # The stride of a dimension of 1 is anything; TMA wants it legal all the same.
    steps = [
        ALIGNMENT if count == 1 else item * stride for count, stride in zip(counts, (row, head, batch), strict=True)
    ]
    return TensorMap(
        address=address,
        dtype=problem.dtype,
        dims=(problem.value_dim if box.tensor in ("v", "out") else problem.head_dim, *counts),
        strides=tuple(steps),
        box=(box.columns, box.rows, 1, 1),
        swizzle=item * box.columns,
    )
