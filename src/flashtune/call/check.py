"""Validates one call before anything is allocated or launched, and turns it into a `Problem` with its strides.

Runs once per kind of call: what passes is remembered by shapes, strides, dtypes, devices and options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashtune.codegen.plan.config import Config
from flashtune.codegen.plan.plan import Strides
from flashtune.codegen.plan.tensor_map import MAX_STRIDE
from flashtune.codegen.problem.problem import INPUT_DTYPES, VECTOR_ALIGNMENT, Problem
from flashtune.errors import InvalidInput, InvalidType

from .arrays import ArrayFacts, Options
from .options import LAYOUTS, check_options

Extent = tuple[int, int]
"""First byte and one past the last byte that a tensor reaches, counted from its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that is legal. ``strides`` and ``problem.alignment`` are those of the copies where ``copies`` says so."""

    problem: Problem
    empty: bool
    """Batch or seqlen_q is 0: the result has no element. ``problem`` then has 1 in place of each 0."""
    strides: tuple[Strides, Strides, Strides, Strides]
    scale: float
    return_lse: bool
    config: Config | None
    copies: tuple[bool, bool, bool]
    """Whether q, k and v are copied first, since their last stride is not 1."""
    shape: tuple[int, ...]
    """Of out, in the caller's layout."""
    lse_shape: tuple[int, int, int]
    extents: tuple[Extent, Extent, Extent, Extent]
    """Of q, k, v and out as the caller gave them."""


def check_call(q: ArrayFacts, k: ArrayFacts, v: ArrayFacts, out: ArrayFacts | None, options: Options) -> Call:
    """Everything that can be wrong with a call but the overlap of ``out``, which depends on addresses."""
    causal, scale, return_lse, layout, config = options
    check_options(causal, scale, return_lse, layout, config)
    inputs = (q, k, v)
    batch_at, row_at, head_at = LAYOUTS[layout]
    _check_arrays(inputs, layout)
    batch, seqlen_q, num_heads, head_dim = (q.shape[at] for at in (batch_at, row_at, head_at, 3))
    seqlen_k, num_heads_kv = k.shape[row_at], k.shape[head_at]
    _check_dims(inputs, layout)
    if num_heads < 1 or num_heads_kv < 1 or num_heads % num_heads_kv:
        raise InvalidInput(
            f"q has {num_heads} heads, k and v have {num_heads_kv}: both must be at least 1, and the heads of q a "
            "multiple of those of k and v"
        )
    head_dim_v = v.shape[3]
    for name, width in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):  # a Problem takes 0 for the width of k
        if width < 1:
            raise InvalidInput(f"{name}={width} must be at least 1")
    shape = (*q.shape[:3], head_dim_v)
    if out is not None:
        _check_out(out, q, shape)

    copies = (_needs_copy(q), _needs_copy(k), _needs_copy(v))
    used = [_contiguous(each, each.shape) if copied else each for each, copied in zip(inputs, copies, strict=True)]
    used.append(out or _contiguous(q, shape))
    problem = Problem(
        dtype=q.dtype,
        head_dim=head_dim,
        batch=max(batch, 1),
        seqlen_q=max(seqlen_q, 1),
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        causal=causal,
        head_dim_v=head_dim_v,
        alignment=VECTOR_ALIGNMENT if all(map(_is_aligned, used)) else q.item_bytes,
    )
    order = (batch_at, row_at, head_at)
    q_strides, k_strides, v_strides, out_strides = (_strides(each, order) for each in used)
    return Call(
        problem=problem,
        empty=batch == 0 or seqlen_q == 0,
        strides=(q_strides, k_strides, v_strides, out_strides),
        scale=problem.default_scale if scale is None else scale,
        return_lse=return_lse,
        config=config,
        copies=copies,
        shape=shape,
        lse_shape=(batch, num_heads, seqlen_q),
        extents=(extent(q), extent(k), extent(v), extent(used[3])),
    )


def check_overlap(call_extents: Sequence[Extent], q: int, k: int, v: int, out: int) -> None:
    """Refuses an ``out`` at address ``out`` whose memory range shares a byte with that of q, k or v."""
    (q_low, q_high), (k_low, k_high), (v_low, v_high), (first, last) = call_extents
    begin, end = out + first, out + last
    if (
        (q + q_high <= begin or end <= q + q_low)
        and (k + k_high <= begin or end <= k + k_low)
        and (v + v_high <= begin or end <= v + v_low)
    ):
        return  # as nearly always, and on the way of each call
    for name, address, (low, high) in zip("qkv", (q, k, v), call_extents, strict=False):
        if low < high and first < last and begin < address + high and address + low < end:
            raise InvalidInput(
                f"out (bytes {begin:#x} to {end:#x}) overlaps {name} (bytes {address + low:#x} to "
                f"{address + high:#x}): out needs memory of its own"
            )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * max(shape[at + 1], 1)
    return tuple(strides)


def extent(array: ArrayFacts) -> Extent:
    if 0 in array.shape:
        return (0, 0)
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(step for step in steps if step < 0)
    high = sum(step for step in steps if step > 0) + 1
    return (low * array.item_bytes, high * array.item_bytes)


def _check_arrays(inputs: tuple[ArrayFacts, ArrayFacts, ArrayFacts], layout: str) -> None:
    q = inputs[0]
    shape = "(batch, seqlen, num_heads, head_dim)" if layout == "bshd" else "(batch, num_heads, seqlen, head_dim)"
    for each in inputs:
        if len(each.shape) != 4:
            raise InvalidInput(
                f"{each.name} has shape {each.shape}, {len(each.shape)} dimensions; layout={layout!r} takes 4: {shape}"
            )
    for each in inputs:
        if each.dtype not in INPUT_DTYPES:
            raise InvalidType(f"{each.name} has dtype {each.dtype}. Supported: {', '.join(INPUT_DTYPES)}")
        if each.dtype != q.dtype:
            raise InvalidType(f"q has dtype {q.dtype}, {each.name} has {each.dtype}: q, k and v must have one dtype")
        if each.device != q.device:
            raise InvalidInput(f"q is on {q.device}, {each.name} is on {each.device}: all must be on one device")
        if each.address % each.item_bytes:
            raise InvalidInput(
                f"{each.name} is at address {each.address:#x}, which is not a multiple of its {each.item_bytes}-byte "
                "elements"
            )


def _check_dims(inputs: tuple[ArrayFacts, ArrayFacts, ArrayFacts], layout: str) -> None:
    q, k, v = inputs
    batch_at, row_at, head_at = LAYOUTS[layout]
    must_agree = [
        (q, k, 3, "head_dim"),
        (q, k, batch_at, "batch"),
        (q, v, batch_at, "batch"),
        (k, v, row_at, "seqlen"),
        (k, v, head_at, "num_heads"),
    ]
    for one, other, at, what in must_agree:
        if one.shape[at] != other.shape[at]:
            raise InvalidInput(
                f"{one.name} has {what} {one.shape[at]}, {other.name} has {what} {other.shape[at]} (shapes "
                f"{one.shape} and {other.shape}, layout={layout!r}): they must be equal"
            )


def _check_out(out: ArrayFacts, q: ArrayFacts, shape: tuple[int, ...]) -> None:
    if out.shape != shape:
        of = "that of q" if shape == q.shape else "that of q with the head_dim of v"
        raise InvalidInput(f"out has shape {out.shape}, it must have {of}: {shape}")
    if out.dtype != q.dtype:
        raise InvalidType(f"out has dtype {out.dtype}, it must have that of q: {q.dtype}")
    if out.device != q.device:
        raise InvalidInput(f"out is on {out.device}, q is on {q.device}: all must be on one device")
    if out.address % out.item_bytes:
        raise InvalidInput(f"out is at address {out.address:#x}, not a multiple of its {out.item_bytes}-byte elements")
    if not out.writable:
        raise InvalidInput("out is read-only")
    if 0 in out.shape:
        return
    if out.shape[3] > 1 and out.strides[3] != 1:
        raise InvalidInput(f"out has strides {out.strides} (in elements): the last must be 1")
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(out.strides, out.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise InvalidInput(f"out has shape {out.shape} and strides {out.strides} (in elements): it overlaps itself")
        reach += (size - 1) * stride


def _needs_copy(array: ArrayFacts) -> bool:
    return array.shape[3] > 1 and array.strides[3] != 1 and 0 not in array.shape


def _contiguous(like: ArrayFacts, shape: tuple[int, ...]) -> ArrayFacts:
    """A new array, a copy or the output, as it will be: allocators align to 16 bytes and more."""
    return ArrayFacts(like.name, shape, contiguous_strides(shape), like.dtype, like.item_bytes, like.device, 0)


def _is_aligned(array: ArrayFacts) -> bool:
    """Whether rows start on 16-byte boundaries, at strides that TMA takes: none backwards, none of a terabyte.

    Strides of dimensions of one element are never used.
    """
    reached = [stride for stride, size in zip(array.strides[:3], array.shape[:3], strict=True) if size > 1]
    return array.address % VECTOR_ALIGNMENT == 0 and all(
        each * array.item_bytes % VECTOR_ALIGNMENT == 0 and 0 <= each * array.item_bytes < MAX_STRIDE
        for each in reached
    )


def _strides(array: ArrayFacts, order: tuple[int, int, int]) -> Strides:
    """Batch, row and head stride; 0 where there is one element, since libraries put any number there."""
    batch, row, head = (array.strides[at] if array.shape[at] > 1 else 0 for at in order)
    return (batch, row, head)
