"""`flashtune tune`: a view of the tuner at work, then its report."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.common.group import FAILED, INTERRUPTED
from flashtune.cli.common.tables import config_text, console, print_report
from flashtune.files import shown_path
from flashtune.settings import database_path

from .captured import Capture, print_left, read_capture
from .json_report import captured_json, report_json
from .live import TuneView

if TYPE_CHECKING:
    from flashtune.codegen.gpu.gpu import Gpu
    from flashtune.codegen.problem.problem import Problem
    from flashtune.tuner.commands.one_config import Shared
    from flashtune.tuner.results.report import Report


def run_tune(
    gpu: str | None,
    problems: Sequence[Problem] | None,
    *,
    budget: str,
    mode: Any,
    devices: Sequence[int] | None,
    ray: str | None = None,
    families: Collection[str] | None,
    sampler: str,
    seed: int,
    database: Path | None,
    share: bool = False,
    as_json: bool = False,
    source: Path | None = None,
) -> None:
    """Tunes ``problems`` (of the file ``source``), those that were captured if None, and prints the report."""
    from flashtune.tuned_db.store.store import Store
    from flashtune.tuner.commands.one_config import check_shareable, shared_config
    from flashtune.tuner.results.budget import parse_budget
    from flashtune.tuner.tune.session import locate, tune

    limit = parse_budget(budget)
    path = database or database_path()
    capture: Capture | None = None
    if problems is None:
        capture = read_capture(gpu, mode, devices, families, ray)
        problems = [each.problem for each in capture.untuned(path)]
        if not problems:
            _print(_nothing_left(capture), path, capture, None, as_json)
            return
    if source is not None:
        _check_served(source, problems, locate(gpu, mode, devices)[0], families)
    if share:
        check_shareable(problems)
    unheard = contextlib.redirect_stdout(io.StringIO()) if ray else contextlib.nullcontext()
    # Ray prints a page for each worker that dies to standard output, which is for the report: the log has a line of it.
    with TuneView(console(is_error=True), limit) as view, unheard:
        report = tune(
            problems,
            gpu,
            mode=mode,
            devices=devices,
            database=path,
            budget=limit,
            sampler=sampler,
            seed=seed,
            families=families,
            progress=view.show,
            ray=ray,
        )
    shared = None
    if share:
        with Store.open(path, create=False, readonly=True) as store:
            shared = shared_config(store, problems, report.gpu, measured=report.measured)
    _print(report, path, capture, shared, as_json)
    if share and not shared:
        click.echo("No config is known for all of the problems yet, so none is shared: search longer.", err=True)
    if report.interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if report.stopped or any(row.config is None for row in report.rows):
        raise click.exceptions.Exit(FAILED)


def _check_served(file: Path, problems: Sequence[Problem], gpu: Gpu, families: Collection[str] | None) -> None:
    """Names the place in ``file`` of a problem that no kernel serves."""
    from flashtune.errors import UnsupportedProblem
    from flashtune.tuner.tune.session import eligible

    for number, each in enumerate(problems, start=1):
        try:
            eligible(each, gpu, families)
        except UnsupportedProblem as error:
            raise UnsupportedProblem(f"{shown_path(file)}, problem {number} of {len(problems)}: {error}") from error


def _print(report: Report, database: Path, capture: Capture | None, shared: Shared | None, as_json: bool) -> None:
    """The report on standard output, as tables or as one JSON document."""
    left = capture.untuned(database) if capture else []
    if as_json:
        captured = captured_json(capture, left) if capture else None
        document = report_json(report, str(database), captured, shared)
        try:
            click.echo(document, nl=False)
        except KeyboardInterrupt:  # what is written can't be taken back, and a second document must not follow it
            raise click.exceptions.Exit(INTERRUPTED) from None
        return
    out = console()
    if report.rows:
        print_report(out, report, shown_path(database))
        if report.measured and report.note:
            click.echo(f"Note: {report.note}")
    if shared:
        click.echo(
            f"One config for all: {config_text(shared.config)}, {shared.ratio:.3f} of each problem's best time in the "
            f"geometric mean, {shared.worst_ratio:.3f} at worst ({shared.worst}); of {shared.considered} known for all"
        )
    if capture:
        print_left(out, capture, left)


def _nothing_left(capture: Capture) -> Report:
    from flashtune.tuner.results.report import Report

    note = "every captured problem of this GPU is tuned" if capture.mine else "no problem of this GPU was captured"
    return Report(gpu=capture.gpu, measured=capture.measures, rows=(), session="", seconds=0.0, note=note)
