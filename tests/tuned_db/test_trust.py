"""The policy of trust: who confirms a claim, who disputes it, and what a disputed variant may still win."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashtune.tuned_db.exchange.export_file import read_export, write_bundled
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.policy.trust import ALIKE_CLAIMS, BLURRED, Claim, trust_of
from flashtune.tuned_db.policy.winners import fastest, rank
from flashtune.tuned_db.records.measurement import TRUST, Measurement, Trust
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]


@pytest.fixture
def final(measurement: Make, pair: Make) -> Make:
    """A final of a block. Each day of November and card, which is a letter, is a session of its own."""

    def make(block: int, ratio: float, half: float = 0.002, *, day: int = 1, card: str = "a", **changes: Any) -> Any:
        interval = {"paired_ratio": ratio, "ratio_low": ratio - half, "ratio_high": ratio + half, "rounds": 25}
        place = {"created": f"2026-11-{day:02}T12:00:00.000Z", "unit": card, "session": f"{day}{card}"}
        return measurement(config=pair(block=block, stages=1), **(interval | place | changes))

    return make


def trusted(rows: list[Measurement]) -> Trust:
    """In the variant of the first row."""
    found = trust_of(rows, rows[0].variant)
    assert found is not None
    return found


def blocks(rows: list[Measurement]) -> list[object]:
    return [each.config.to_json()["block"] for each in rank(rows)]


def test_one_session_is_a_candidate(final: Make) -> None:
    found = trusted([final(16, 0.8), final(16, 0.81)])
    assert (found.level, found.sessions, found.units, found.others) == ("candidate", 1, ("a",), 0)


@pytest.mark.parametrize(("day", "card"), [(2, "a"), (1, "b"), (2, "b")])
def test_another_day_or_card_that_agrees_verifies(final: Make, day: int, card: str) -> None:
    found = trusted([final(16, 0.8), final(16, 0.801, day=day, card=card)])
    assert (found.level, found.agreeing, found.others) == ("verified", 1, 1)
    assert (found.first, found.last) == ("2026-11-01", f"2026-11-{day:02}")


@pytest.mark.parametrize(("day", "card"), [(2, "a"), (1, "b")])
def test_another_day_or_card_that_does_not_agree_disputes(final: Make, day: int, card: str) -> None:
    assert trusted([final(16, 0.8), final(16, 0.83, day=day, card=card)]).level == "disputed"


@pytest.mark.parametrize("second", [0.8, 0.9])
@pytest.mark.parametrize("card", ["a", ""], ids=["the same card", "one that is not known"])
def test_a_second_session_of_the_same_day_and_card_says_nothing(final: Make, card: str, second: float) -> None:
    found = trusted([final(16, 0.8), final(16, second, card=card, session="later")])
    assert (found.level, found.sessions, found.others) == ("candidate", 2, 0)


def test_one_session_does_not_confirm_itself_after_midnight(final: Make) -> None:
    assert trusted([final(16, 0.8, session="s"), final(16, 0.8, day=2, session="s")]).level == "candidate"


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (Claim(0.8, 0.79, 0.81), Claim(0.82, 0.81, 0.83), True),
        (Claim(0.8, 0.799, 0.801), Claim(0.8 * (1 + ALIKE_CLAIMS) - 1e-6, 0.81, 0.82), True),
        (Claim(0.8, 0.799, 0.801), Claim(0.8 * (1 + ALIKE_CLAIMS) + 1e-4, 0.81, 0.82), False),
        (Claim(0.8, 0.8, 0.8), Claim(0.79, 0.79, 0.79), True),
        (Claim(0.8, 0.8, 0.8), Claim(0.9, 0.75, 0.95), True),
        (Claim(0.8, 0.8, 0.8), Claim(0.78, 0.78, 0.78), False),
    ],
    ids=["touching", "alike", "not alike", "points alike", "inside", "points apart"],
)
def test_two_agree_by_their_intervals_or_their_ratios(one: Claim, other: Claim, agree: bool) -> None:
    assert one.agrees(other) == other.agrees(one) == agree


@pytest.mark.parametrize(
    ("ratios", "level"),
    [
        ((0.8, 0.8, 0.9), "verified"),
        ((0.9, 0.8, 0.8), "verified"),
        ((0.8, 0.9, 0.9), "verified"),
        ((0.8, 0.9, 0.8), "verified"),
        ((0.8, 0.8, 0.9, 0.9), "disputed"),
        ((0.8, 0.8, 0.9, 0.9, 0.9), "verified"),
        ((0.8, 0.8, 0.9, 0.8), "verified"),
        ((0.8, 0.8, 0.8, 0.9, 0.9), "verified"),
        ((0.7, 0.8, 0.9), "disputed"),
        ((0.7, 0.8, 0.8, 0.9), "disputed"),
        ((0.8, 0.806, 0.812, 0.9), "verified"),  # of the two in the middle one agrees with two others
        ((0.7, 0.8, 0.806, 0.812), "verified"),
    ],
    ids=str,
)
def test_half_of_the_others_must_say_what_the_median_says(final: Make, ratios: tuple[float, ...], level: str) -> None:
    assert trusted([final(16, ratio, day=day) for day, ratio in enumerate(ratios, start=1)]).level == level


def test_one_session_disputes_nothing_that_two_have_said_whatever_its_date(final: Make) -> None:
    """M9: the newest decided, so one row of the year 9998 disputed a winner for ever, ten honest sessions or not."""
    honest = [final(16, 0.883, day=day) for day in (1, 2, 3)]
    runner_up = [final(32, 0.888), final(128, 1.0, 0.0)]
    for created in ("9998-12-31T00:00:00.000Z", "2026-11-30T12:00:00.000Z", "1970-01-01T00:00:00.000Z"):
        odd = final(16, 1.3, card="z", session="odd", created=created)
        for count in (2, 3):
            assert trusted([*honest[:count], odd]).level == "verified"
            assert blocks([*honest[:count], odd, *runner_up])[0] == 16
        assert trusted([honest[0], odd]).level == "disputed"


@pytest.mark.parametrize("seed", range(40))
def test_dates_tell_witnesses_apart_and_order_none(final: Make, seed: int) -> None:
    """M9: the same rows with their days in another order, the years 1970 and 9998 among them, have the same trust."""
    rows = random_rows(final, seed)
    days = {f"2026-11-0{day}": year for day, year in zip((1, 2, 3), ("9998", "2026", "1970"), strict=True)}
    moved = [dataclasses.replace(each, created=days[each.created[:10]] + each.created[4:]) for each in rows]
    for each, other in zip(rank(rows), rank(moved), strict=True):
        assert each.variant == other.variant
        assert (each.trust and each.trust.level) == (other.trust and other.trust.level)


def test_many_sessions_of_one_day_and_card_are_one_witness(final: Make) -> None:
    crowd = [final(16, 0.9, session=str(number)) for number in range(9)]
    found = trusted([*crowd, final(16, 0.8, day=2), final(16, 0.8, day=3)])
    assert (found.level, found.agreeing, found.others, found.sessions) == ("verified", 1, 2, 11)


@pytest.mark.parametrize("flag", [{"contended": True}, {"throttle": "hw_thermal"}], ids=str)
def test_flagged_rows_count_only_where_there_are_no_others(final: Make, flag: dict[str, Any]) -> None:
    assert trusted([final(16, 0.8), final(16, 0.9, day=2, **flag)]).level == "candidate"
    assert trusted([final(16, 0.8, **flag), final(16, 0.9, day=2, **flag)]).level == "disputed"


def test_a_blurred_session_neither_confirms_nor_disputes(final: Make) -> None:
    wide = 0.51 * BLURRED
    assert trusted([final(16, 0.8), final(16, 0.85, wide, day=2)]).level == "candidate"
    assert trusted([final(16, 0.8, wide), final(16, 0.8, wide, day=2)]).level == "candidate"


def test_ratios_to_different_defaults_are_not_compared(final: Make) -> None:
    """Another default, or the same with another source: the ratio changes though the claim was right."""
    first = [final(16, 0.8), final(128, 1.0, 0.0)]
    assert trusted([*first, final(16, 0.9, day=2), final(128, 1.0, 0.0, day=2)]).level == "disputed"
    for other in (final(256, 1.0, 0.0, day=2), final(128, 1.0, 0.0, day=2, source_digest="0" * 64)):
        assert trusted([*first, final(16, 0.9, day=2), other]).level == "candidate"
    assert trusted([*first, final(16, 0.9, day=2)]).level == "disputed", "not known: the same is assumed"


def test_the_default_claims_nothing_nor_does_what_had_no_final(final: Make) -> None:
    default = final(128, 1.0, 0.0)
    assert trust_of([default, final(128, 1.0, 0.0, day=2)], default.variant) is None
    measured = final(16, 0.8, stage="measure")
    assert trust_of([measured], measured.variant) is None
    assert trust_of([default], measured.variant) is None


def test_rows_of_the_first_schema_count_by_their_ratio(final: Make) -> None:
    old = dict.fromkeys(("paired_ratio", "ratio_low", "ratio_high", "rounds"))
    rows = [final(16, 0, **old, median_us=80.0), final(16, 0, **old, median_us=80.9, day=2)]
    assert trusted(rows).level == "verified"
    assert trusted([rows[0], final(16, 0, **old, median_us=90.0, day=3)]).level == "disputed"


# What it changes


def test_a_disputed_one_does_not_win_over_one_that_is_not(final: Make) -> None:
    rows = [final(16, 0.80), final(16, 0.85, day=2), final(32, 0.95), final(128, 1.0, 0.0)]
    assert blocks(rows[:1] + rows[2:]) == [16, 32, 128], "not disputed yet"
    assert blocks(rows) == [32, 16, 128]
    assert rank(rows)[1].disputed


def test_nor_by_needing_least_in_a_tie(final: Make) -> None:
    rows = [final(16, 0.80, registers=32), final(16, 0.86, day=2, registers=32), final(32, 0.83)]
    assert blocks(rows) == [32, 16]
    assert rank(rows)[0].tied == 1


@pytest.mark.parametrize(("second", "order"), [(0.9, [16, 128]), (0.997, [16, 128]), (1.05, [128])])
def test_against_the_default_alone_each_witness_must_say_that_it_is_no_slower(
    final: Make, second: float, order: list[int]
) -> None:
    """The median of 0.7 and 1.05 is below 1."""
    rows = [final(16, 0.7), final(16, second, day=2), final(128, 1.0, 0.0)]
    assert blocks(rows) == order


def test_one_that_may_be_slower_does_not_hold_a_disputed_one_back(final: Make) -> None:
    rows = [final(16, 0.8), final(16, 0.85, day=2), final(32, 0.99, 0.02), final(128, 1.0, 0.0)]
    assert blocks(rows) == [16, 128]


def test_the_next_session_rehabilitates(final: Make) -> None:
    rows = [final(16, 0.80), final(16, 0.85, day=2), final(32, 0.95), final(16, 0.8, day=3)]
    assert blocks(rows) == [16, 32]


def test_other_cards_count_by_ratio_whatever_their_times(final: Make) -> None:
    rows = [final(16, 0.8, median_us=80.0), final(16, 0.8, card="b", median_us=160.0, baseline_us=200.0)]
    assert trusted(rows).level == "verified"


def random_rows(final: Make, seed: int) -> list[Any]:
    draw = random.Random(seed)
    rows = [final(128, 1.0, 0.0, day=day, card=card) for day in (1, 2, 3) for card in "ab"]
    for block in draw.sample((16, 32, 64, 256), draw.choice([1, 1, 2, 3, 4])):
        base = draw.uniform(0.75, 1.02)
        for _ in range(draw.randint(1, 5)):
            ratio = base * draw.choice([1.0, 1.0, draw.uniform(0.8, 1.1)])
            rows.append(
                final(
                    block,
                    ratio,
                    draw.uniform(0.001, 0.02),
                    day=draw.randint(1, 3),
                    card=draw.choice("ab"),
                    registers=draw.choice([64, 128, 168]),
                    contended=draw.choice([None, False, False, True]),
                )
            )
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_order_and_merging_do_not_matter(final: Make, seed: int, store: Store) -> None:
    rows = random_rows(final, seed)
    expected = rank(rows)
    for again in range(5):
        random.Random(again).shuffle(rows)
        assert rank(rows) == expected
        assert [trust_of(rows, each.variant) for each in expected] == [each.trust for each in expected]
    store.add(rows[:9])
    store.add(rows[5:])
    assert store.winner(rows[0].problem, rows[0].gpu_key) == expected[0]


def test_the_random_rows_hold_all_levels(final: Make) -> None:
    """Else the tests with them would say little."""
    found = [each for seed in range(40) for each in rank(random_rows(final, seed))]
    assert {each.trust.level for each in found if each.trust} == set(TRUST)
    assert sum(rank(random_rows(final, seed))[0].disputed for seed in range(40)) > 0


@pytest.mark.parametrize("seed", range(40))
def test_a_disputed_winner_has_only_the_default_behind_it(final: Make, seed: int) -> None:
    ranking = rank(random_rows(final, seed))
    if ranking[0].disputed:
        assert all(each.disputed or each.trust is None for each in ranking)
    claims = [each.disputed for each in ranking if each.trust is not None]
    assert claims == sorted(claims)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_bundled_gives_the_same_winner_and_trust(final: Make, seed: int, tmp_path: Path) -> None:
    rows = random_rows(final, seed)
    write_bundled(rows, tmp_path / "rows.jsonl")
    before, after = rank(rows), rank(read_export(tmp_path / "rows.jsonl").measurements)
    assert (after[0].variant, after[0].trust) == (before[0].variant, before[0].trust)
    assert fastest(after).variant == fastest(before).variant


def test_a_look_up_says_how_far_its_claim_is_trusted(final: Make, store: Store) -> None:
    rows = [final(16, 0.80), final(16, 0.8, card="b"), final(16, 0.801, day=2)]
    store.add(rows)
    choice = find(rows[0].problem, gpu(), store_path=store.path)
    assert choice.trust == trusted(rows)
    assert (choice.ratio, choice.ratio_low, choice.ratio_high) == (0.8, 0.798, 0.802)
    assert choice.evidence.endswith(
        "; verified, 3 sessions on 2 cards since 2026-11-01: 2 of 2 independent ones agree with the median"
    )


def gpu() -> Any:
    from flashtune.codegen.gpu.table import gpu_by_alias

    return gpu_by_alias("h200")
