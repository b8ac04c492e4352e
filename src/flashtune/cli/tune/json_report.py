"""The report of `flashtune tune --json`: one JSON document."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashtune.codegen.plan.config import Config
    from flashtune.codegen.problem.problem import Problem
    from flashtune.tuned_db.lookup.captured import Captured
    from flashtune.tuner.commands.one_config import Shared
    from flashtune.tuner.results.report import Report, Row

    from .captured import Capture

SCHEMA = "flashtune-report/1"
"""The number grows when a key changes its meaning or goes; keys may be added without that."""


def report_json(
    report: Report, database: str, captured: dict[str, Any] | None = None, shared: Shared | None = None
) -> str:
    """The document as text, ending in a newline. All keys are always there; null is what is not known.

    ======================  ============================================================================
    ``schema``              ``flashtune-report/1``
    ``gpu``                 ``name`` and ``key`` of the device model
    ``measured``            false where the GPU was not at hand: all times are then a model's predictions
    ``session``             id of the run in the database
    ``database``            path of the tuning database
    ``seconds``             how long the run took
    ``tried``               configs measured, or compiled where nothing was measured; one that problems share is one
    ``interrupted``         true after Ctrl-C; the exit code is then 130, and see `interrupted_json`
    ``stopped``             why the run ended early otherwise, or null; the exit code is then 1, and also where a
                            problem has no ``config``
    ``note``                what else is to be said, or null
    ``rejected``            configs that are not legal, once for problems that differ in sizes alone: {reason: count}
    ``failed``              configs that were tried and failed: {status: count}
    ``blocklisted``         configs that are not tried because they have cost two workers (a count)
    ``flagged``             measurements that say little, such as ones beside other work: {reason: count}
    ``problems``            one object per problem, in the order asked for; see below
    ``captured``            with ``--captured``: ``file``, ``tuned`` (a count), ``left`` (a list of ``problem``,
                            ``name`` and ``count``), ``other_gpus`` ({key: count}), ``unreadable_lines``; else null
    ``shared_config``       with ``--shared-config``: ``config``, its ``ratio`` to each problem's best (geometric mean),
                            ``worst`` (a name), ``worst_ratio``, ``considered`` (a count); else, or if none, null
    ======================  ============================================================================

    Each object of ``problems``:

    ======================  ============================================================================
    ``name``                the problem as the tables print it
    ``problem``             all fields of `flashtune.Problem`
    ``config``              ``family``, and all ``parameters`` by name; null where nothing could be tried
    ``seconds``             its time, or the predicted one
    ``ratio``               its time relative to the default config; below 1 is faster
    ``ratio_low``,          interval that holds the true ratio with 95 %
    ``ratio_high``
    ``tied``                configs that finals can't tell from each other, this one included
    ``reached``             part of what the card's rates allow
    ``limited_by``          which rate that is: ``tensor rate``, ``float32 rate`` or ``bandwidth``; or null
    ``why``                 what bounds it, or why there is none
    ``next_best``           another config, as ``config``
    ``next_ratio``          time of the next best relative to the chosen
    ``tried``, ``known``    configs tried in this run, and known from earlier ones
    ``failure``             what most of the configs that failed have failed of: ``status``, ``count``, ``message`` (the
                            compiler's first line, say), ``source`` (path of a refused source, or null); or null
    ======================  ============================================================================
    """
    document = {
        "schema": SCHEMA,
        "gpu": {"name": report.gpu.name, "key": report.gpu.key},
        "measured": report.measured,
        "session": report.session,
        "database": database,
        "seconds": report.seconds,
        "tried": report.tried,
        "interrupted": report.interrupted,
        "stopped": report.stopped or None,
        "note": report.note or None,
        "rejected": dict(report.rejected),
        "failed": dict(report.failed),
        "blocklisted": report.blocklisted,
        "flagged": dict(report.flagged),
        "problems": [_row(each) for each in report.rows],
        "captured": captured,
        "shared_config": shared and _shared(shared),
    }
    return _text(document)


def interrupted_json(problems: Sequence[Problem], database: str) -> str:
    """The same document where Ctrl-C left no report: mostly since the run had not begun, so nothing is known of it.

    It has all keys, in ``gpu`` too; ``problems`` are those asked for, as far as the options were read.
    """
    from flashtune.tuner.results.report import Row

    rows = (_row(Row(problem=each, why="interrupted before there was a report")) for each in problems)
    document = {
        "schema": SCHEMA,
        "gpu": {"name": None, "key": None},
        "measured": None,
        "session": None,
        "database": database,
        "seconds": None,
        "tried": None,
        "interrupted": True,
        "stopped": None,
        "note": None,
        "rejected": {},
        "failed": {},
        "blocklisted": None,
        "flagged": {},
        "problems": [{**each, "tied": None, "tried": None, "known": None} for each in rows],
        "captured": None,
        "shared_config": None,
    }
    return _text(document)


def captured_json(capture: Capture, left: Sequence[Captured]) -> dict[str, Any]:
    """The value of ``captured``."""
    return {
        "file": str(capture.file),
        "tuned": len(capture.mine) - len(left),
        "left": [
            {"name": str(each.problem), "problem": problem_json(each.problem), "count": each.count} for each in left
        ],
        "other_gpus": dict(capture.others),
        "unreadable_lines": capture.strange,
    }


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _shared(shared: Shared) -> dict[str, Any]:
    return {
        "config": config_json(shared.config),
        "ratio": shared.ratio,
        "worst": str(shared.worst),
        "worst_ratio": shared.worst_ratio,
        "considered": shared.considered,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": str(row.problem),
        "problem": problem_json(row.problem),
        "config": config_json(row.config),
        "seconds": row.seconds,
        "ratio": row.ratio,
        "ratio_low": row.ratio_low,
        "ratio_high": row.ratio_high,
        "tied": row.tied,
        "reached": row.reached,
        "limited_by": row.limited_by or None,
        "why": row.why,
        "next_best": config_json(row.next_best),
        "next_ratio": row.next_ratio,
        "tried": row.tried,
        "known": row.known,
        "failure": row.failure and {**dataclasses.asdict(row.failure), "source": row.failure.source or None},
    }


def problem_json(problem: Problem) -> dict[str, Any]:
    """All fields by name."""
    return dataclasses.asdict(problem)


def config_json(config: Config | None) -> dict[str, Any] | None:
    """The family, and all parameters by name."""
    if config is None:
        return None
    return {
        "family": config.family,
        "parameters": {each.name: getattr(config, each.name) for each in config.parameters()},
    }
