"""What is seen while `flashtune tune` runs: a live view on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flashtune.cli.common.output import safe_output

if TYPE_CHECKING:
    from flashtune.tuner.results.budget import Budget
    from flashtune.tuner.results.report import Progress

BAR_WIDTH = 30
REFRESHES = 4
"""Per second: the time that is left counts down between two steps of the run."""


class TuneView:
    """Shows each `Progress` of a run on ``screen``. Where that is no terminal, each tenth of the budget gets a line.

    A terminal has four lines, which are gone when the run ends: budget, GPU and problems, the problem at hand, and
    what was done last.
    """

    def __init__(self, screen: Console, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.screen = screen
        self._budget = budget
        self._clock = clock
        self._progress: Progress | None = None
        self._heard = clock()
        self._clock_mhz: float | None = None
        self._tenth = -1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.screen.is_terminal:
            live = Live(get_renderable=self.view, console=self.screen, refresh_per_second=REFRESHES, transient=True)
            with ExitStack() as stack:
                stack.callback(live.stop)  # also after a Ctrl-C while it starts, or the terminal would have no cursor
                live.start()
                stack.enter_context(
                    safe_output()
                )  # in front of rich's streams, which read codes in what they are given
                self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def show(self, progress: Progress) -> None:
        """Takes the news of a run; drawing is up to the next refresh."""
        self._heard = self._clock()
        self._clock_mhz = progress.clock_mhz or self._clock_mhz
        self._progress = progress
        tenth = int(10 * progress.done)
        if not self.screen.is_terminal and tenth > self._tenth:
            self._tenth = tenth
            self.screen.print(self._line(progress), soft_wrap=True)

    def view(self) -> Group:
        """The lines of the terminal as of now."""
        progress = self._progress
        done = progress.done if progress else 0.0
        head = Table.grid(padding=(0, 1))
        for no_wrap in (False, True, True):  # the bar gives way where the terminal is narrow
            head.add_column(no_wrap=no_wrap)
        head.add_row(ProgressBar(total=1.0, completed=done, width=BAR_WIDTH), Text(f"{100 * done:.0f} %"), self._left())
        if progress is None:
            return Group(head, Text("starting"))
        lines = [self._place(progress), _standing(progress), progress.text]
        return Group(head, *(Text(each, overflow="ellipsis", no_wrap=True) for each in lines if each))

    def _left(self) -> Text:
        """What is left of the budget."""
        done = self._progress.done if self._progress else 0.0
        if self._budget.trials is not None:
            return Text(f"{round((1 - done) * self._budget.trials)} of {self._budget} left")
        assert self._budget.seconds is not None
        seconds = max(0.0, (1 - done) * self._budget.seconds - (self._clock() - self._heard))
        return Text(f"{int(seconds) // 60}:{int(seconds) % 60:02} left" if seconds > 0 else "deciding")

    def _place(self, progress: Progress) -> str:
        parts = []
        if progress.gpu:
            clock = f" at {self._clock_mhz:.0f} MHz" if self._clock_mhz else ""
            parts.append(f"{progress.gpu}{clock}")
        if progress.problems:
            parts.append(f"{progress.problems_done} of {progress.problems} problems done")
        return ", ".join(parts)

    def _line(self, progress: Progress) -> str:
        parts = [f"{10 * self._tenth} %"]
        if progress.problems:
            parts.append(f"{progress.problems_done} of {progress.problems} problems done")
        if progress.ratio is not None:
            parts.append(f"{progress.ratio:.3f} of the default's time")
        return f"{', '.join(parts)}: {progress.text}"


def _standing(progress: Progress) -> str:
    """How far the problem at hand is."""
    if progress.problem is None:
        return ""
    if progress.ratio is None:
        return f"{progress.problem}: not yet compared with the default"
    return f"{progress.problem}: best so far takes {progress.ratio:.3f} of the default's time"
