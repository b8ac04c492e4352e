"""What the commands print: tables and sentences made of plain values."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from .output import safe

if TYPE_CHECKING:
    from flashtune.codegen.plan.config import Config
    from flashtune.tuner.results.report import Report, Row

PLAIN_WIDTH = 200
"""Columns where the output is no terminal: a file or a pipe should not wrap at 80."""
TOP_REASONS = 6


class SafeConsole(Console):
    """A console that takes no text for markup, and shows control characters in it as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for each in super().render(renderable, options):
            yield each if each.control else Segment(safe(each.text), each.style)


def console(*, is_error: bool = False) -> Console:
    """Standard output or error; colours and width as the terminal has them."""
    stream = sys.stderr if is_error else sys.stdout
    made = SafeConsole(file=getattr(stream, "styled", stream), stderr=is_error)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def table(*headings: str, title: str | None = None) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def config_text(config: Config) -> str:
    """The family, then the parameters with room to wrap between them."""
    return f"{config.family} " + " ".join(config.key.split(","))


def difference(config: Config, base: Config) -> str:
    """How ``config`` differs from ``base``: its own values of the parameters that are not the same."""
    if config.family != base.family:
        return config_text(config)
    changed = (each.name for each in config.parameters() if getattr(config, each.name) != getattr(base, each.name))
    return " ".join(f"{name}={str(getattr(config, name)).lower()}" for name in changed)


def print_report(out: Console, report: Report, database: str) -> None:
    """The table at the end of a run, then what was not legal, what failed, and where everything is."""
    kind = "tuned" if report.measured else "predicted, nothing was measured"
    headings = ["problem", "chosen config", "time", "speed-up", "of limit", "why", "next best"]
    shown = table(*headings, title=f"{report.gpu}: {kind}")
    for row in report.rows:
        shown.add_row(*(Text(cell) for cell in _cells(row)))
    out.print(shown)
    # Without a compile, of this run or an earlier one, the model's best is shown and not stored.
    stored = [row for row in report.rows if row.config is not None and row.tried + row.known]
    if not report.measured:
        bare = sum(row.config is not None for row in report.rows) - len(stored)
        sentences = [f"Nothing was measured: {report.note}."]
        if stored:
            sentences.append(
                "The times are a model's, with registers and spills from the compiler; they are stored as predictions "
                "and give way to any measurement."
            )
        if bare:
            which = f"The times of {bare} problems" if stored else "The times"
            sentences.append(f"{which} are the model's alone: nothing was compiled for them, and they are not stored.")
        out.print(" ".join(sentences))
    if report.rejected:
        out.print(f"Not legal for these problems: {_counted(report.rejected)}")
    if report.failed:
        out.print(f"Tried and failed: {_counted(report.failed)}")
    for line in _without_config(report):
        out.print(line, soft_wrap=True)  # it has a path to be copied
    if report.blocklisted:
        out.print(f"Blocklisted, since they have cost two workers: {report.blocklisted}")
    if report.flagged:
        out.print(f"Flagged, and used only where there is nothing better: {_counted(report.flagged)}")
    verb = "measured" if report.measured else "compiled"
    earlier = f" ({report.known} were known from earlier runs)" if report.known else ""
    where = f"Stored in {database}" if report.measured or stored else f"Nothing was stored in {database}"
    out.print(f"{report.tried} configs {verb}{earlier} in {report.seconds:.0f} s. {where}")
    if report.interrupted:
        out.print("Interrupted: all results up to here are stored. Run the same command again to go on.")
    if report.stopped:
        out.print(f"Stopped: {report.stopped}")


def _without_config(report: Report) -> list[str]:
    """How many problems got nothing, and of what most of their configs have failed."""
    without = [row for row in report.rows if row.config is None]
    if report.interrupted or not without:
        return []
    failures = Counter(row.failure for row in without if row.failure)
    lines = [f"  {failure}" for failure, _ in failures.most_common(TOP_REASONS)]
    return [f"Nothing was found for {len(without)} of {len(report.rows)} problems{':' if lines else '.'}", *lines]


def _cells(row: Row) -> tuple[str, ...]:
    if row.config is None or row.seconds is None:
        return str(row.problem), "-", "-", "-", "-", row.why, "-"
    following = "-"
    if row.next_best is not None and row.next_ratio is not None:
        following = f"{difference(row.next_best, row.config)} ({100 * (row.next_ratio - 1):+.1f} %)"
    limit = "-" if row.reached is None else f"{100 * row.reached:.0f} % of {row.limited_by}"
    times = milliseconds(row.seconds), speed_up(row), limit
    return str(row.problem), config_text(row.config), *times, row.why, following


def speed_up(row: Row) -> str:
    """Over the default, with the interval of finals: the inverse of how times are compared."""
    if row.ratio is None:
        return "-"
    if row.ratio_low is None or row.ratio_high is None or row.ratio_low == row.ratio_high:
        return f"{1 / row.ratio:.3f}"
    return f"{1 / row.ratio:.3f} [{1 / row.ratio_high:.3f}, {1 / row.ratio_low:.3f}]"


def _counted(counts: Counter[str]) -> str:
    parts = [f"{count} x {reason}" for reason, count in counts.most_common(TOP_REASONS)]
    rest = sum(counts.values()) - sum(count for _, count in counts.most_common(TOP_REASONS))
    return "; ".join([*parts, *([f"{rest} x other reasons"] if rest else [])])
