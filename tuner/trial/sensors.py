"""What the card says of itself around a measurement: clock, power, temperature, throttling, and who else uses it.

Read through nvidia-ml-py (module ``pynvml``). Where that is missing or may not answer, measuring goes on without, and
`Sensors.note` says so once. A measurement under a slowdown is made once more, and flagged if that did not help.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flashtune.tuned_db.records.measurement import SLOWDOWNS

T = TypeVar("T")

REASONS = {
    0x002: "clock_setting",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "power_brake",
    0x100: "clock_setting",
}
"""Bits of nvmlClocksEventReasons (nvml.h) as words of `tuned_db.records.THROTTLES`. An idle card, 0x001, is none."""
SLOW_CLOCK = 0.75
"""Part of the fastest clock of the session below which a clock is a slowdown, unless a power limit or a setting
explains it. nvbench discards samples below this part of the default clock; under its power limit an H200 holds 0.81."""
EXPLAINED = ("power_cap", "clock_setting", "sync_boost")
"""What holds a clock down for as long as a card is used. Other power reasons halve it for a moment."""
COOLING_SECONDS = 0.2
"""Pause before a measurement is repeated."""


@dataclass(frozen=True, slots=True)
class Readings:
    """MHz, watts, degrees Celsius; None where not known. ``throttle`` is as in `tuned_db.records.Measurement`."""

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None
    contended: bool | None = None

    @property
    def reasons(self) -> list[str]:
        return [each for each in (self.throttle or "").split(",") if each]

    @property
    def slowed(self) -> bool:
        """Whether times that were taken meanwhile say little about the config. A power limit is normal."""
        return any(each in SLOWDOWNS for each in self.reasons)


class Sensors:
    """The sensors of the card ``unit`` (its UUID). ``note`` says what is missing; empty if nothing is.

    ``ours`` is how many processes of this session have the card open.
    """

    def __init__(self, unit: str, ours: int = 1) -> None:
        self.note = ""
        self._ours = ours
        self._nvml: Any = None
        self._handle: Any = None
        without = "clock, power, temperature and throttling are not recorded"
        try:
            import pynvml
        except ImportError:
            self.note = f"{without}: nvidia-ml-py is not installed"
            return
        nvml: Any = pynvml
        try:
            nvml.nvmlInit()  # once: it takes tens of milliseconds
            self._handle = nvml.nvmlDeviceGetHandleByUUID(unit)
        except nvml.NVMLError as error:
            self.note = f"{without}: {error}"
            return
        self._nvml = nvml
        if self.read() == Readings():
            self.note = f"{without}: the driver gives no answer"

    def read(self) -> Readings:
        """What the card says now."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return Readings()
        clock = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        temperature = self._ask(
            lambda: nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU),
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        )
        bits = self._ask(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
        processes = self._ask(lambda: [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)])
        return Readings(
            clock_mhz=None if clock is None else float(clock),
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=None if temperature is None else float(temperature),
            throttle=None if bits is None else joined(word for bit, word in REASONS.items() if bits & bit),
            contended=None if processes is None else others(processes, {os.getpid(), os.getppid()}, self._ours) > 0,
        )

    def _ask(self, *questions: Callable[[], T]) -> T | None:
        """The first answer: names change between releases. Or None: cards, virtual ones above all, do not know all."""
        for question in questions:
            with contextlib.suppress(self._nvml.NVMLError, AttributeError):
                return question()
        return None


class Watch:
    """Reads ``read`` around measurements, and has those made under a slowdown once more.

    ``noticed`` gives what was noticed while timing since it was last asked, in words of `tuned_db.records.THROTTLES`.
    """

    def __init__(
        self,
        read: Callable[[], Readings],
        pause: Callable[[float], None] = time.sleep,
        noticed: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.last = Readings()
        """Around the last measurement."""
        self._read = read
        self._noticed = noticed
        self._pause = pause
        self._fastest = 0.0

    def measured(self, measure: Callable[[], T]) -> T:
        """What ``measure`` gives; see ``last``."""
        result = self._once(measure)
        if self.last.slowed:
            self._pause(COOLING_SECONDS)
            result = self._once(measure)
        return result

    def _once(self, measure: Callable[[], T]) -> T:
        self._noticed()  # what was timed outside of a measurement
        before = self._read()
        result = measure()
        self.last = self._both(before, self._read(), self._noticed())
        return result

    def _both(self, before: Readings, after: Readings, noticed: Sequence[str]) -> Readings:
        """Clock and power are those right behind the load: before it the card may have been idle.

        The reasons of either count for that clock: they go with the load, and the clock comes back later.
        """
        known = [each.throttle for each in (before, after) if each.throttle is not None]
        words = [*before.reasons, *after.reasons, *noticed]
        clock = after.clock_mhz
        if clock is not None:
            self._fastest = max(self._fastest, clock)
            if clock < SLOW_CLOCK * self._fastest and not any(each in EXPLAINED for each in words):
                words.append("slow_clock")
        temperatures = [each.temperature_c for each in (before, after) if each.temperature_c is not None]
        shared = [each.contended for each in (before, after) if each.contended is not None]
        return Readings(
            clock_mhz=clock,
            power_w=after.power_w,
            temperature_c=max(temperatures, default=None),
            throttle=joined(words) if known or words else None,
            contended=any(shared) if shared else None,
        )


def joined(words: Any) -> str:
    """Each once, in a fixed order, with commas between them."""
    return ",".join(sorted(set(words)))


def others(processes: Collection[int], own: Collection[int], ours: int) -> int:
    """How many of the processes on a card are not of this session, whose ids are in ``own``.

    In a container the driver may give ids of the host's: then ``ours`` of them, it can't be said which, are.
    """
    strangers = set(processes).difference(own)
    return len(strangers) if len(strangers) < len(set(processes)) else max(0, len(strangers) - ours)
