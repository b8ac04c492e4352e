"""Generated sources of a few points per family, kept in git so that a template change shows its effect in review."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from flashtune.codegen.compiler.render import Source, without_directives
from flashtune.codegen.families.fma_fwd import FmaFwdConfig
from flashtune.codegen.families.registry import family
from flashtune.codegen.families.sm80_fwd import Sm80FwdConfig
from flashtune.codegen.families.sm90_fwd import Sm90FwdConfig
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Spec

GOLDEN = Path(__file__).parent / "golden"


def sm80(**changes: object) -> Sm80FwdConfig:
    values: dict[str, object] = {
        "block_m": 128,
        "block_n": 64,
        "num_warps": 4,
        "num_stages": 2,
        "q_in_registers": False,
        "blocks_per_sm": 1,
    }
    return Sm80FwdConfig.from_json(values | changes)


def sm90(**changes: object) -> Sm90FwdConfig:
    values: dict[str, object] = {
        "warpgroups": 2,
        "block_n": 128,
        "num_stages": 2,
        "q_buffers": 2,
        "softmax": "lazy",
        "ping_pong": False,
        "scheduler": "static",
        "blocks_per_sm": 1,
    }
    return Sm90FwdConfig.from_json(values | changes)


def fma(**changes: object) -> FmaFwdConfig:
    values = {each.name: each.choices[0] for each in FmaFwdConfig.parameters() if each.neutral is None}
    return FmaFwdConfig.from_json(values | changes)


POINTS: dict[str, tuple[Spec, Config]] = {
    "sm80_fwd-bfloat16-d128": (Spec(dtype="bfloat16", head_dim=128), sm80()),
    "sm80_fwd-bfloat16-d128-causal": (Spec(dtype="bfloat16", head_dim=128, causal=True), sm80()),
    "sm80_fwd-float16-d64-causal": (Spec(dtype="float16", head_dim=64, causal=True), sm80(block_n=128, num_stages=1)),
    "sm80_fwd-float16-d72": (Spec(dtype="float16", head_dim=72), sm80(block_m=64)),
    "sm80_fwd-bfloat16-d256-q-in-registers": (
        Spec(dtype="bfloat16", head_dim=256),
        sm80(num_warps=8, q_in_registers=True),
    ),
    "sm80_fwd-float16-d40-unaligned": (Spec(dtype="float16", head_dim=40, alignment=2), sm80(num_stages=3)),
    "sm80_fwd-bfloat16-d128-split-packed": (
        Spec(dtype="bfloat16", head_dim=128),
        sm80(block_m=16, num_warps=1, pack_heads=True, num_splits=0),
    ),
    "sm80_fwd-float16-d64-v40": (Spec(dtype="float16", head_dim=64, head_dim_v=40, causal=True), sm80()),
    "sm90_fwd-bfloat16-d192-v128": (
        Spec(dtype="bfloat16", head_dim=192, head_dim_v=128, causal=True),
        sm90(block_n=96, softmax="late", early_columns=32),
    ),
    "sm90_fwd-bfloat16-d128": (Spec(dtype="bfloat16", head_dim=128), sm90()),
    "sm90_fwd-bfloat16-d128-causal-late": (
        Spec(dtype="bfloat16", head_dim=128, causal=True),
        sm90(softmax="late", early_columns=32, scheduler="dynamic"),
    ),
    "sm90_fwd-float16-d64-causal-ping-pong": (
        Spec(dtype="float16", head_dim=64, causal=True),
        sm90(warpgroups=3, ping_pong=True),
    ),
    "sm90_fwd-float16-d64-overlap": (
        Spec(dtype="float16", head_dim=64),
        sm90(early_columns=48, overlap_tiles=True, num_stages=3),
    ),
    "sm90_fwd-float16-d72-two-blocks": (
        Spec(dtype="float16", head_dim=72),
        sm90(warpgroups=1, block_n=80, q_buffers=1, scheduler="tile", blocks_per_sm=2),
    ),
    "sm90_fwd-bfloat16-d256-exact": (
        Spec(dtype="bfloat16", head_dim=256),
        sm90(block_n=80, q_buffers=1, softmax="exact"),
    ),
    "fma_fwd-float32-d64": (Spec(dtype="float32", head_dim=64), fma()),
    "fma_fwd-bfloat16-d128-causal": (Spec(dtype="bfloat16", head_dim=128, causal=True), fma()),
    "fma_fwd-float16-d192-v128": (Spec(dtype="float16", head_dim=192, head_dim_v=128), fma(share_kv=True)),
    "fma_fwd-float16-d64-reference": (
        Spec(dtype="float16", head_dim=64, out_dtype="float64"),
        fma(accumulate="float64"),
    ),
}

WITH_PRODUCTS = ("sm90_fwd-bfloat16-d128", "sm90_fwd-float16-d72-two-blocks")
"""Points whose matrix products are kept, too: they are the one generated header."""


def rendered(spec: Spec, config: Config) -> Source:
    return family(config.family).source(config, spec)


def kernel(spec: Spec, config: Config) -> str:
    """The kernel file, and the digest of all code, which also tells of a change in a header."""
    source = rendered(spec, config)
    return f"// {spec}\n// {config}\n// digest {source.digest}\n{without_directives(source.text)}"


def products(spec: Spec, config: Config) -> str:
    """The one header that is generated."""
    return without_directives(dict(rendered(spec, config).headers)["lib/wgmma.cuh"])


FILES: dict[str, Callable[[], str]] = {
    **{f"{name}.cu": functools.partial(kernel, *point) for name, point in POINTS.items()},
    **{f"{name}-wgmma.cuh": functools.partial(products, *POINTS[name]) for name in WITH_PRODUCTS},
}


@pytest.mark.parametrize("name", FILES)
def test_generated_source_is_as_kept(name: str, update_golden: bool) -> None:
    path, now = GOLDEN / name, FILES[name]()
    if update_golden:
        path.write_text(now, encoding="utf-8")
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    drift = "".join(difflib.unified_diff(kept.splitlines(True), now.splitlines(True), name, "generated now"))
    assert not drift, f"{drift}\nIf this is meant: make golden"


def test_every_golden_has_its_point() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(FILES)
