"""What a measured run tells while it goes on: one line for each thing done, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashtune.codegen.gpu import Gpu

from .budget import Meter
from .readings import Readings
from .report import Progress
from .target import Target
from .trial import NO_READINGS, Outcome


class Teller:
    """Tells ``progress``. ``targets`` are the problems of the run, set when it begins."""

    def __init__(self, gpu: Gpu, meter: Meter, progress: Callable[[Progress], None]) -> None:
        self.targets: Sequence[Target] = ()
        self.many_devices = False
        self._gpu = gpu
        self._meter = meter
        self._progress = progress

    def show(self, device: str, text: str, target: Target | None = None, readings: Readings = NO_READINGS) -> None:
        """``text`` is about ``device``, which is named where there are several, and about ``target``."""
        prefix = f"{device}: " if self.many_devices else ""
        self._progress(
            Progress(
                1 - self._meter.left,
                prefix + text,
                gpu=str(self._gpu),
                problems=len(self.targets),
                problems_done=sum(each.finished for each in self.targets),
                problem=target.problem if target else None,
                ratio=_best_against_default(target) if target else None,
                clock_mhz=readings.clock_mhz,
            )
        )


def outcome_text(outcome: Outcome) -> str:
    """The time, or what went wrong."""
    return f"{outcome.seconds * 1e3:.3f} ms" if outcome.seconds else outcome.status


def _best_against_default(target: Target) -> float | None:
    default = target.seconds.get(target.default)
    return target.best / default if target.best and default else None
