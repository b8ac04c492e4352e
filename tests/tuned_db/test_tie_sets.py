"""The policy for finals with intervals: what is clearly faster wins, what can't be told apart goes by a fixed rule."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashtune.tuned_db.exchange.export_file import read_export, write_bundled
from flashtune.tuned_db.policy import winners
from flashtune.tuned_db.policy.ranked import ALIKE, Ranked
from flashtune.tuned_db.policy.winners import fastest, rank
from flashtune.tuned_db.records.measurement import SLOWDOWNS, THROTTLES, new_id
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

VARIANTS = list(itertools.product((16, 32, 64, 128, 256), (1, 2, 3), ("plain", "reversed")))


def blocks(ranked: Any) -> list[object]:
    return [each.config.to_json()["block"] for each in ranked]


@pytest.fixture
def final(measurement: Make, pair: Make) -> Make:
    """A final row of a config with this block, with a ratio to the default and the half width of its interval."""

    def make(block: int, ratio: float, half: float, *, stages: int = 1, order: str = "plain", **changes: Any) -> Any:
        interval = {"paired_ratio": ratio, "ratio_low": ratio - half, "ratio_high": ratio + half, "rounds": 25}
        return measurement(config=pair(block=block, stages=stages, order=order), **(interval | changes))

    return make


def test_what_is_clearly_faster_wins_whatever_it_needs(final: Make) -> None:
    rows = [final(16, 0.80, 0.01, registers=255, spill_bytes=64), final(32, 0.83, 0.01, registers=64)]
    ranked = rank(rows)
    assert blocks(ranked) == [16, 32]
    assert [each.tied for each in ranked] == [1, 1]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"spill_bytes": 0, "registers": 255}, {"spill_bytes": 8, "registers": 64}),
        ({"registers": 128, "shared_bytes": 99_000}, {"registers": 168, "shared_bytes": 1_000}),
        ({"shared_bytes": 1_000}, {"shared_bytes": 2_000}),
        ({"registers": 255}, {"registers": None}),
    ],
    ids=["spills", "registers", "shared", "unknown"],
)
def test_of_those_that_are_tied_the_one_wins_that_needs_least(
    final: Make, less: dict[str, Any], more: dict[str, Any]
) -> None:
    rows = [final(16, 0.800, 0.01, **more), final(32, 0.810, 0.01, **less)]
    ranked = rank(rows)
    assert blocks(ranked) == [32, 16]
    assert [each.tied for each in ranked] == [2, 2]
    assert fastest(ranked).config == rows[0].config


def test_equal_needs_go_by_key(final: Make) -> None:
    rows = [final(block, ratio, 0.02) for block, ratio in ((64, 0.80), (32, 0.81), (16, 0.80))]
    assert [each.variant for each in rank(rows)] == sorted(each.variant for each in rows)


def test_only_what_overlaps_the_fastest_is_tied_with_it(final: Make) -> None:
    """No chains: the third overlaps the second, but not the first."""
    rows = [final(16, 0.80, 0.01), final(32, 0.815, 0.01, registers=100), final(64, 0.83, 0.01, registers=50)]
    ranked = rank(rows)
    assert blocks(ranked) == [32, 16, 64]
    assert [each.tied for each in ranked] == [2, 2, 1]


def test_a_wide_interval_does_not_help(final: Make) -> None:
    """It overlaps that of the fastest, but would not if it were as narrow."""
    rows = [final(16, 0.80, 0.005), final(32, 0.85, 0.06, registers=32), final(64, 0.808, 0.005, registers=64)]
    ranked = rank(rows)
    assert blocks(ranked) == [64, 16, 32]
    assert [each.tied for each in ranked] == [2, 2, 1]


def test_a_whole_final_of_an_older_source_does_not_hide_what_is_current(final: Make) -> None:
    """26 configs that were faster once, and one that was measured since the source changed."""
    rows = [
        final(block, 0.9, 0.001, stages=stages, order=order, source_digest="0" * 64)
        for block, stages, order in VARIANTS[:26]
    ]
    block, stages, order = VARIANTS[26]
    current = final(block, 0.94, 0.001, stages=stages, order=order, source_digest="1" * 64)
    found, older = winners.with_source(rank([*rows, current]), lambda config: "1" * 64)
    assert found is not None
    assert found.measurement == current
    assert older is not None


def test_a_wide_interval_does_not_help_against_one_without(final: Make) -> None:
    rows = [final(16, 0.90, 0.0, ratio_low=None, ratio_high=None), final(32, 0.94, 0.05, registers=32)]
    assert blocks(rank(rows)) == [16, 32]


def test_half_a_percent_is_no_lead(final: Make) -> None:
    rows = [final(16, 0.800, 0.0005), final(32, 0.8035, 0.0005, registers=32), final(64, 0.806, 0.0005, registers=16)]
    ranked = rank(rows)
    assert blocks(ranked) == [32, 16, 64]
    assert [each.tied for each in ranked] == [2, 2, 1]


@pytest.mark.parametrize("ratio", [0.97, 0.99, 1.01])
def test_what_may_be_slower_than_the_default_loses_to_it(final: Make, ratio: float) -> None:
    default = final(256, 1.0, 0.0, registers=255)
    ranked = rank([default, final(16, ratio, 0.04, registers=32), final(32, 1.2, 0.01)])
    assert [each.measurement for each in ranked] == [default]
    assert ranked[0].tied == 2, "the one that can't be told from it counts"


def test_one_that_may_be_slower_is_no_winner_though_its_ratio_is_best(final: Make) -> None:
    rows = [final(16, 0.90, 0.15, registers=32), final(32, 0.95, 0.01), final(256, 1.0, 0.0)]
    ranked = rank(rows)
    assert blocks(ranked) == [32, 256]
    assert [each.tied for each in ranked] == [2, 1]


@pytest.mark.parametrize("ratio", [0.79, 0.803], ids=["lucky", "near"])
def test_who_left_a_final_is_not_tied_with_who_stayed(final: Make, ratio: float) -> None:
    """Round by round it was slower than the fastest by more than half a percent, or it would have stayed."""
    rows = [
        final(256, 1.0, 0.0, rounds=100),
        final(16, 0.800, 0.002, rounds=100, registers=168),
        final(32, 0.802, 0.002, rounds=100, registers=128),
        final(64, ratio, 0.02, rounds=18, registers=32),
    ]
    ranked = rank(rows)
    assert blocks(ranked) == [32, 16, 64, 256]
    assert [each.tied for each in ranked] == [2, 2, 1, 1]
    assert ranked[2].ratio == pytest.approx(0.800 * (1 + ALIKE))


def test_who_left_one_final_may_win_another(final: Make) -> None:
    """It left behind a config that won't do here any more, and what it was ahead of takes part in the next one."""
    gone = final(16, 0.70, 0.002, rounds=100)
    left = final(32, 0.80, 0.01, rounds=18)
    later = final(64, 0.90, 0.002, rounds=50, session="another")
    assert blocks(rank([gone, left, later])) == [16, 32, 64]
    assert blocks(rank([gone, left, later], [gone.variant])) == [32, 64]


def test_to_have_left_one_final_of_three_is_no_more_than_bad_luck(final: Make) -> None:
    best = [final(16, 0.80, 0.002, rounds=100, session=each, registers=168) for each in "abc"]
    other = [final(32, ratio, 0.01, rounds=rounds, session=each, registers=32)
             for each, ratio, rounds in (("a", 0.799, 18), ("b", 0.801, 100), ("c", 0.802, 100))]  # fmt: skip
    ranked = rank([*best, *other])
    assert ranked[0].ratio == pytest.approx(0.802)
    assert blocks(ranked) == [32, 16]
    assert blocks(rank([best[0], other[0]])) == [16, 32]


def test_a_tie_set_ends_somewhere(final: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "MOST_TIED", 8)
    rows = [
        final(block, 0.8 + number / 1e4, 0.05, stages=stages, order=order, registers=255 - number)
        for number, (block, stages, order) in enumerate(VARIANTS[:12])
    ]
    ranked = rank(rows)
    assert [each.tied for each in ranked] == [8] * 8 + [4] * 4
    assert ranked[0].config == rows[7].config
    assert ranked[8].config == rows[11].config


def plainly(ranked: list[Ranked]) -> list[Ranked]:
    """Rules 4 to 6 word for word: each set is taken of all that wait."""
    waiting, found = sorted(ranked, key=lambda each: each.speed), []
    while leader := next((each for each in waiting if each.may_win), None):
        tied = [each for each in waiting if each.tied_with(leader)]
        tied = sorted(tied, key=lambda each: (each is not leader, not each.may_win, each.speed))[: winners.MOST_TIED]
        able = sorted((each for each in tied if each.may_win), key=lambda each: (each.needs, each.variant))
        found += [each._replace(tied=len(tied)) for each in able]
        waiting = [each for each in waiting if each not in tied]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_sets_are_those_of_the_rules_word_for_word(final: Make, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of intervals as wide as a set and narrow ones, finals that were left early, and several that claim to be the
    default."""
    draw = random.Random(seed)
    monkeypatch.setattr(winners, "MOST_TIED", draw.choice([2, 5, 32]))
    rows = [final(16, 1.0, 0.0, order=each, rounds=50) for each in ("plain", "reversed")]
    for block, stages, order in VARIANTS[2:]:
        ratio, half = draw.choice([0.8, 0.9, 0.995, draw.uniform(0.7, 1.1)]), draw.choice([0, 0.002, 0.03, 0.2])
        changes = {"rounds": draw.choice([18, 50]), "session": draw.choice("ab"), "registers": draw.choice([64, 128])}
        rows.append(final(block, ratio, half, stages=stages, order=order, **changes))
    assert rank(rows) == plainly(winners.variants(rows))


def test_very_many_variants_are_ranked_in_a_moment(final: Make) -> None:
    """A database of some MB may hold them for one problem, and `attention()` looks into it."""
    one = final(16, 0.9, 0.01)
    rows = [dataclasses.replace(one, id=new_id(), source_digest=f"{number:064x}") for number in range(20_000)]
    start = time.process_time()
    assert len(rank(rows)) == len(rows)
    assert time.process_time() - start < 10, "0.5 s; where each set is taken of all that wait, more than 20"


def test_several_finals_count_by_the_median_of_their_intervals(final: Make) -> None:
    lucky = [final(16, 0.5, 0.01, session="a"), *(final(16, 0.9, 0.01, session=each) for each in "bc")]
    steady = [final(32, 0.85, 0.01, session=each) for each in "abc"]
    ranked = rank(lucky + steady)
    assert blocks(ranked) == [32, 16]
    assert (ranked[1].ratio, ranked[1].low, ranked[1].high) == (0.9, 0.89, 0.91)


def test_rows_of_the_first_schema_count_by_their_ratio(final: Make, measurement: Make, pair: Make) -> None:
    old = measurement(config=pair(block=128, stages=1), median_us=82.0, registers=32)
    slow = measurement(config=pair(block=256, stages=1), median_us=100.1)
    assert rank([old])[0].ratio == 0.82
    assert blocks(rank([old, slow, final(16, 0.80, 0.01)])) == [16, 128]
    assert blocks(rank([old, slow, final(16, 0.80, 0.03)])) == [128, 16], "tied, and the old one needs less"


@pytest.mark.parametrize("flag", [{"contended": True}, *({"throttle": each} for each in THROTTLES)], ids=str)
def test_a_time_of_a_shared_or_slowed_card_counts_only_where_there_is_no_other(
    final: Make, flag: dict[str, Any]
) -> None:
    bad = final(16, 0.5, 0.01, session="a", **flag)
    good = final(16, 0.9, 0.01, session="b")
    worthless = "contended" in flag or flag["throttle"] in SLOWDOWNS
    assert bad.flagged == worthless
    assert rank([bad, good])[0].ratio == pytest.approx(0.9 if worthless else 0.7)
    assert rank([bad])[0].ratio == 0.5


def random_rows(final: Make, seed: int) -> list[Any]:
    draw = random.Random(seed)
    rows = [final(64, 1.0, 0.0, registers=64)]
    for block, stages, order in draw.sample(VARIANTS, 12):
        for session in draw.sample("abcd", draw.randint(1, 3)):
            interval = draw.random() < 0.8
            changes = {} if interval else dict.fromkeys(("paired_ratio", "ratio_low", "ratio_high", "rounds"))
            rows.append(
                final(
                    block,
                    draw.uniform(0.7, 1.1),
                    draw.uniform(0.001, 0.1),
                    stages=stages,
                    order=order,
                    session=session,
                    median_us=draw.uniform(70, 120),
                    registers=draw.choice([64, 128, 168]),
                    contended=draw.choice([None, False, True]),
                    **changes,
                )
            )
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_order_and_merging_do_not_matter(final: Make, seed: int, tmp_path: Path, store: Store) -> None:
    """D77, the winner of any finals."""
    rows = random_rows(final, seed)
    expected = rank(rows)
    random.Random(seed).shuffle(rows)
    assert rank(rows) == expected
    store.record_all(rows[:9])
    store.record_all(rows[5:])
    assert store.winner(rows[0].problem, rows[0].gpu_key) == expected[0]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_bundled_gives_the_same_winner(final: Make, seed: int, tmp_path: Path) -> None:
    rows = random_rows(final, seed)
    write_bundled(rows, tmp_path / "rows.jsonl")
    kept = read_export(tmp_path / "rows.jsonl").measurements
    assert rank(kept)[0].variant == rank(rows)[0].variant
