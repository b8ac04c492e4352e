"""Rows that are checked and made together are those that pass one by one: `columns.py` has no rules of its own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from generated import measurements
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import NUMBERS, OTHERS, TEXTS
from sqlalchemy import text

from flashtune.errors import InvalidInput
from flashtune.tuned_db.records.limits import MESSAGE_LIMIT, check, settled
from flashtune.tuned_db.records.measurement import Measurement, Prediction
from flashtune.tuned_db.store import queries
from flashtune.tuned_db.store.columns import check_columns, made
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

NAMES = [field.name for field in dataclasses.fields(Measurement)]
CHECKED = [name for name in NAMES if name not in ("problem", "config")]
ODD = (*TEXTS, *NUMBERS, *OTHERS, "ok", "final", "x" * (MESSAGE_LIMIT + 1), b"\xff", 80, 1.0, "power_cap,tired")
varied = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def columns(records: Sequence[Any]) -> dict[str, list[Any]]:
    return {field.name: [getattr(each, field.name) for each in records] for field in dataclasses.fields(records[0])}


def passes(call: Callable[..., object], *arguments: object) -> bool:
    try:
        call(*arguments)
    except InvalidInput:
        return False
    return True


@varied
@given(data=st.data(), found=st.lists(measurements(), min_size=1, max_size=4))
def test_columns_pass_where_each_row_does(data: st.DataObject, found: list[Measurement]) -> None:
    """Rows that repeat each other's values, some of them spoiled."""
    found = [settled(each) for each in found]
    for _ in range(data.draw(st.integers(0, 3))):
        at, name = data.draw(st.integers(0, len(found) - 1)), data.draw(st.sampled_from(CHECKED))
        others = [getattr(each, name) for each in found]
        spoiled = data.draw(st.sampled_from(ODD) | st.sampled_from(others), label=name)
        found[at] = dataclasses.replace(found[at], **{name: spoiled})
    assert passes(check_columns, Measurement, columns(found)) == all(passes(check, each) for each in found)


@pytest.mark.parametrize("odd", ODD, ids=lambda each: repr(each)[:20])
def test_each_field_is_checked_in_each_row(measurement: Make, odd: object) -> None:
    sound = [measurement(), measurement(), measurement()]
    for name in CHECKED:
        for at in range(len(sound)):
            found = list(sound)
            found[at] = dataclasses.replace(sound[at], **{name: odd})
            assert passes(check_columns, Measurement, columns(found)) == passes(check, found[at]), name


@varied
@given(found=st.lists(measurements(), min_size=1, max_size=4))
def test_what_is_made_is_what_the_constructor_makes(found: list[Measurement]) -> None:
    again = made(Measurement, columns(found))
    assert repr(again) == repr(found), "repr, since NaN is not equal to itself"
    assert {type(each) for each in again} == {Measurement}
    with pytest.raises(dataclasses.FrozenInstanceError):
        again[0].status = "ok"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(again[0])).id == copy.copy(again[0]).id == found[0].id


def test_predictions_are_made_and_checked_too(prediction: Make) -> None:
    found = [prediction(), prediction(rank=2)]
    check_columns(Prediction, columns(found))
    assert made(Prediction, columns(found)) == found
    for name, odd in (("rank", 0), ("rank", None), ("gpu_name", ""), ("created", "today"), ("predicted_us", "5")):
        with pytest.raises(InvalidInput, match=name):
            check_columns(Prediction, columns([found[0], dataclasses.replace(found[1], **{name: odd})]))


def test_no_record_has_more_to_do_when_it_is_made() -> None:
    """`made` sets fields alone."""
    for kind in (Measurement, Prediction):
        assert not hasattr(kind, "__post_init__")


@pytest.mark.parametrize("together", [1, 3, 100])
@pytest.mark.parametrize("bad", ["registers = -1", "status = 'well'", "message = x'ff'"])
def test_a_bad_row_costs_none_but_itself(
    tmp_path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch, together: int, bad: str
) -> None:
    monkeypatch.setattr(queries, "TOGETHER", together)
    name = bad.split()[0]
    with Store.open(tmp_path / "tuned.db") as store:
        found = store.record_all([measurement(seed=number) for number in range(8)])
        with store.backend.writing() as connection:
            connection.execute(text(f"UPDATE measurement SET {bad} WHERE seed = 4"))
        with queries.count_unreadable() as count:
            assert {each.id for each in store.measurements()} == {each.id for each in found if each.seed != 4}
    assert (count.rows, len(count.reasons)) == (1, 1)
    assert name in count.reasons[0]
