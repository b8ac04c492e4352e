"""Configs and problems that show the faults of mutations/*.toml, by the names that stand there behind ``on``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray
from setup_values import (
    at_the_ends,
    falling,
    further_far,
    growing,
    growing_far,
    in_one_column,
    large,
    large_nonfinite,
    nonfinite,
    one_far,
    rising,
    unseen,
)

from flashtune.codegen.gpu.table import gpu_by_alias

Array = NDArray[Any]

SM80: dict[str, object] = {
    "block_m": 32,
    "block_n": 16,
    "num_warps": 2,
    "num_stages": 2,
    "q_in_registers": False,
    "blocks_per_sm": 1,
}
SM90: dict[str, object] = {
    "warpgroups": 2,
    "block_n": 32,
    "num_stages": 2,
    "q_buffers": 1,
    "softmax": "lazy",
    "ping_pong": False,
    "scheduler": "static",
    "blocks_per_sm": 1,
}
FMA: dict[str, object] = {
    "block_m": 16,
    "block_n": 16,
    "num_threads": 64,
    "threads_n": 8,
    "share_kv": False,
    "blocks_per_sm": 1,
}
# 62 keys: the last row of the first 32, and that of the first 16, is the only one to see the first key of a block.
PROBLEM: dict[str, Any] = {
    "dtype": "float16", "head_dim": 32, "batch": 2, "seqlen_q": 45, "seqlen_k": 62, "num_heads": 4, "num_heads_kv": 2,
    "causal": True,
}  # fmt: skip

# Tiles of 128 rows, of which the last is not full, for two thread blocks. 180 rows see the first key.
SM90_PROBLEM: dict[str, Any] = {"batch": 1, "seqlen_q": 210, "seqlen_k": 180, "num_heads": 2, "num_heads_kv": 1}


@dataclass(frozen=True)
class Setup:
    """A config and a problem; ``values`` changes random q, k and v in place."""

    family: str
    config: Mapping[str, object]
    problem: Mapping[str, Any] = field(default_factory=dict)
    values: Callable[[Array, Array, Array], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    spread: bool = False  # each tensor has strides of its own


def sm80(
    values: Callable[[Array, Array, Array], None] | None = None,
    *,
    config: dict[str, object] | None = None,
    options: Mapping[str, Any] | None = None,
    spread: bool = False,
    **problem: Any,
) -> Setup:
    return Setup("sm80_fwd", SM80 | (config or {}), PROBLEM | problem, values, options or {}, spread)


def fma(
    values: Callable[[Array, Array, Array], None] | None = None,
    *,
    config: dict[str, object] | None = None,
    options: Mapping[str, Any] | None = None,
    spread: bool = False,
    **problem: Any,
) -> Setup:
    return Setup(
        "fma_fwd", FMA | (config or {}), PROBLEM | {"dtype": "float32"} | problem, values, options or {}, spread
    )


def sm90(
    values: Callable[[Array, Array, Array], None] | None = None,
    *,
    config: dict[str, object] | None = None,
    options: Mapping[str, Any] | None = None,
    spread: bool = False,
    **problem: Any,
) -> Setup:
    """On a chip of two SMs, so that thread blocks take several tiles."""
    on_few = {"gpu": replace(gpu_by_alias("h200"), num_sms=2)}
    whole = PROBLEM | SM90_PROBLEM | problem
    return Setup("sm90_fwd", SM90 | (config or {}), whole, values, on_few | dict(options or {}), spread)


LARGE: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 64, "seqlen_q": 3, "seqlen_k": 3}
NEGATIVE = {"scale": -0.7}
SPREAD = {"out_strides": (30000, 224, 56, 1)}
# 78 keys are 5 blocks: parts of 2, 2 and 1, and a fourth that is empty. Most of the first 32 rows see nothing of the
# third.
SPLIT: dict[str, Any] = {"config": {"num_splits": 4}, "seqlen_k": 78}
PACKED: dict[str, object] = {"pack_heads": True}
ONE_WARP: dict[str, object] = {"block_m": 16, "num_warps": 1}
TWO_Q: dict[str, object] = {"q_buffers": 2}
OVERLAP: dict[str, object] = {"q_buffers": 2, "overlap_tiles": True}
LATE: dict[str, object] = {"softmax": "late", "block_n": 64, "early_columns": 32}

SETUPS = {
    "base": sm80(),
    "not causal": sm80(causal=False),
    "Q kept": sm80(config={"q_in_registers": True}),
    "Q kept, one stage": sm80(config={"q_in_registers": True, "num_stages": 1}),
    "one stage": sm80(config={"num_stages": 1}),
    "three stages": sm80(config={"num_stages": 3}),
    "wide blocks": sm80(config={"block_n": 32}),
    "two row tiles": sm80(config={"block_m": 64}),
    "a tile ends on the diagonal": sm80(seqlen_q=64, seqlen_k=78),
    "empty rows": sm80(seqlen_k=5),
    "growing scores": sm80(growing),
    "large scores": sm80(large, **LARGE),
    "NaN behind the mask": sm80(nonfinite),
    "infinities at the ends of blocks": sm80(at_the_ends),
    "negative scale": sm80(options=NEGATIVE),
    "no LSE": sm80(options={"want_lse": False}),
    "unaligned": sm80(alignment=2),
    "unaligned, head dim 40": sm80(alignment=2, head_dim=40),
    "strides": sm80(options=SPREAD, spread=True),
    "large scores, several blocks": sm80(large, **LARGE | {"seqlen_k": 62}),
    "large scores, empty rows": sm80(large, **LARGE | {"seqlen_q": 45, "seqlen_k": 5}),
    "longer queries": sm80(seqlen_q=62, seqlen_k=45),
    "falling scores": sm80(falling),
    "scores that grow far": sm80(growing_far),
    "scores that rise from far below": sm80(rising, causal=False),
    "one warp": sm80(config=ONE_WARP, head_dim=64),
    "one warp, head dim 128": sm80(config=ONE_WARP, head_dim=128),
    "split": sm80(**SPLIT),
    "split, growing scores": sm80(growing, **SPLIT),
    "split, negative scale": sm80(options=NEGATIVE, **SPLIT),
    "split, falling scores": sm80(falling, **SPLIT),
    "split, scores that rise from far below": sm80(rising, causal=False, **SPLIT),
    "split, strides": sm80(options=SPREAD, spread=True, **SPLIT),
    "split, two row tiles": sm80(config={"num_splits": 4, "block_m": 64}, seqlen_k=78),
    "split, a block each": sm80(config={"num_splits": 64, "num_stages": 3}, seqlen_k=78),
    "split, odd number of tiles": sm80(**SPLIT, batch=1, num_heads=3, num_heads_kv=3),
    "split, empty rows": sm80(config={"num_splits": 2}, seqlen_k=20),
    "split, NaN behind the mask": sm80(nonfinite, config={"num_splits": 4}),
    "split, a single part": sm80(config={"num_splits": 4}, seqlen_k=5),
    "packed": sm80(config=PACKED),
    "packed, strides": sm80(
        config=PACKED, options={"out_strides": (30000, 336, 56, 1)}, spread=True, num_heads=6, num_heads_kv=2
    ),
    "packed, head dim 40": sm80(config=PACKED, head_dim=40),
    "packed, unaligned": sm80(config=PACKED, alignment=2),
    "packed, NaN behind the mask": sm80(nonfinite, config=PACKED),
    "packed, split": sm80(config={"num_splits": 4, **PACKED}, seqlen_k=78),
    "wide values": sm80(head_dim=24, head_dim_v=56),
    "head dim 16": sm80(head_dim=16),
    "head dim 24": sm80(head_dim=24),
    "head dim 40": sm80(head_dim=40),
    "sm90": sm90(),
    "sm90, not causal": sm90(causal=False),
    "sm90, three stages": sm90(config={"num_stages": 3}),
    "sm90, two Q": sm90(config=TWO_Q, num_heads=4),
    "sm90, overlap": sm90(config=OVERLAP),
    "sm90, turns": sm90(config={"ping_pong": True}),
    "sm90, turns, overlap": sm90(config={"ping_pong": True, "warpgroups": 3} | OVERLAP),
    "sm90, dynamic": sm90(config={"scheduler": "dynamic"}),
    "sm90, sections": sm90(config={"heads_per_section": 2, "warpgroups": 1}, num_heads=3, num_heads_kv=3),
    "sm90, groups": sm90(batch=2, num_heads=4, num_heads_kv=2),
    "sm90, growing scores": sm90(growing, causal=False),
    "sm90, exact, growing scores": sm90(growing, config={"softmax": "exact"}, causal=False),
    "sm90, late, unseen scores": sm90(unseen, config=LATE, causal=False),
    "sm90, late, scores that grow far": sm90(growing_far, config=LATE, causal=False),
    "sm90, late, a score further above": sm90(further_far, config=LATE, causal=False),
    "sm90, late, one score far above": sm90(one_far, config=LATE, causal=False),
    "sm90, large scores, NaN behind the mask": sm90(large_nonfinite, dtype="bfloat16"),
    "sm90, narrow values": sm90(head_dim=64, head_dim_v=32),
    "sm90, wide values": sm90(head_dim=32, head_dim_v=72),
    "sm90, large scores": sm90(large, **LARGE),
    "sm90, wide blocks": sm90(config={"block_n": 64}, seqlen_k=170),
    "sm90, very wide blocks": sm90(config={"block_n": 160}, seqlen_k=300),
    "sm90, few keys": sm90(seqlen_k=20),
    "sm90, empty rows": sm90(seqlen_q=130, seqlen_k=180),
    "sm90, head dim 72": sm90(head_dim=72),
    "sm90, head dim 128": sm90(head_dim=128),
    "sm90, no LSE": sm90(options={"want_lse": False}),
    "sm90, strides": sm90(nonfinite, options={"out_strides": (60000, 224, 56, 1)}, spread=True, batch=2),
    "sm90, NaN behind the mask": sm90(nonfinite),
    "sm90, NaN in one column": sm90(in_one_column, head_dim=128),
    "sm90, negative scale": sm90(
        nonfinite, config={"scheduler": "tile"}, options=NEGATIVE, dtype="bfloat16"
    ),  # weights of float16 come to 0, and 0 times an infinity to NaN
    "fma": fma(),
    "fma, float16": fma(dtype="float16"),
    "fma, shared K and V": fma(config={"share_kv": True}),
    "fma, a tile ends on the diagonal": fma(seqlen_q=64, seqlen_k=78),
    "fma, not causal": fma(causal=False),
    "fma, empty rows": fma(seqlen_k=5),
    "fma, NaN behind the mask": fma(nonfinite),
    "fma, negative scale": fma(options=NEGATIVE),
    "fma, no LSE": fma(options={"want_lse": False}),
    "fma, unaligned": fma(alignment=4),
    "fma, strides": fma(options=SPREAD, spread=True),
    "fma, head dim 64": fma(head_dim=64),
    "fma, narrow values": fma(head_dim_v=24),
    "fma, wide values in the place of K": fma(config={"share_kv": True}, head_dim_v=40),
}
