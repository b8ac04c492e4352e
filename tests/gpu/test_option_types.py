"""F15 on real arrays: what an option may be does not depend on earlier calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashtune import attention
from flashtune.errors import InvalidType

pytestmark = pytest.mark.gpu


def test_options_are_judged_by_their_type_before_and_after_their_equals(library: Any) -> None:
    draw = np.random.default_rng(5)
    q, k, v = (library.put(draw.standard_normal((1, 33, 2, 64)), "float16").array for _ in range(3))
    refused: list[dict[str, Any]] = [
        {"causal": 1},
        {"causal": np.asarray(True)},
        {"causal": library.put(np.ones((1, 1, 1, 1)), "float32").array},
        {"scale": np.asarray(0.5)},
        {"scale": True},
    ]
    for _ in range(2):
        for options in refused:
            with pytest.raises(InvalidType):
                attention(q, k, v, **options)
        taken = attention(q, k, v, causal=np.True_, scale=np.float32(0.5))
        plain = attention(q, k, v, causal=True, scale=0.5)
        assert (library.get(taken) == library.get(plain)).all()
        attention(q, k, v, causal=True)
        attention(q, k, v, scale=0.5)
        attention(q, k, v, scale=1.0)
