"""nvidia-ml-py with cards that are none, no kinder than the real one.

Errors and constants are the real module's. Nothing is answered before `nvmlInit` or behind the last `nvmlShutdown`,
and for no handle but one of this initialisation.
"""
# ruff: noqa: N802

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

real: Any = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")  # it can be imported without a driver

DRIVER = "580.95.05"
NEW_NAMES = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons")
"""Of nvidia-ml-py 13; the older ones are to go with CUDA 14."""
OLD_NAMES = ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons")


@dataclass
class Card:
    """What tests change."""

    clock: int = 1980
    milliwatts: int = 612_500
    limit: int = 700_000
    temperature: int = 61
    bits: int = 0
    processes: list[int] = field(default_factory=lambda: [os.getpid()])


@dataclass(frozen=True, eq=False)
class Handle:
    card: Card
    initialisation: int


def asked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is to be answered."""

    @functools.wraps(function)
    def call(self: FakeNvml, *arguments: Any, **named: Any) -> Any:
        if function.__name__ != "nvmlInit" and not self.uses:
            raise real.NVMLError(real.NVML_ERROR_UNINITIALIZED)
        if function.__name__ in self.refused or "all" in self.refused:
            raise real.NVMLError(real.NVML_ERROR_NO_PERMISSION)
        return function(self, *arguments, **named)

    return call


class FakeNvml:
    """Stands in for the module ``pynvml`` on a machine with cards of these UUIDs."""

    NVMLError = real.NVMLError
    NVML_CLOCK_SM = real.NVML_CLOCK_SM
    NVML_TEMPERATURE_GPU = real.NVML_TEMPERATURE_GPU

    def __init__(self, *units: str) -> None:
        self.cards = {unit: Card() for unit in units}
        self.refused: set[str] = set()
        """Functions for which the driver wants more permissions; "all" for all."""
        self.left_out: tuple[str, ...] = OLD_NAMES
        """Functions that this release does not have."""
        self.uses = 0
        """How often it was initialised and not shut down."""
        self.initialisation = 0

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__").get("left_out", ()):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def of(self, handle: Any, kind: int = 0, known: int = 0) -> Card:
        """The card of a handle that holds; ``kind`` is the sensor that was asked for."""
        if not isinstance(handle, Handle) or handle.initialisation != self.initialisation or kind != known:
            raise real.NVMLError(real.NVML_ERROR_INVALID_ARGUMENT)
        return handle.card

    @asked
    def nvmlInit(self) -> None:
        self.initialisation += not self.uses
        self.uses += 1

    @asked
    def nvmlShutdown(self) -> None:
        self.uses -= 1

    @asked
    def nvmlSystemGetDriverVersion(self) -> str:
        return DRIVER

    @asked
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        if uuid not in self.cards:
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return Handle(self.cards[uuid], self.initialisation)

    @asked
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return self.of(handle).limit

    @asked
    def nvmlDeviceGetClockInfo(self, handle: Any, type: int) -> int:
        return self.of(handle, type, self.NVML_CLOCK_SM).clock

    @asked
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self.of(handle).milliwatts

    @asked
    def nvmlDeviceGetTemperatureV(self, handle: Any, sensor: int, version: int = 0) -> int:
        return self.of(handle, sensor, self.NVML_TEMPERATURE_GPU).temperature

    @asked
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self.of(handle, sensor, self.NVML_TEMPERATURE_GPU).temperature

    @asked
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self.of(handle).bits

    @asked
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self.of(handle).bits

    @asked
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return [SimpleNamespace(pid=each, usedGpuMemory=None) for each in self.of(handle).processes]
