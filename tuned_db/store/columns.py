"""Many rows at once, a column at a time: checked by the rules of `limits.py`, and made into records.

A look-up reads some 25 rows of one final and has little time. They share most of their texts, of which each is checked
once here, and it takes half as long to go through one column after the other than through one row after the other.
Which row is to blame is not told: that is what :func:`limits.check` is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from flashtune.tuned_db.records.limits import (
    EXACT,
    NUMBERS,
    STATUS_WORDS,
    TEXTS,
    check_card,
    check_interval,
    check_message,
    check_model,
    check_number,
    check_ok,
    check_text,
    check_words,
)
from flashtune.tuned_db.records.measurement import STAGES, Measurement, Prediction

T = TypeVar("T", Measurement, Prediction)
Columns = Mapping[str, Sequence[Any]]
"""By field of a record."""


def check_columns(kind: type[T], columns: Columns) -> None:
    """:func:`limits.check` of each row: raises :class:`InvalidInput`, of any of the rows, if it does for one."""
    for name, types, low, high, optional in NUMBERS[kind][1]:
        for got in columns[name]:  # as in `check`; a call for each would cost more than all else here
            if type(got) in types and low <= got <= high:
                continue
            if not (got is None and optional):
                check_number(name, got)
    own, _, shared, _ = TEXTS[kind]
    for name in own:
        exact = EXACT[name]
        for got in columns[name]:
            if not (type(got) is str and exact(got)):  # as in `check_text`
                check_text(name, got)
    for name in shared:
        for got in _distinct(columns[name]):
            check_text(name, got)
    for model in set(zip(columns["gpu_key"], columns["gpu_name"], strict=True)):
        check_model(*model)
    if kind is Measurement:
        _check_measured(columns)


def _check_measured(columns: Columns) -> None:
    for got in _distinct(columns["message"]):
        check_message(got)
    for got in _distinct(columns["status"]):
        check_words("status", got, STATUS_WORDS)
    for got in _distinct(columns["stage"]):
        check_words("stage", got, STAGES)
    for of_ok in zip(columns["status"], columns["median_us"], columns["source_digest"], strict=True):
        check_ok(*of_ok)
    for interval in zip(columns["ratio_low"], columns["paired_ratio"], columns["ratio_high"], strict=True):
        check_interval(*interval)
    for card in zip(columns["contended"], columns["throttle"], strict=True):
        check_card(*card)


def _distinct(texts: Sequence[Any]) -> Collection[Any]:
    """Each once. A set takes equal values for one though a check may not (1 and True): no texts, and all refused."""
    try:
        return set(texts)
    except TypeError:  # not hashable: no text, and about to be refused
        return texts


def made(kind: type[T], columns: Columns) -> list[T]:
    """The rows as ``kind(**row)`` makes them, of columns for all of its fields."""
    names, unfrozen = _UNFROZEN[kind]
    found: list[Any] = list(map(unfrozen, *(columns[name] for name in names)))
    for each in found:
        each.__class__ = kind
    return found


def _unfrozen(kind: type) -> tuple[list[str], Callable[..., Any]]:
    """The fields of ``kind``, and what makes of them in their order what is one but for its class, in a tenth of the
    time: the ``__init__`` of a frozen dataclass sets each by a call of ``object.__setattr__``. Python lets an instance
    change to a class with the same slots."""
    names = [field.name for field in dataclasses.fields(kind)]
    return names, dataclasses.make_dataclass(f"Unfrozen{kind.__name__}", names, slots=True, eq=False, repr=False)


_UNFROZEN = {cls: _unfrozen(cls) for cls in (Measurement, Prediction)}
