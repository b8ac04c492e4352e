"""What may enter a record, from anywhere."""

from __future__ import annotations

import dataclasses
import json
import math
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from flashtune.errors import InvalidInput
from flashtune.tuned_db.records.limits import MESSAGE_LIMIT, check, settled
from flashtune.tuned_db.records.measurement import STATUSES, Choice, Measurement, canonical, new_id, now, to_json
from flashtune.tuned_db.records.parse import measurement_from_json

Make = Callable[..., Any]


def test_ids_are_uuid_7_and_sort_by_time() -> None:
    ids = [new_id() for _ in range(200)]
    assert {uuid.UUID(each).version for each in ids} == {7}
    assert {uuid.UUID(each).variant for each in ids} == {uuid.RFC_4122}
    assert len(set(ids)) == 200
    # Within a quarter of a microsecond the random bits decide, so only the times are ordered.
    assert [each[:18] for each in ids] == sorted(each[:18] for each in ids)


def test_now_is_a_time_that_records_take(measurement: Make) -> None:
    check(measurement(created=now()))


@pytest.mark.parametrize("status", STATUSES)
def test_json_and_back_is_the_identity(measurement: Make, status: str) -> None:
    record = measurement(status=status)
    assert measurement_from_json(json.loads(canonical(to_json(record)))) == record


def test_json_leaves_out_what_is_neutral(measurement: Make) -> None:
    data = to_json(measurement(seed=None, message=""))
    assert "seed" not in data
    assert "message" not in data
    assert data["config"] == {"block": 128, "stages": 2}


REFUSED: list[tuple[str, Any]] = [
    ("status", "great"),
    ("status", "ok "),
    ("stage", "warm-up"),
    ("stage", None),
    ("id", "1"),
    ("id", str(uuid.UUID(int=1)).upper() + "F"),
    ("created", "yesterday"),
    ("created", 20261129),
    ("created", "9998-19-39T29:59:69.900Z"),
    ("created", "2026-02-29T12:00:00.000Z"),
    ("created", "2026-11-29T24:00:00.000Z"),
    ("created", "2026-11-29T12:00:60.000Z"),
    ("created", "0000-00-00T00:00:00.000Z"),
    ("created", "1969-12-31T23:59:59.999Z"),
    ("created", "9999-12-31T00:00:00.000Z"),
    ("created", "2026-11-29T12:00:00Z"),
    ("created", "2026-W48-7T12:00:00.000Z"),
    ("created", "2026-11-29 12:00:00.000Z"),
    ("created", "2026-11-29T12:00:00.000Z\n"),
    ("created", "\uff12026-11-29T12:00:00.000Z"),
    ("gpu_key", "\u0669.\u0660/h200"),
    ("session", ""),
    ("session", "x" * 201),
    ("gpu_key", "h200"),
    ("gpu_key", "9.0a/\nh200"),
    ("gpu_name", ""),
    ("source_digest", "abc"),
    ("source_digest", "g" * 64),
    ("median_us", "80"),
    ("median_us", True),
    ("median_us", -1.0),
    ("median_us", 1e300),
    ("baseline_us", 0),
    ("samples", -1),
    ("samples", 1.5),
    ("samples", None),
    ("max_error", -0.1),
    ("registers", 10**9),
    ("registers", 12.0),
    ("spill_bytes", -4),
    ("clock_mhz", "fast"),
    ("paired_ratio", 0),
    ("paired_ratio", "0.9"),
    ("ratio_low", -1.0),
    ("ratio_high", 1e9),
    ("rounds", 0),
    ("rounds", 2.5),
    ("power_w", -1),
    ("temperature_c", "hot"),
    ("throttle", "tired"),
    ("throttle", "power_cap,{{ 7*7 }}"),
    ("throttle", 8),
    ("throttle", "power_cap,"),
    ("throttle", ","),
    ("throttle", "," * 70_000),
    ("throttle", "power_cap,power_cap"),
    ("throttle", "power_cap, sync_boost"),
    ("contended", 1),
    ("contended", "no"),
    ("seed", 2**63),
    ("seed", -1),
    ("nvrtc", "13.0; rm"),
    ("unit", b"\x80\x04."),
    ("message", "x" * (MESSAGE_LIMIT + 1)),
    ("message", 5),
]


@pytest.mark.parametrize(("name", "bad"), REFUSED, ids=lambda each: str(each)[:20])
def test_a_field_out_of_range_is_refused_by_name(measurement: Make, name: str, bad: object) -> None:
    with pytest.raises(InvalidInput, match=name):
        check(measurement(**{name: bad}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": {"block": "64\n__device__ int x=1;", "stages": 2}}, "block must be int"),
        ({"config": {"block": "{{ 7*7 }}", "stages": 2}}, "block must be int"),
        ({"config": {"block": 64, "stages": 2, "order": "{{ 7*7 }}"}}, "order=.* is not allowed"),
        ({"config": {"block": 64, "stages": 2, "order": "plain\n__device__ int x=1;"}}, "order=.* is not allowed"),
        ({"config": {"block": 65, "stages": 2}}, "block=.*65.* is not allowed"),
        ({"config": {"block": 64.0, "stages": 2}}, "block must be int"),
        ({"config": {"block": True, "stages": 2}}, "block must be int"),
        ({"config": {"block": 64}}, "stages"),
        ({"config": {"block": 64, "stages": 2, "more": 1}}, "no field '?more"),
        ({"config": "gASVDAAAAAAAAACMBHBvc2l4lC4="}, "config must be a JSON object"),
        ({"config": ["block", 64]}, "config must be a JSON object"),
        ({"family": "triple"}, "'triple' is not known"),
        ({"family": None}, "family must be text"),
        ({"family": "../pair"}, "is not known"),
        ({"problem": {"dtype": "float16"}}, "needs a value for"),
        ({"problem": None}, "problem must be a JSON object"),
        ({"unknown": 1}, "no field 'unknown'"),
    ],
)
def test_untrusted_data_gets_a_reason(measurement: Make, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        measurement_from_json(to_json(measurement()) | changes)


@pytest.mark.parametrize("place", ["", "problem", "config"])
def test_of_thousands_of_unknown_fields_a_few_are_named(measurement: Make, place: str) -> None:
    row = to_json(measurement())
    (row[place] if place else row).update({f"more{number}": 1 for number in range(5000)})
    with pytest.raises(InvalidInput, match=r"no field '?more0'?, .* and 4995 more") as caught:
        measurement_from_json(row)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["id", "problem", "config", "family", "status"])
def test_a_missing_field_is_named(measurement: Make, name: str) -> None:
    data = to_json(measurement())
    del data[name]
    with pytest.raises(InvalidInput, match=f"needs {name}"):
        measurement_from_json(data)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -3.0, 0.0, 0, None], ids=str)
def test_a_time_that_is_no_time_is_a_failure(measurement: Make, bad: float | None) -> None:
    stored = settled(measurement(median_us=bad))
    assert (stored.status, stored.median_us) == ("failed", None)
    assert ("no time" if bad is None else f"median_us={bad}") in stored.message
    check(stored)


@pytest.mark.parametrize("name", ["q20_us", "q80_us"])
def test_a_spread_that_is_no_time_is_a_failure(measurement: Make, name: str) -> None:
    assert settled(measurement(**{name: math.nan})).status == "failed"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_that_is_no_number_is_wrong(measurement: Make, bad: float) -> None:
    stored = settled(measurement(max_error=bad, median_us=math.nan))
    assert (stored.status, stored.max_error) == ("wrong", None)
    check(stored)


@pytest.mark.parametrize(
    "changes", [{"ratio_low": 0.7}, {"ratio_high": 0.9}, {"ratio_low": 0.81, "ratio_high": 0.9, "paired_ratio": 0.8}]
)
def test_an_interval_is_whole_and_holds_its_ratio(measurement: Make, changes: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="in this order"):
        check(measurement(**changes))
    check(measurement(paired_ratio=0.8))
    check(measurement(paired_ratio=0.8, ratio_low=0.8, ratio_high=0.8))


@pytest.mark.parametrize("name", ["paired_ratio", "ratio_low", "ratio_high"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_an_interval_that_is_none_costs_the_interval(measurement: Make, name: str, bad: float) -> None:
    whole = {"paired_ratio": 0.7, "ratio_low": 0.6, "ratio_high": 0.75}
    stored = check(settled(measurement(**(whole | {name: bad}))))
    assert (stored.paired_ratio, stored.ratio_low, stored.ratio_high) == (None, None, None)
    assert (stored.status, stored.ratio) == ("ok", 0.8)
    assert name in stored.message


@pytest.mark.parametrize("name", ["clock_mhz", "power_w", "temperature_c"])
def test_a_reading_that_is_none_costs_only_itself(measurement: Make, name: str) -> None:
    stored = check(settled(measurement(**{name: math.nan})))
    assert (getattr(stored, name), stored.status) == (None, "ok")


def test_a_baseline_that_is_no_time_costs_only_the_ratio(measurement: Make) -> None:
    stored = settled(measurement(baseline_us=math.nan))
    assert (stored.status, stored.median_us, stored.ratio) == ("ok", 80.0, None)


def test_a_good_measurement_is_stored_as_it_is(measurement: Make) -> None:
    record: Measurement = measurement(message="a note\n\twith lines")
    assert settled(record) == record


def test_a_message_is_cut_and_made_printable(measurement: Make) -> None:
    stored = settled(measurement(message="bell \a " + "x" * 5000))
    assert stored.message.startswith("bell ? x")
    assert len(stored.message) == MESSAGE_LIMIT
    check(stored)


def test_records_cannot_be_changed(measurement: Make) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        measurement().median_us = 1.0


def test_a_choice_prints_config_level_and_evidence(pair: Make) -> None:
    choice = Choice(config=pair(block=64, stages=1), level="older_source", evidence="measured long ago")
    assert str(choice) == "pair(block=64,stages=1), older source: measured long ago"
