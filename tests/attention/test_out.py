"""`out=` of `attention()`, on a fake device: it is filled and returned, and whatever is wrong with it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_calls import expected, inputs, refused

from flashtune import attention
from flashtune.errors import InvalidInput, InvalidType


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_out_is_filled_and_returned(fakes: Any, layout: str) -> None:
    q, k, v = inputs(fakes)
    buffer = np.zeros((2, 5, 4, 24), np.float16)
    out_host = buffer[..., 4:20]
    arrays = [q, k, v]
    if layout == "bhsd":
        arrays = [fakes.array(each.host.swapaxes(1, 2)) for each in arrays]
        out_host = out_host.swapaxes(1, 2)
    out = fakes.array(out_host)
    for _ in range(2):
        buffer[...] = 0
        before = fakes.allocations
        assert attention(*arrays, out=out, layout=layout) is out
        assert fakes.allocations == before
        np.testing.assert_array_equal(buffer[..., 4:20], expected(q, k, v)[0])
        assert not buffer[..., :4].any()
        assert not buffer[..., 20:].any()


def test_overlap_is_seen_on_warm_calls_too(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v, out=fakes.array(fakes.memory(q.host.shape, np.float16)))
    launched = len(fakes.layer.launches)
    with pytest.raises(InvalidInput, match=r"out .* overlaps q"):
        attention(q, k, v, out=fakes.array(q.host))
    assert len(fakes.layer.launches) == launched


Out = Callable[[Any, Any], Any]
OUTS: dict[str, tuple[Out, type[Exception], list[str]]] = {
    "shape": (lambda f, q: f.random(1, 4, 2, 24), InvalidInput, ["(1, 4, 2, 24)", "(1, 4, 2, 16)"]),
    "width": (lambda f, q: f.random(1, 4, 2, 8), InvalidInput, ["(1, 4, 2, 8)", "that of q: (1, 4, 2, 16)"]),
    "dtype": (lambda f, q: f.random(1, 4, 2, 16, dtype=np.float32), InvalidType, ["float32", "float16"]),
    "device": (lambda f, q: f.array(np.ones((1, 4, 2, 16), np.float16), 1), InvalidInput, ["cuda:1", "cuda:0"]),
    "last stride": (
        lambda f, q: f.array(np.ones((1, 4, 2, 32), np.float16)[..., ::2]),
        InvalidInput,
        ["strides", "last must be 1"],
    ),
    "stride 0": (
        lambda f, q: f.array(np.broadcast_to(np.ones((1, 4, 1, 16), np.float16), (1, 4, 2, 16))),
        InvalidInput,
        ["16, 0, 1)", "overlaps itself"],
    ),
    "windows": (
        lambda f, q: f.array(
            np.lib.stride_tricks.as_strided(np.ones(64, np.float16), (1, 4, 2, 16), (0, 16, 4, 2), writeable=True)
        ),
        InvalidInput,
        ["overlaps itself"],
    ),
    "address": (lambda f, q: f.array(f.memory((1, 4, 2, 16), np.float16, 1)), InvalidInput, ["out is at address"]),
}


@pytest.mark.parametrize("case", OUTS)
def test_out(fakes: Any, case: str) -> None:
    make, error, words = OUTS[case]
    q = fakes.random(1, 4, 2, 16)
    refused(fakes, error, ["out", *words], q, q, q, out=make(fakes, q))


@pytest.mark.parametrize(("layout", "width"), [("bshd", 8), ("bhsd", 24)])
def test_out_has_the_columns_of_v(fakes: Any, layout: str, width: int) -> None:
    q, v = fakes.random(1, 4, 4, 16), fakes.random(1, 4, 4, width)
    words = ["out has shape (1, 4, 4, 16)", f"that of q with the head_dim of v: (1, 4, 4, {width})"]
    refused(fakes, InvalidInput, words, q, q, v, out=fakes.random(1, 4, 4, 16), layout=layout)


def test_out_that_overlaps_narrow_values(fakes: Any) -> None:
    """8 columns of v, 8 of the output: the same memory, or the columns between."""
    q, buffer = fakes.random(1, 4, 2, 16), np.ones((1, 4, 2, 16), np.float16)
    v, free = fakes.array(buffer[..., :8]), fakes.random(1, 4, 2, 8)
    attention(q, q, v, out=free)
    for columns in (slice(0, 8), slice(8, 16)):
        with pytest.raises(InvalidInput, match=r"out .* overlaps v .* memory of its own"):
            attention(q, q, v, out=fakes.array(buffer[..., columns]))
    assert len(fakes.layer.launches) == 1


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_out_that_overlaps_an_input(fakes: Any, name: str, shift: int) -> None:
    q, other = fakes.random(1, 4, 2, 16), fakes.random(1, 4, 2, 16)
    buffer = np.ones((1, 8, 2, 16), np.float16)
    inputs = {"q": q, "k": other, "v": other, name: fakes.array(buffer[:, 2:6])}
    out = fakes.array(buffer[:, 2 + shift : 6 + shift])
    with pytest.raises(InvalidInput, match=f"out .* overlaps {name} .* memory of its own"):
        attention(*inputs.values(), out=out)
    assert fakes.layer.launches == []


def test_out_beside_an_input_is_fine(fakes: Any) -> None:
    buffer = np.ones((1, 12, 2, 16), np.float16)
    q = fakes.array(buffer[:, 4:8])
    for rows in (slice(0, 4), slice(8, 12)):
        attention(q, q, q, out=fakes.array(buffer[:, rows]))
    assert len(fakes.layer.launches) == 2
