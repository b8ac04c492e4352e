"""The policy by which variants are blocklisted, and look-ups that leave them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import PairConfig

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.policy.blocklist import Failure, barred, blocklisted
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.records.measurement import Variant
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
VARIANT, OTHER = ("pair", "block=16", "a" * 64), ("pair", "block=16", "b" * 64)
WINNER = PairConfig(block=128, stages=2)


H200, H100 = gpu_by_alias("h200"), gpu_by_alias("h100")
POTATO = "7.5/potato"


def failure(
    status: str, rows: int = 1, *, variant: Variant = VARIANT, gpu: str = H200.key, day: int = 1, card: str = "a"
) -> Failure:
    """Of a block that has a session for each day and card."""
    return Failure(variant, status, gpu, f"{day}{card}", card, f"2026-11-{day:02}T12:00:00.000Z", rows)


@pytest.mark.parametrize(
    ("failures", "listed"),
    [
        ([], False),
        ([failure("illegal_access")], True),
        ([failure("timeout")], False),
        ([failure("timeout", 2)], True),
        ([failure("timeout"), failure("timeout", day=2)], True),
        ([failure("timeout"), failure("timeout", variant=OTHER)], False),
        ([failure(each, 9) for each in ("wrong", "out_of_memory", "failed", "ok")], False),
    ],
    ids=["none", "crashed", "hung-once", "hung-twice", "hung-in-two-sessions", "other-source", "other-statuses"],
)
def test_two_dead_workers_blocklist_a_variant(failures: list[Failure], listed: bool) -> None:
    assert blocklisted(failures, H200.key) == ({VARIANT} if listed else set())


def test_wrong_ones_are_barred_and_not_blocklisted() -> None:
    assert barred([failure("wrong"), failure("timeout", variant=OTHER)], H200.key) == {VARIANT}


@pytest.mark.parametrize("status", ["wrong", "illegal_access"])
def test_a_failure_counts_at_once_on_its_own_model_and_elsewhere_once_another_session_says_so(status: str) -> None:
    """M11: one session of a card that nobody else has took all winners from everybody."""
    one = [failure(status, 9, gpu=POTATO)]
    assert barred(one, POTATO) == {VARIANT}
    assert barred(one, H200.key) == blocklisted(one, H200.key) == set()
    for second, counts in (
        (failure(status, gpu=POTATO), False),
        (failure(status, gpu=POTATO, card=""), False),
        (failure(status, gpu=POTATO, card="b"), True),
        (failure(status, gpu=POTATO, day=2), True),
        (failure(status, gpu=H100.key, day=2, card="b"), True),
        (failure(status, gpu=POTATO, variant=OTHER, day=2), False),
        (failure("failed", gpu=POTATO, day=2), False),
    ):
        assert (barred([*one, second], H200.key) == {VARIANT}) == counts, second


def test_one_session_does_not_confirm_itself_after_midnight_nor_on_its_second_card() -> None:
    one = failure("wrong", gpu=POTATO)
    midnight = one._replace(created="2026-11-02T00:00:00.000Z", unit="b")
    assert barred([one, midnight], H200.key) == set()


def test_hangs_of_other_models_blocklist_once_two_sessions_have_seen_one() -> None:
    one = [failure("timeout", 9, gpu=POTATO)]
    assert blocklisted(one, H200.key) == set()
    assert blocklisted([*one, failure("timeout", day=2)], H200.key) == {VARIANT}
    assert blocklisted([failure("timeout"), failure("timeout", gpu=POTATO)], H200.key) == set()


def test_failures_of_a_made_up_card_take_no_winner_away(
    store: Store, ship: Make, measurement: Make, pair: Make, problem: Make
) -> None:
    """M11, for what ships and what was measured here, at each level of the look-up; and one's own card is believed."""
    wrong = {"status": "wrong", "median_us": None, "baseline_us": None, "paired_ratio": None}
    shapes = [problem(), problem(seqlen_q=4096, seqlen_k=4096)]
    ship(measurement(problem=shapes[0]))
    store.record(measurement(problem=shapes[1]))
    default = pair(block=64, stages=1)
    made_up = {"gpu_key": POTATO, "gpu_name": "potato", "session": "made up", **wrong}
    store.add([measurement(problem=shape, config=each, **made_up) for shape in shapes for each in (default, WINNER)])
    asked = [*shapes, problem(seqlen_q=1100, seqlen_k=1100), problem(causal=True)]
    levels = [find(each, H200, store_path=store.path).level for each in asked]
    assert levels == ["exact", "exact", "neighbour", "default"]
    assert find(asked[0], H100, store_path=store.path).level == "borrowed"
    assert find(asked[3], H200, store_path=store.path).config == default
    store.record(measurement(problem=shapes[0], session="one's own", **wrong))
    assert [find(each, H200, store_path=store.path).level for each in shapes] == ["default", "default"]


def test_a_winner_is_not_borrowed_from_a_chip_on_which_it_is_wrong(
    store: Store, measurement: Make, problem: Make
) -> None:
    """Though one session says so, and not of the chip that asks."""
    h100 = {"gpu_key": H100.key, "gpu_name": H100.name}
    store.record(measurement(**h100))
    assert find(problem(), H200, store_path=store.path).level == "borrowed"
    store.record(measurement(**h100, status="wrong", median_us=None, baseline_us=None, session="later"))
    assert find(problem(), H200, store_path=store.path).level == "default"


def test_hangs_of_two_problems_of_a_spec_count_in_the_store_and_in_rankings(
    store: Store, measurement: Make, pair: Make, problem: Make
) -> None:
    hung, fine = pair(block=16, stages=1), pair(block=32, stages=1)
    shapes = [problem(seqlen_q=length) for length in (512, 1024)]
    rows = [measurement(config=each, problem=shapes[0], median_us=time) for each, time in ((hung, 10.0), (fine, 20.0))]
    store.record_all(rows)
    for session, shape in zip("ab", shapes, strict=True):
        assert not store.blocklisted(shape.spec, H200.key)
        assert rank(rows)[0].config == hung
        death = measurement(
            config=hung, problem=shape, session=session, status="timeout", median_us=None, baseline_us=None
        )
        store.record(death)
        rows.append(death)
    (variant,) = store.blocklisted(shapes[0].spec, H200.key)
    assert variant == rows[0].variant
    assert store.rejected(shapes[0].spec, H200.key) == {variant}
    assert [each.config for each in rank(rows)] == [fine]
    assert not store.blocklisted(problem(causal=True).spec, H200.key)
    winner = store.winner(shapes[0], rows[0].gpu_key)
    assert winner is not None
    assert winner.config == fine


def test_a_look_up_gives_no_variant_that_is_blocklisted_today(
    store: Store, measurement: Make, prediction: Make, pair: Make, problem: Make
) -> None:
    """Neither by rows of an older source, nor of a near problem, nor by a prediction."""
    config = pair(block=128, stages=2)
    near = problem(seqlen_q=2048)
    store.record(measurement(config=config, source_digest="5" * 64))
    store.record(measurement(config=config, problem=near, source_digest="5" * 64))
    store.record_prediction(prediction(config=config))
    gpu = gpu_by_alias("h200")
    assert find(problem(), gpu, store_path=store.path).config == config
    for session in "ab":
        store.record(measurement(config=config, session=session, status="timeout", median_us=None, baseline_us=None))
    choice = find(problem(), gpu, store_path=store.path)
    assert (choice.level, choice.config) == ("default", pair(block=64, stages=1))


def test_a_default_that_crashed_gives_way_to_that_of_another_family(
    store: Store, measurement: Make, pair: Make, problem: Make
) -> None:
    gpu = gpu_by_alias("h200")
    default = find(problem(), gpu, store_path=store.path).config
    store.record(measurement(config=default, status="illegal_access", median_us=None, baseline_us=None))
    other = find(problem(), gpu, store_path=store.path)
    assert (other.level, other.config.family) == ("default", "solo")
    store.record(measurement(config=other.config, status="illegal_access", median_us=None, baseline_us=None))
    assert find(problem(), gpu, store_path=store.path).config == default, "something has to be given"
