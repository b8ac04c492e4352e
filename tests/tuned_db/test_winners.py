"""The policy that derives winners."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from generated import measurements
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.policy import ranked
from flashtune.tuned_db.policy.winners import best_first, rank, with_source
from flashtune.tuned_db.records.limits import settled
from flashtune.tuned_db.records.measurement import Measurement

Make = Callable[..., Any]


def blocks(ranked: Any) -> list[object]:
    return [each.config.to_json()["block"] for each in ranked]


@pytest.fixture
def tried(measurement: Make, pair: Make) -> Make:
    """A measurement of a config with this block and one stage."""
    return lambda block, **changes: measurement(config=pair(block=block, stages=1), **changes)


def test_finals_come_before_faster_screens(tried: Make) -> None:
    rows = [tried(16, stage="screen", median_us=10.0), tried(32), tried(64, stage="measure", median_us=20.0)]
    assert blocks(rank(rows)) == [32, 64, 16]


def test_a_variant_counts_at_its_best_stage_only(tried: Make) -> None:
    rows = [tried(16, stage="screen", median_us=10.0), tried(16, median_us=90.0), tried(32, median_us=80.0)]
    ranked = rank(rows)
    assert blocks(ranked) == [32, 16]
    assert ranked[1].median_us == 90.0


def test_time_relative_to_the_default_decides_across_sessions(tried: Make) -> None:
    slow_day = tried(16, session="a", median_us=140.0, baseline_us=200.0)
    fast_day = tried(32, session="b", median_us=90.0, baseline_us=100.0)
    assert blocks(rank([fast_day, slow_day])) == [16, 32]


def test_a_variant_with_a_baseline_comes_before_one_without(tried: Make) -> None:
    assert blocks(rank([tried(16, baseline_us=None, median_us=10.0), tried(32)])) == [32, 16]


def test_slower_than_the_default_is_not_a_winner(tried: Make) -> None:
    rows = [tried(16, median_us=100.1), tried(64, median_us=100.0)]
    assert blocks(rank(rows)) == [64]


def test_one_lucky_run_wins_nothing(tried: Make) -> None:
    lucky = [tried(16, session=str(day), median_us=time) for day, time in enumerate((50.0, 90.0, 91.0))]
    steady = [tried(32, session=str(day), median_us=85.0) for day in range(3)]
    ranked = rank(lucky + steady)
    assert blocks(ranked) == [32, 16]
    assert ranked[1].ratio == 0.9


@pytest.mark.parametrize("status", ["wrong", "illegal_access"])
def test_once_wrong_is_never_a_winner(tried: Make, status: str) -> None:
    rows = [tried(16, median_us=10.0), tried(16, status=status, stage="screen", median_us=None), tried(32)]
    assert blocks(rank(rows)) == [32]


def test_wrong_with_another_source_does_not_count(tried: Make) -> None:
    rows = [tried(16, median_us=10.0), tried(16, status="wrong", source_digest="0" * 64)]
    assert blocks(rank(rows)) == [16]


@pytest.mark.parametrize("status", ["timeout", "failed", "skipped", "out_of_memory", "spills", "compile_error"])
def test_other_failures_neither_win_nor_bar(tried: Make, status: str) -> None:
    rows = [tried(16), tried(16, status=status, median_us=None), tried(32, status=status, median_us=10.0)]
    assert blocks(rank(rows)) == [16]


def test_barred_variants_are_out(tried: Make) -> None:
    first, second = tried(16), tried(32)
    assert blocks(rank([first, second], {first.variant})) == [32]


def test_ties_go_to_the_smallest_key_in_any_order(tried: Make) -> None:
    rows = [tried(block) for block in (16, 32, 64, 128, 256)]
    expected = [each.variant for each in rank(rows)]
    assert expected == sorted(each.variant for each in rows)
    for seed in range(20):
        random.Random(seed).shuffle(rows)
        assert [each.variant for each in rank(rows)] == expected


def test_the_newest_row_is_the_evidence(tried: Make) -> None:
    old, new = tried(16, created="2026-01-01T00:00:00.000Z"), tried(16, created="2026-02-01T00:00:00.000Z")
    assert rank([new, old])[0].measurement == new


def test_nothing_measured_has_no_winner() -> None:
    assert rank([]) == []


def test_stage_by_stage_is_the_same_ranking(tried: Make) -> None:
    random_ = random.Random(3)
    rows: list[Measurement] = []
    for _ in range(60):
        stage = random_.choice(["screen", "measure", "final"])
        baseline = 100.0 if stage == "final" and random_.random() < 0.8 else None
        block, time = random_.choice([16, 32, 64, 128, 256]), random_.uniform(50, 130)
        digest = random_.choice("0123") * 64
        rows.append(tried(block, stage=stage, median_us=time, baseline_us=baseline, source_digest=digest))
    staged = best_first(lambda stage: [each for each in rows if each.stage == stage])
    assert list(staged) == rank(rows)


def test_finals_alone_are_read_when_they_decide(tried: Make) -> None:
    asked = []

    def rows(stage: str) -> list[Measurement]:
        asked.append(stage)
        return [tried(16)] if stage == "final" else []

    next(best_first(rows))
    assert asked == ["final"]


def test_current_and_older_sources_are_told_apart(tried: Make) -> None:
    """D81."""
    older, current = tried(16, median_us=50.0, source_digest="0" * 64), tried(32, source_digest="1" * 64)
    found = with_source(rank([current, older]), lambda config: "1" * 64)
    assert [each and each.measurement for each in found] == [current, older]


def test_comparing_sources_renders_each_config_once_and_stops_somewhere(tried: Make) -> None:
    rendered: list[Config] = []

    def digest(config: Config) -> str:
        rendered.append(config)
        return "f" * 64

    blocks = (16, 32, 64, 128, 256)
    rows = [tried(block, source_digest=f"{number:064x}") for block in blocks for number in range(9)]
    late = tried(16, median_us=99.0, source_digest="f" * 64)
    current, older = with_source(rank([*rows, late]), digest, most=3)
    assert current is not None
    assert current.measurement == late
    assert older is not None
    assert len(rendered) == 3
    assert with_source(rank([*rows, tried(64, source_digest="f" * 64)]), digest, most=1)[0] is None


def test_a_row_without_an_interval_is_as_narrow_as_its_ratio(tried: Make) -> None:
    """So an old final that was slower than the default is not hidden behind a newer one's interval."""
    default = tried(64, stage="final", median_us=100.0, baseline_us=100.0)
    old = tried(32, stage="final", median_us=130.0, baseline_us=100.0)
    new = tried(
        32,
        stage="final",
        median_us=95.0,
        baseline_us=100.0,
        paired_ratio=0.95,
        ratio_low=0.94,
        ratio_high=0.96,
        rounds=9,
    )
    assert blocks(rank([default, old, new])) == [64]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(measurements(), min_size=1, max_size=6), data=st.data())
def test_one_row_ranks_as_a_list_of_one(drawn: list[Measurement], data: st.DataObject) -> None:
    """The short way that nearly all variants take is the long one."""
    rows = []
    for each in map(settled, drawn):
        session, rounds = data.draw(st.sampled_from("ab")), data.draw(st.sampled_from((None, 3, 25)))
        rows.append(dataclasses.replace(each, session=session, rounds=rounds))
    rows = [each for each in rows if each.median_us is not None]
    races = ranked.races_of(rows)
    for each in rows:
        assert ranked._of_one(each, races) == ranked._of_many([each], races, None)
