"""The current device of a thread: another one for a block, and afterwards what it was."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

launch = pytest.importorskip("flashtune.codegen.launch", reason="CuPy is not installed", exc_type=ImportError)


@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("error", [None, ValueError], ids=["ends", "raises"])
def test_a_block_has_its_device_and_leaves_the_one_of_before(
    monkeypatch: pytest.MonkeyPatch, before: int, error: type[Exception] | None
) -> None:
    """A hole in the tests: no test without a GPU entered a guard for another device. One in another, all pairs."""
    current, changes = [before], [0]

    def change(device: int) -> None:
        current[0] = device
        changes[0] += 1

    monkeypatch.setattr(launch, "runtime", SimpleNamespace(getDevice=lambda: current[0], setDevice=change))
    for outer, inner in itertools.product(range(3), repeat=2):
        changes[0] = 0
        try:
            with launch.DeviceGuard(outer):
                assert current == [outer]
                with launch.DeviceGuard(inner):
                    assert current == [inner]
                    if error is not None:
                        raise error
                assert current == [outer]
        except ValueError:
            pass
        assert current == [before]
        assert changes[0] == 2 * (outer != before) + 2 * (inner != outer), "the driver is asked for nothing in vain"
