"""Every head_dim, dtype and mask on odd lengths against float64, by the tolerance rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashtune
from flashtune.codegen.families.fma_fwd import FmaFwd
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.problem.problem import Spec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

HEAD_DIMS = tuple(range(8, 257, 8))
MASKS = (False, True)
UNALIGNED = (8, 40, 64, 128, 136, 256)
PORTABLE = (8, 72, 256)


def values(head_dim: int, shape: tuple[int, ...]) -> list[Any]:
    """Off zero mean, so that a wrong weight shows, and scores that reach a few units."""
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    draw = np.random.default_rng(head_dim)
    shapes = ((batch, seqlen_q, heads), (batch, seqlen_k, heads_kv), (batch, seqlen_k, heads_kv))
    return [draw.standard_normal((*each, head_dim)) + 0.25 for each in shapes]


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_random_values(library: Any, dtype: str, head_dim: int, causal: bool) -> None:
    found = []
    for shape in library.SHAPES:
        found += library.problems_of(*values(head_dim, shape), dtype, causal=causal)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", UNALIGNED)
def test_unaligned_values(library: Any, dtype: str, head_dim: int, causal: bool) -> None:
    """Each tensor starts one element off a 16-byte boundary."""
    found = []
    for shape in library.SHAPES:
        host = values(head_dim, shape)
        arrays = [library.put(each, dtype, shift=1).array for each in host]
        out = library.put(np.full(host[0].shape, np.nan), dtype, shift=1)
        _, lse = flashtune.attention(*arrays, causal=causal, out=out.array, return_lse=True)
        got = library.read(lse, "float32")
        found += library.judge(out.host(), got, host, dtype, f"unaligned {causal=}", causal=causal)
        if not out.outside_is_nan():
            found.append(f"{library.name} {dtype} {head_dim=} {causal=} {shape}: wrote outside of the output")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("head_dim", PORTABLE)
def test_the_portable_kernel(library: Any, dtype: str, head_dim: int, accumulate: str, causal: bool) -> None:
    """fma_fwd where another kernel would be chosen; its float64 form too."""
    spec = Spec(dtype=dtype, head_dim=head_dim, causal=causal)
    gpu, family = require_device(), FmaFwd()
    config = replace(family.default(spec, gpu), accumulate=accumulate)
    if reason := family.illegal(config, spec, gpu):
        pytest.skip(f"{config}: {reason}")
    found = library.problems_of(*values(head_dim, library.SHAPES[0]), dtype, causal=causal, config=config)
    assert not found, "\n".join(found)
