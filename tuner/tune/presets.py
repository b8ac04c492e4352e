"""Named sets of problems to tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput

MODEL_WIDTH = 2048
"""num_heads * head_dim of the grid."""
TOKENS = 16384
"""batch * seqlen of the grid."""


def _square(
    batch: int, seqlen: int, heads: int, head_dim: int, *, heads_kv: int | None = None, causal: bool = False
) -> Problem:
    return Problem(
        dtype="bfloat16",
        head_dim=head_dim,
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads=heads,
        num_heads_kv=heads_kv or heads,
        causal=causal,
    )


def _quick() -> list[Problem]:
    """4 common problems in bfloat16, head_dim 64 and 128."""
    return [
        _square(4, 4096, 16, 128, causal=True),
        _square(4, 4096, 16, 128),
        _square(4, 4096, 32, 64, causal=True),
        _square(32, 512, 32, 64),
    ]


def _grid() -> list[Problem]:
    """head_dim 64, 128, 256; causal or not; 512 to 16384 tokens, 16384 in all."""
    return [
        _square(TOKENS // seqlen, seqlen, MODEL_WIDTH // head_dim, head_dim, causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def _llm() -> list[Problem]:
    """Causal prefills with grouped heads (32/8 and 64/8), head_dim 128, 512 to 32768 tokens."""
    return [
        _square(batch, seqlen, heads, 128, heads_kv=heads_kv, causal=True)
        for heads, heads_kv in ((32, 8), (64, 8))
        for batch, seqlen in ((16, 512), (4, 2048), (1, 8192), (1, 32768))
    ]


def _wide() -> list[Problem]:
    """Beside the grid: float16, head_dim 96 and 192, grouped heads, one short sequence, decoding, narrower values."""
    both = (False, True)
    return [
        *(replace(_square(4, 4096, 16, 128, causal=causal), dtype="float16") for causal in both),
        *(_square(4, 4096, 16, 96, causal=causal) for causal in both),
        *(_square(4, 4096, 8, 192, causal=causal) for causal in both),
        *(_square(4, 4096, 32, 128, heads_kv=8, causal=causal) for causal in both),
        *(_square(1, 1024, 16, 128, causal=causal) for causal in both),
        replace(_square(1, 8192, 32, 128, heads_kv=8), seqlen_q=1),
        replace(_square(8, 8192, 32, 128, heads_kv=8), seqlen_q=1),
        replace(_square(64, 2048, 32, 128), seqlen_q=1),
        *(replace(_square(4, 4096, 16, 192, causal=causal), head_dim_v=128) for causal in both),
    ]


def _models() -> list[Problem]:
    """Heads and widths of published models at common lengths, beside the grid: what real calls lie near to."""
    shapes = (
        # num_heads, num_heads_kv, head_dim, causal, tokens in all; such as
        (32, 8, 128, True, 16384),  # Llama 3 8B, Mistral 7B, Qwen3 8B
        (40, 8, 128, True, 32768),  # Qwen2.5 14B and 32B
        (24, 24, 128, False, 16384),  # FLUX.1
        (16, 16, 64, False, 8192),  # BERT and ViT of the large sizes
        (16, 8, 256, True, 16384),  # Gemma 2 9B
        (32, 32, 96, True, 16384),  # Phi-3 mini
    )
    return [
        _square(max(1, tokens // seqlen), seqlen, heads, head_dim, heads_kv=heads_kv, causal=causal)
        for heads, heads_kv, head_dim, causal, tokens in shapes
        for seqlen in (768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
    ]


_PRESETS: dict[str, Callable[[], list[Problem]]] = {
    "quick": _quick,
    "grid": _grid,
    "wide": _wide,
    "llm": _llm,
    "models": _models,
}


def preset(name: str) -> list[Problem]:
    """The problems of preset ``name``."""
    if name not in _PRESETS:
        raise InvalidInput(f"preset {name[:40]!r} is not known. Known: {', '.join(_PRESETS)}")
    return _PRESETS[name]()
