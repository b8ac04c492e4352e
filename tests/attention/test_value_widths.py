"""`attention()` where v has another width than q and k, on a fake device: the result, warm calls, copies, alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_calls import expected, inputs, same

from flashtune import attention


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("width", [8, 24])
def test_values_of_another_width(fakes: Any, layout: str, width: int) -> None:
    """The output has the columns of v; a first call, a warm one, one with ``out``, and v and ``out`` with gaps."""
    q, k, _ = inputs(fakes)
    v = fakes.random(2, 7, 2, width, seed=3)
    want_out, want_lse = expected(q, k, v, causal=True)

    def turned(host: Any) -> Any:
        return host.swapaxes(1, 2) if layout == "bhsd" else host

    arrays = [fakes.array(turned(each.host)) for each in (q, k, v)]
    gaps = np.zeros((2, 7, 2, 40), np.float16)
    gaps[..., 8 : 8 + width] = v.host
    with_gaps = [*arrays[:2], fakes.array(turned(gaps[..., 8 : 8 + width]))]
    for each in (arrays, arrays, with_gaps):
        out, lse = attention(*each, causal=True, return_lse=True, layout=layout)
        same(out, turned(want_out))
        same(lse, want_lse)
        assert out.host.flags.c_contiguous
    buffer = np.zeros((2, 5, 4, 48), np.float16)
    given = fakes.array(turned(buffer[..., 8 : 8 + width]))
    for _ in range(2):
        buffer[...] = 0
        assert attention(*arrays, causal=True, layout=layout, out=given) is given
        np.testing.assert_array_equal(buffer[..., 8 : 8 + width], want_out)
        assert not buffer[..., :8].any()
        assert not buffer[..., 8 + width :].any()
    problems = [launch.plan.problem for launch in fakes.layer.launches]
    assert {(each.head_dim, each.head_dim_v) for each in problems} == {(16, width)}


def test_a_call_with_narrow_values_is_not_the_last_call(fakes: Any) -> None:
    """v alone tells the two kinds apart, also where a warm call is known by more than its key."""
    q, k, v = inputs(fakes)
    narrow = fakes.random(2, 7, 2, 8, seed=3)
    for each in (v, narrow, v, v, narrow, narrow):
        same(attention(q, k, each), expected(q, k, each)[0])
    assert len(fakes.layer.loads) == 2


@pytest.mark.parametrize("which", [0, 1, 2])
def test_copies_keep_widths(fakes: Any, which: int) -> None:
    q, k, _ = inputs(fakes)
    arrays = [q, k, fakes.random(2, 7, 2, 8, seed=3)]
    arrays[which] = fakes.array(np.repeat(arrays[which].host, 2, axis=3)[..., ::2])
    for _ in range(2):
        out, lse = attention(*arrays, return_lse=True)
        want_out, want_lse = expected(*arrays)
        same(out, want_out)
        same(lse, want_lse)


def test_rows_of_narrow_values_count_for_the_alignment(fakes: Any) -> None:
    q, k, _ = inputs(fakes)
    v = np.zeros((2, 7, 2, 9), np.float16)[..., :8]
    attention(q, k, fakes.random(2, 7, 2, 8))
    attention(q, k, fakes.array(v))
    assert [launch.plan.problem.alignment for launch in fakes.layer.launches] == [16, 2]
