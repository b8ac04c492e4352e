"""When the winner of a near problem serves, of the same chip or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

H200 = gpu_by_alias("h200")
H100 = gpu_by_alias("h100")


def test_the_neighbour_serves_that_is_expected_to_gain_most(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float]
) -> None:
    near, nearer = pair(block=128, stages=3), pair(block=32, stages=3)
    store.record_all(
        [
            measurement(problem=problem(batch=8), config=near, median_us=78.0),
            measurement(problem=problem(batch=4), config=nearer, median_us=85.0),
        ]
    )
    choice = look()
    assert (choice.level, choice.config) == ("neighbour", near)
    assert "tuned for float16 d64 b8 s1024 h16/4, 2 octaves away; 0.780 of the default's time is expected" in (
        choice.evidence
    )
    store.record(measurement(problem=problem(batch=4), config=pair(block=16, stages=3), median_us=70.0))
    assert look().config == pair(block=16, stages=3)


def test_farther_off_a_gain_counts_less(look: Make, store: Store, measurement: Make, problem: Make, pair: Make) -> None:
    """The second gained 1 % more, and is an octave farther away: winners of afar lost to the default by up to 9 %."""
    near, far = pair(block=128, stages=3), pair(block=32, stages=3)
    store.record_all(
        [
            measurement(problem=problem(batch=4), config=near, median_us=80.0),
            measurement(problem=problem(batch=8), config=far, median_us=79.0),
        ]
    )
    assert look().config == near
    store.record(measurement(problem=problem(batch=8), config=pair(block=16, stages=3), median_us=77.0))
    assert look().config == pair(block=16, stages=3)


@pytest.mark.parametrize("seconds", [1.0001e-3, float("nan")], ids=["slower", "nan"])
def test_a_neighbour_serves_only_where_the_model_sees_no_loss(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float],
    seconds: float,
) -> None:  # fmt: skip
    store.record(measurement(problem=problem(batch=4), config=pair(block=32, stages=3)))
    assert look().level == "neighbour"
    predicted[pair(block=32, stages=3)] = seconds
    choice = look()
    assert choice.level == "default"
    assert choice.evidence == "no winner of a near problem can be used and is expected to be faster"


@pytest.mark.parametrize(("seqlen", "level"), [(1024, "neighbour"), (1280, "neighbour"), (1536, "default")])
def test_very_near_a_measured_gain_counts_whatever_the_model_says(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float],
    seqlen: int, level: str,
) -> None:  # fmt: skip
    """Half an octave is a length 1.28 times as long; the first differs in how heads and batch share the work."""
    there = problem(batch=1, num_heads=32, seqlen_q=seqlen, seqlen_k=seqlen)
    config = pair(block=32, stages=3)
    store.record(measurement(problem=there, config=config))
    predicted[config] = 1.02e-3
    assert look().level == level


def test_very_near_a_config_without_a_ratio_gains_nothing(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float]
) -> None:
    there = problem(seqlen_q=1100, seqlen_k=1100)
    config = pair(block=32, stages=3)
    store.record(measurement(problem=there, config=config, baseline_us=None))
    predicted[config] = 1.02e-3
    assert look().level == "default"


@pytest.mark.parametrize(("median_us", "level"), [(97.0, "neighbour"), (99.0, "default"), (100.0, "default")])
def test_a_neighbour_serves_only_where_its_gain_is_worth_it(
    look: Make, store: Store, measurement: Make, problem: Make, median_us: float, level: str
) -> None:
    store.record(measurement(problem=problem(batch=4), median_us=median_us))
    assert look().level == level


def test_a_neighbour_without_a_ratio_serves_by_the_model_alone(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float]
) -> None:
    config = pair(block=32, stages=3)
    store.record(measurement(problem=problem(batch=4), config=config, stage="measure", baseline_us=None))
    assert look().level == "default", "it is predicted to take as long as the default"
    predicted[config] = 0.969e-3
    assert look().level == "neighbour"


@pytest.mark.parametrize(("seqlen", "level"), [(2048, "neighbour"), (1024 * 16, "default")])
def test_no_neighbour_serves_from_afar(
    look: Make, store: Store, measurement: Make, problem: Make, seqlen: int, level: str
) -> None:
    store.record(measurement(problem=problem(seqlen_q=seqlen, seqlen_k=seqlen)))
    assert look().level == level


def test_float16_and_bfloat16_are_neighbours_and_float32_is_not(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make
) -> None:
    other = store.record(measurement(problem=problem(dtype="bfloat16"), config=pair(block=32, stages=3)))
    choice = look()
    assert (choice.level, choice.config) == ("neighbour", other.config)
    assert "source has changed" not in choice.evidence
    store.record(measurement(problem=problem(batch=4)))
    assert look().config == other.config, "as much gain, and nearer"
    assert look(problem(dtype="float32")).level == "default"


def test_what_was_wrong_for_bfloat16_is_no_neighbour_of_float16(
    look: Make, store: Store, measurement: Make, problem: Make
) -> None:
    near = problem(dtype="bfloat16", batch=4)
    store.record(measurement(problem=near))
    assert look().level == "neighbour"
    store.record(measurement(problem=problem(dtype="bfloat16"), status="wrong", stage="screen"))
    assert look().level == "default"


def test_a_neighbour_has_the_same_spec(look: Make, store: Store, measurement: Make, problem: Make) -> None:
    store.record_all([measurement(problem=problem(causal=True)), measurement(problem=problem(head_dim=128))])
    assert look().level == "default"


def test_a_winner_for_values_of_another_width_is_never_used(
    look: Make, store: Store, measurement: Make, problem: Make, prediction: Make, ship: Callable[..., None]
) -> None:
    """Neither exact nor near nor borrowed, in both directions; and both are found where they belong."""
    narrow = problem(head_dim_v=32)
    store.record_prediction(prediction(problem=narrow))
    ship(measurement(problem=narrow))
    store.record_all([measurement(problem=narrow), measurement(problem=problem(head_dim_v=32, batch=4))])
    for gpu in (H200, H100):
        assert look(gpu=gpu).level == "default"
        assert look(problem(head_dim_v=128), gpu=gpu).level == "default"
    found = look(narrow)
    assert found.level == "exact"
    assert found.measurement is not None
    assert found.measurement.problem == narrow
    assert look(problem(head_dim_v=32, batch=8)).level == "neighbour"
    plain = store.record(measurement())
    assert look().measurement == plain
    assert look(problem(head_dim_v=64)).measurement == plain, "as wide as the keys"


def test_a_chip_lends_near_problems_only_without_predicted_loss(
    look: Make, store: Store, measurement: Make, problem: Make, predicted: dict[Config, float]
) -> None:
    record = store.record(measurement(problem=problem(batch=4)))
    choice = look(gpu=H100)
    assert (choice.level, choice.config) == ("borrowed", record.config)
    assert "borrowed from h200" in choice.evidence
    assert "1 octaves away" in choice.evidence
    predicted[record.config] = 1.0
    assert look(gpu=H100).level == "default"
