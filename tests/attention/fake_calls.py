"""What tests of `attention()` on fake arrays share: inputs, the result to compare with, and a call that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashtune import attention
from flashtune.codegen.problem.reference import tiled_attention
from flashtune.errors import FlashtuneError


def expected(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    return tiled_attention(*(np.ascontiguousarray(each.host) for each in (q, k, v)), **options)


def inputs(fakes: Any, dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    q = fakes.random(2, 5, 4, 16, seed=1, dtype=dtype)
    return q, fakes.random(2, 7, 2, 16, seed=2, dtype=dtype), fakes.random(2, 7, 2, 16, seed=3, dtype=dtype)


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.host, want)


def refused(
    fakes: Any, error: type[Exception], words: list[str], q: Any, k: Any, v: Any, **options: Any
) -> FlashtuneError | Exception:
    """The error of a call, which must say ``words`` and leave no trace, however often it is made."""
    before = fakes.allocations
    for _ in range(2):
        with pytest.raises(error) as caught:
            attention(q, k, v, **options)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in {caught.value}"
    assert fakes.layer.launches == fakes.layer.loads == []
    assert fakes.allocations == before
    assert not fakes.kind.memo
    return caught.value
