"""The policy by which variants are blocklisted, and look-ups that leave them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashtune.codegen.gpu import gpu_by_alias
from flashtune.tuned_db.blocklist import barred, blocklisted
from flashtune.tuned_db.lookup import find
from flashtune.tuned_db.store import Store
from flashtune.tuned_db.winners import rank

Make = Callable[..., Any]
VARIANT, OTHER = ("pair", "block=16", "a" * 64), ("pair", "block=16", "b" * 64)


@pytest.mark.parametrize(
    ("deaths", "listed"),
    [
        ([], False),
        ([(VARIANT, "illegal_access", 1)], True),
        ([(VARIANT, "timeout", 1)], False),
        ([(VARIANT, "timeout", 2)], True),
        ([(VARIANT, "timeout", 1), (VARIANT, "timeout", 1)], True),
        ([(VARIANT, "timeout", 1), (OTHER, "timeout", 1)], False),
        ([(VARIANT, "wrong", 9), (VARIANT, "out_of_memory", 9), (VARIANT, "failed", 9), (VARIANT, "ok", 9)], False),
    ],
    ids=["none", "crashed", "hung-once", "hung-twice", "hung-in-two-sessions", "other-source", "other-statuses"],
)
def test_two_dead_workers_blocklist_a_variant(deaths: list[Any], listed: bool) -> None:
    assert blocklisted(deaths) == ({VARIANT} if listed else set())


def test_wrong_ones_are_barred_and_not_blocklisted() -> None:
    assert barred([(VARIANT, "wrong", 1), (OTHER, "timeout", 1)]) == {VARIANT}


def test_hangs_of_two_problems_of_a_spec_count_in_the_store_and_in_rankings(
    store: Store, measurement: Make, pair: Make, problem: Make
) -> None:
    hung, fine = pair(block=16, stages=1), pair(block=32, stages=1)
    shapes = [problem(seqlen_q=length) for length in (512, 1024)]
    rows = [measurement(config=each, problem=shapes[0], median_us=time) for each, time in ((hung, 1.0), (fine, 2.0))]
    store.record_all(rows)
    for session, shape in zip("ab", shapes, strict=True):
        assert not store.blocklisted(shape.spec)
        assert rank(rows)[0].config == hung
        death = measurement(
            config=hung, problem=shape, session=session, status="timeout", median_us=None, baseline_us=None
        )
        store.record(death)
        rows.append(death)
    (variant,) = store.blocklisted(shapes[0].spec)
    assert variant == rows[0].variant
    assert store.rejected(shapes[0].spec) == {variant}
    assert [each.config for each in rank(rows)] == [fine]
    assert not store.blocklisted(problem(causal=True).spec)
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
