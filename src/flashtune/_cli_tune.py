"""`flashtune tune`: a progress bar around the tuner, then its report."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ._cli_tables import console, print_report
from .settings import database_path

if TYPE_CHECKING:
    from .codegen.problem import Problem

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def run_tune(
    gpu: str | None,
    problem: Problem | None,
    preset_name: str,
    *,
    budget: str,
    mode: Any,
    devices: Sequence[int] | None,
    families: Collection[str] | None,
    sampler: str,
    seed: int,
    database: Path | None,
) -> None:
    from .tuner import report as reports
    from .tuner.presets import preset
    from .tuner.session import tune

    problems = [problem] if problem is not None else preset(preset_name)
    path = database or database_path()
    screen = Console(stderr=True, highlight=False)
    last = [-1]
    bar = Progress(
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=1.0)

        def show(progress: reports.Progress) -> None:
            bar.update(task, completed=progress.done, description=progress.text)
            tenth = int(10 * progress.done)
            if not screen.is_terminal and tenth > last[0]:  # a log gets a line now and then instead of a bar
                last[0] = tenth
                click.echo(f"{10 * tenth} %: {progress.text}", err=True)

        report = tune(
            problems,
            gpu,
            mode=mode,
            devices=devices,
            database=path,
            budget=budget,
            sampler=sampler,
            seed=seed,
            families=families,
            progress=show,
        )
    print_report(console(), report, str(path))
    if report.measured and report.note:
        click.echo(f"Note: {report.note}")
    if report.stopped:
        sys.exit(1)
    if report.interrupted:
        sys.exit(INTERRUPTED)
