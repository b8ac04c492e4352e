"""torch's quick check of the last kind of call: it saves making a key, and never decides what a key would not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashtune import attention
from flashtune.call.torch_arrays import TorchArrays
from flashtune.errors import InvalidInput, InvalidType

pytestmark = pytest.mark.parametrize("fakes", ["torch"], indirect=True)


class CountingMemo(dict[Any, Any]):
    """A memo that counts look-ups."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


@pytest.fixture
def memo(fakes: Any) -> CountingMemo:
    fakes.kind.memo = CountingMemo()
    found: CountingMemo = fakes.kind.memo
    return found


def inputs(fakes: Any, seed: int = 0) -> list[Any]:
    return [fakes.random(1, 5, 2, 16, seed=seed + index) for index in range(3)]


def lookups(memo: CountingMemo, *arrays: Any, **options: Any) -> int:
    """How often the memo is asked for in one call."""
    before = memo.asked
    attention(*arrays, **options)
    return memo.asked - before


def known(fakes: Any, memo: CountingMemo) -> list[Any]:
    """Arrays of a kind of call that the next call is recognised by."""
    arrays = inputs(fakes)
    attention(*arrays)
    assert lookups(memo, *inputs(fakes, seed=3)) == 0, "recognised without its key"
    return arrays


def test_calls_like_the_last_need_no_key(fakes: Any, memo: CountingMemo) -> None:
    known(fakes, memo)
    launches = fakes.layer.launches
    attention(*inputs(fakes, seed=7))
    assert launches[-1].strides == launches[0].strides


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"scale": 0.5}, {"return_lse": True}, {"layout": "bhsd"}], ids=str
)
def test_other_options_need_their_key(fakes: Any, memo: CountingMemo, options: dict[str, Any]) -> None:
    arrays = known(fakes, memo)
    q = fakes.random(1, 2, 5, 16)
    others = [q, fakes.random(1, 2, 5, 16), fakes.random(1, 2, 5, 16)] if "layout" in options else arrays
    assert lookups(memo, *others, **options) >= 1
    assert lookups(memo, *others, **options) == 0, "now it is the last"
    assert lookups(memo, *arrays) == 1


def test_another_alignment_needs_its_key(fakes: Any, memo: CountingMemo) -> None:
    q, k, v = known(fakes, memo)
    host = fakes.memory(q.host.shape, np.float16, 2)
    host[...] = q.host
    assert lookups(memo, fakes.array(host), k, v) >= 1
    assert fakes.layer.launches[-1].plan.problem.alignment == 2
    assert lookups(memo, q, k, v) == 1
    assert fakes.layer.launches[-1].plan.problem.alignment == 16


def test_an_output_of_the_callers_needs_its_key(fakes: Any, memo: CountingMemo) -> None:
    arrays = known(fakes, memo)
    out = fakes.random(1, 5, 2, 16)
    assert lookups(memo, *arrays, out=out) >= 1
    with pytest.raises(InvalidInput, match="overlaps"):
        attention(*arrays, out=arrays[0])


def test_gradients_are_never_let_pass(fakes: Any, memo: CountingMemo) -> None:
    q, k, v = known(fakes, memo)
    tracked = fakes.array(q.host, requires_grad=True)
    fakes.grad = False
    attention(tracked, k, v)
    attention(tracked, k, v)
    fakes.grad = True
    with pytest.raises(NotImplementedError, match="requires grad"):
        attention(tracked, k, v)


def test_tangents_are_never_let_pass(fakes: Any, memo: CountingMemo) -> None:
    q, k, v = known(fakes, memo)
    fakes.forward_ad._current_level = 0
    q.tangent = object()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        attention(q, k, v)


def test_another_current_device_takes_the_long_way(fakes: Any, memo: CountingMemo) -> None:
    arrays = known(fakes, memo)
    fakes.layer.set_device(1)
    assert lookups(memo, *arrays) == 1
    assert fakes.layer.current == 1


def test_inference_mode_gets_a_guard_of_its_own(
    fakes: Any, memo: CountingMemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = known(fakes, memo)
    guards = fakes.kind.torch._C._dynamo.guards.TensorGuards
    monkeypatch.setattr(guards, "mode", "inference")
    assert lookups(memo, *arrays) == 1
    assert lookups(memo, *arrays) == 0


def test_arrays_of_another_library_are_named(fakes: Any, memo: CountingMemo) -> None:
    q, k, _ = known(fakes, memo)
    with pytest.raises(InvalidType, match=r"v is a numpy\.ndarray"):
        attention(q, k, np.zeros((1, 5, 2, 16), np.float16))


def test_alternating_kinds_make_no_new_guards(fakes: Any, memo: CountingMemo) -> None:
    first, second = inputs(fakes), [fakes.random(1, 7, 2, 16, seed=index) for index in range(3)]
    for _ in range(2):
        attention(*first)
        attention(*second)
    kept = [ready.recent for ready in memo.values()]
    for _ in range(3):
        attention(*first)
        attention(*second)
    assert [ready.recent for ready in memo.values()] == kept
    assert None not in kept


def test_one_tensor_in_two_places_goes_by_its_key(fakes: Any, memo: CountingMemo) -> None:
    q, k, _ = known(fakes, memo)
    for _ in range(2):
        assert lookups(memo, q, k, k) == 1
    assert lookups(memo, *inputs(fakes)) == 1
    assert lookups(memo, *inputs(fakes)) == 0


def test_forgetting_drops_the_last_call(fakes: Any, memo: CountingMemo) -> None:
    arrays = known(fakes, memo)
    fakes.kind.forget()
    assert lookups(memo, *arrays) >= 1


def changed_interface(*tensors: Any) -> Any:
    raise TypeError("unexpected arguments")


@pytest.mark.parametrize("make", [None, changed_interface, lambda *_, **__: SimpleNamespace(check=lambda *_: True)])
def test_without_guards_that_work_keys_do_it_all(fakes: Any, make: Any) -> None:
    fakes.kind.torch._C._dynamo.guards = SimpleNamespace() if make is None else SimpleNamespace(TensorGuards=make)
    assert TorchArrays(fakes.kind.torch, fakes.layer)._guards is None
