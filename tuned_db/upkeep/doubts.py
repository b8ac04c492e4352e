"""Rows that can't be right, or that others contradict: what `flashtune db check` names, so that people can decide.

Nothing is decided here. Times that no card can have measured count nowhere anyhow, dates order nothing, and a failure
counts until it is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashtune.errors import InvalidInput
from flashtune.tuned_db.policy.plausible import impossible
from flashtune.tuned_db.records.dates import check_ahead
from flashtune.tuned_db.records.measurement import REJECTING, Measurement, Variant

AHEAD = "dated after now"
IMPOSSIBLE = "of times or ratios that no card can have measured"
CONTRADICTED = "failures of what another session found right on the same GPU model; they bar it there"
LONELY = "failures of a GPU model on which nothing is known to be right"

Claimed = tuple[str, str, Variant]
"""Device-model key, spec key and variant: what fails, or is right."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """One row, and what is odd about it."""

    row: Measurement
    reason: str
    """`AHEAD`, `IMPOSSIBLE`, `CONTRADICTED` or `LONELY`."""
    why: str
    """In this row."""


def doubts(rows: Iterable[Measurement], others: Iterable[Measurement], last: str) -> list[Doubt]:
    """What is odd about ``rows``, by what they and ``others`` say and for the latest date that there may be."""
    rows = list(rows)
    right: dict[Claimed, set[str]] = {}
    for each in (*rows, *others):
        if each.status == "ok":
            right.setdefault(_claimed(each), set()).add(each.session)
    models = {gpu_key for gpu_key, *_ in right}
    found = []
    for each in rows:
        try:
            check_ahead(each.created, last)
        except InvalidInput as error:
            found.append(Doubt(each, AHEAD, str(error)))
        if why := impossible(each):
            found.append(Doubt(each, IMPOSSIBLE, why))
        if each.status in REJECTING and (sessions := right.get(_claimed(each), set()) - {each.session}):
            said = f"session {min(sessions)}" if len(sessions) == 1 else f"{len(sessions)} sessions"
            found.append(Doubt(each, CONTRADICTED, f"{each.status}, and {said} found it right"))
        if each.status in REJECTING and each.gpu_key not in models:
            found.append(Doubt(each, LONELY, f"{each.status} on {each.gpu_name}, for which no other row speaks"))
    return found


def _claimed(row: Measurement) -> Claimed:
    return row.gpu_key, row.problem.spec.key, row.variant
