"""What is seen while a run goes on: four lines on a terminal, a line per tenth of the budget elsewhere."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from flashtune.cli.common.tables import SafeConsole
from flashtune.cli.tune.live import TuneView
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.results.budget import Budget
from flashtune.tuner.results.report import Progress

PROBLEM = Problem(dtype="float16", head_dim=64, batch=1, seqlen_q=256, seqlen_k=256, num_heads=4, num_heads_kv=4)
NEWS = Progress(
    0.25, "last [step]", gpu="h100-sxm", problems=4, problems_done=1, problem=PROBLEM, ratio=0.912, clock_mhz=1755.0
)  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def screen(*, terminal: bool, width: int = 100) -> Console:
    return SafeConsole(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def drawn(view: TuneView, width: int = 100) -> list[str]:
    """The lines as a terminal has them now."""
    out = screen(terminal=True, width=width)
    out.print(view.view())
    text = out.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def written(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_view_has_budget_gpu_problems_and_the_best_so_far() -> None:
    view = TuneView(screen(terminal=True), Budget(seconds=120.0), Clock())
    view.show(NEWS)
    head, *rest = drawn(view)
    assert "25 %" in head
    assert "1:30 left" in head
    assert rest == [
        "h100-sxm at 1755 MHz, 1 of 4 problems done",
        f"{PROBLEM}: best so far takes 0.912 of the default's time",
        "last [step]",
    ]


def test_the_time_left_counts_down_between_steps() -> None:
    clock = Clock()
    view = TuneView(screen(terminal=True), Budget(seconds=120.0), clock)
    view.show(NEWS)
    clock.now += 31
    assert "0:59 left" in drawn(view)[0]
    clock.now += 100
    assert "deciding" in drawn(view)[0]


def test_a_count_of_trials_is_left_as_a_count() -> None:
    view = TuneView(screen(terminal=True), Budget(trials=200), Clock())
    view.show(NEWS)
    assert "150 of 200 trials left" in drawn(view)[0]


def test_what_is_not_known_is_not_invented() -> None:
    view = TuneView(screen(terminal=True), Budget(trials=200), Clock())
    assert drawn(view)[1:] == ["starting"]
    view.show(Progress(0.0, "listing configs"))
    assert drawn(view)[1:] == ["listing configs"]
    view.show(replace(NEWS, ratio=None, clock_mhz=None))
    assert drawn(view)[1:3] == ["h100-sxm, 1 of 4 problems done", f"{PROBLEM}: not yet compared with the default"]


def test_the_last_known_clock_is_kept() -> None:
    view = TuneView(screen(terminal=True), Budget(trials=200), Clock())
    view.show(NEWS)
    view.show(replace(NEWS, clock_mhz=None))
    assert "at 1755 MHz" in drawn(view)[1]


def test_a_narrow_terminal_gets_a_line_each() -> None:
    view = TuneView(screen(terminal=True), Budget(trials=200), Clock())
    view.show(replace(NEWS, text="x" * 300))
    assert len(drawn(view, width=40)) == 4


def test_a_terminal_is_left_clean() -> None:
    console = screen(terminal=True)
    with TuneView(console, Budget(trials=200), Clock()) as view:
        view.show(NEWS)
    assert "\x1b[?25h" in written(console)  # the cursor is back


def test_a_terminal_is_left_clean_by_an_interrupt_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    console, streams = screen(terminal=True), (sys.stdout, sys.stderr)
    monkeypatch.setattr("rich.live.Live.refresh", interrupt)
    with pytest.raises(KeyboardInterrupt), TuneView(console, Budget(trials=200), Clock()):
        raise AssertionError("it has begun")
    assert written(console).endswith("\x1b[?25h")
    assert (sys.stdout, sys.stderr) == streams


def test_a_log_gets_a_line_for_each_tenth() -> None:
    console = screen(terminal=False, width=40)
    with TuneView(console, Budget(trials=200), Clock()) as view:
        view.show(NEWS)
        view.show(replace(NEWS, done=0.29, text="another of the same tenth"))
        view.show(Progress(0.31, "x" * 100))
    assert written(console) == (
        f"20 %, 1 of 4 problems done, 0.912 of the default's time: last [step]\n30 %: {'x' * 100}\n"
    )
