"""Sessions of one problem: in order, each with its own winner."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from flashtune.tuned_db.upkeep.history import sessions, software

Make = Callable[..., Any]


def test_sessions_come_oldest_first_whatever_the_order_of_rows(measurement: Make) -> None:
    rows = [
        measurement(session=name, created=f"2026-11-{day}T12:00:00.000Z")
        for name, day in (("b", 20), ("a", 21), ("c", 19), ("b", 25))
    ]
    for each in itertools.permutations(rows):
        found = sessions(each)
        assert [one.session for one in found] == ["c", "b", "a"]
        assert (found[1].began, found[1].ended) == ("2026-11-20T12:00:00.000Z", "2026-11-25T12:00:00.000Z")


def test_each_has_its_own_winner_with_its_interval(measurement: Make, pair: Make) -> None:
    slow = {"paired_ratio": 0.95, "ratio_low": 0.94, "ratio_high": 0.96, "rounds": 20}
    fast = {"paired_ratio": 0.75, "ratio_low": 0.74, "ratio_high": 0.76, "rounds": 20}
    first, second = sessions(
        [
            measurement(session="a", config=pair(block=32, stages=1), **fast),
            measurement(session="a", config=pair(block=64, stages=2), **slow),
            measurement(session="b", config=pair(block=64, stages=2), created="2026-12-01T00:00:00.000Z", **slow),
        ]
    )
    assert first.best is not None
    assert second.best is not None
    assert (first.best.config.key, first.best.ratio, first.best.low) == ("block=32,stages=1", 0.75, 0.74)
    assert (second.best.config.key, second.best.ratio, second.best.high) == ("block=64,stages=2", 0.95, 0.96)


def test_what_is_barred_elsewhere_wins_in_no_session(measurement: Make) -> None:
    row = measurement()
    assert sessions([row])[0].best is not None
    assert sessions([row], {row.variant})[0].best is None


def test_a_session_without_a_winner_is_there_too(measurement: Make) -> None:
    rows = [measurement(status=each, median_us=None) for each in ("timeout", "timeout", "spills")]
    (found,) = sessions(rows)
    assert found.best is None
    assert (found.measurements, found.statuses) == (3, Counter(timeout=2, spills=1))


def test_where_it_was_measured(measurement: Make) -> None:
    (found,) = sessions([measurement(unit="GPU-b"), measurement(unit="GPU-a", driver="590"), measurement(unit="")])
    assert found.units == ("GPU-a", "GPU-b")
    assert found.software == (
        "flashtune 0.1.0, NVRTC 13.0, driver 580.159, CuPy 14.2.0",
        "flashtune 0.1.0, NVRTC 13.0, driver 590, CuPy 14.2.0",
    )
    assert software(measurement(flashtune="", driver="", cupy="")) == "NVRTC 13.0"
    assert sessions([]) == []
