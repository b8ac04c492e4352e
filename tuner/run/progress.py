"""What a measured run tells while it goes on: one line for each thing done, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.tuner.results.budget import Meter
from flashtune.tuner.results.report import Progress
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.trial.outcome import NO_READINGS, Outcome
from flashtune.tuner.trial.sensors import Readings


class ProgressReporter:
    """Tells ``progress``. ``searches`` are the problems of the run, set when it begins."""

    def __init__(self, gpu: Gpu, meter: Meter, progress: Callable[[Progress], None]) -> None:
        self.searches: Sequence[ProblemSearch] = ()
        self.many_devices = False
        self._gpu = gpu
        self._meter = meter
        self._progress = progress

    def show(
        self, device: str, text: str, search: ProblemSearch | None = None, readings: Readings = NO_READINGS
    ) -> None:
        """``text`` is about ``device``, which is named where there are several, and about ``search``."""
        prefix = f"{device}: " if self.many_devices else ""
        self._progress(
            Progress(
                1 - self._meter.left,
                prefix + text,
                gpu=str(self._gpu),
                problems=len(self.searches),
                problems_done=sum(each.finished for each in self.searches),
                problem=search.problem if search else None,
                ratio=_best_against_default(search) if search else None,
                clock_mhz=readings.clock_mhz,
            )
        )


def outcome_text(outcome: Outcome) -> str:
    """The time, or what went wrong."""
    return f"{outcome.seconds * 1e3:.3f} ms" if outcome.seconds else outcome.status


def _best_against_default(search: ProblemSearch) -> float | None:
    default = search.seconds.get(search.default)
    return search.best / default if search.best and default else None
