"""F15: what an option may be does not depend on earlier calls, for any array library."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_arrays import Fakes
from fake_calls import expected

from flashtune import attention
from flashtune.call import arrays
from flashtune.errors import InvalidType

TAKEN: list[tuple[str, Any, Any]] = [
    *((name, np.bool_(value), value) for name in ("causal", "return_lse") for value in (False, True)),
    ("scale", 1, 1.0),
    ("scale", np.float32(0.5), 0.5),
    ("scale", np.float64(0.5), 0.5),
    ("scale", np.float16(0.5), 0.5),
    ("scale", np.int8(2), 2.0),
    ("scale", Fraction(1, 2), 0.5),
]
"""Name of the option, what is given, and what it is the same as."""
REFUSED: list[tuple[str, Any, Any]] = [
    *(
        (name, kind(value), value)
        for name in ("causal", "return_lse")
        for value in (False, True)
        for kind in (int, float, np.int64, np.float32, Decimal, Fraction, np.asarray)
    ),
    ("causal", np.ones(1, bool), True),
    ("scale", True, 1.0),
    ("scale", np.True_, 1.0),
    ("scale", Decimal("0.5"), 0.5),
    ("scale", np.asarray(0.5), 0.5),
    ("scale", np.asarray([0.5]), 0.5),
    ("scale", 1 + 0j, 1.0),
    ("scale", "1", 1.0),
]


def host_of(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.host


def same(got: Any, want: Any) -> bool:
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    return all(np.array_equal(host_of(one), host_of(other)) for one, other in pairs)


@pytest.fixture(params=["numpy", "torch", "cupy"])
def q(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An array of each library in turn."""
    if request.param == "numpy":
        yield np.random.default_rng(0).standard_normal((1, 8, 2, 16)).astype(np.float16)
        return
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    library = Fakes(request.param)
    arrays.register(library.kind)
    yield library.random(1, 8, 2, 16)
    arrays.unregister(library.kind)


@pytest.mark.parametrize(("name", "given", "meant"), TAKEN, ids=repr)
def test_what_is_taken_means_the_same_before_and_after(q: Any, name: str, given: Any, meant: Any) -> None:
    first = attention(q, q, q, **{name: given})
    want = attention(q, q, q, **{name: meant})
    assert isinstance(first, tuple) == isinstance(want, tuple) == (name == "return_lse" and meant)
    assert same(first, want)
    assert same(attention(q, q, q, **{name: given}), want)


@pytest.mark.parametrize(("name", "given", "equal"), REFUSED, ids=repr)
def test_what_is_refused_is_refused_before_and_after_its_equal(q: Any, name: str, given: Any, equal: Any) -> None:
    messages = []
    for _ in range(3):
        with pytest.raises(InvalidType, match=rf"^{name}=.* must be (True or False|a real number)") as caught:
            attention(q, q, q, **{name: given})
        messages.append(str(caught.value))
        attention(q, q, q, **{name: equal})
    assert len(set(messages)) == 1


def test_equal_options_are_one_kind_of_call(fakes: Any) -> None:
    q, k = fakes.random(1, 8, 2, 16), fakes.random(1, 8, 2, 16)
    for causal, scale in ((True, 1.0), (np.True_, 1), (True, np.float32(1))):
        out = attention(q, k, k, causal=causal, scale=scale)
        assert np.array_equal(out.host, expected(q, k, k, causal=True, scale=1.0)[0])
    assert len(fakes.kind.memo) == len(fakes.layer.loads) == 1
