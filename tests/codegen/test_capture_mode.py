"""The exchange of a thread's capture mode with the driver: what it is told, and that the old mode comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashtune.errors import LaunchError

launch = pytest.importorskip("flashtune.codegen.launch", reason="CuPy is not installed")


class Driver:
    """cuThreadExchangeStreamCaptureMode of libcuda for one thread."""

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.status = 0

    def exchange(self, pointer: Any) -> int:
        if self.status == 0:
            pointer._obj.value, self.mode = self.mode, pointer._obj.value
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(mode=1)
    library = SimpleNamespace(cuThreadExchangeStreamCaptureMode=made.exchange)
    monkeypatch.setattr(launch, "_driver_library", lambda: library)
    return made


def test_a_block_is_relaxed_and_the_old_mode_comes_back(driver: Driver) -> None:
    with launch.relaxed_capture():
        assert driver.mode == 2
        with launch.relaxed_capture():
            assert driver.mode == 2
        assert driver.mode == 2
    assert driver.mode == 1


def test_an_error_in_the_block_leaves_no_trace(driver: Driver) -> None:
    with pytest.raises(ZeroDivisionError), launch.relaxed_capture():
        raise ZeroDivisionError
    assert driver.mode == 1


def test_a_driver_that_refuses_is_named(driver: Driver) -> None:
    driver.status = 3
    with pytest.raises(LaunchError, match="error 3"), launch.relaxed_capture():
        pytest.fail("the block ran in the wrong mode")
