"""What no card can have measured: never counted, whatever else is there; and nothing that a card has measured is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import H200

from flashtune.codegen.gpu.roofline import least_seconds, limit
from flashtune.codegen.gpu.table import GPUS, gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.policy import plausible as module
from flashtune.tuned_db.policy.plausible import SHARE, SHORTEST_US, impossible, least_us
from flashtune.tuned_db.policy.trust import trust_of
from flashtune.tuned_db.policy.winners import best_first, rank, variants
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.trial import intervals

Make = Callable[..., Any]
INTERVAL = {"paired_ratio": 0.8, "ratio_low": 0.79, "ratio_high": 0.81, "rounds": 25}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        (INTERVAL, None),
        ({"median_us": 0.001, "q20_us": None, "baseline_us": 1000.0, "paired_ratio": 1e-6}, "0.001 us is below"),
        ({"median_us": 4.2, "baseline_us": 5.0, "q20_us": None}, "4.2 us is below what the card can do (4.34 us)"),
        ({"median_us": 4.5, "baseline_us": 5.0, "q20_us": None}, None),
        ({"baseline_us": 4.2}, "the default's 4.2 us are below"),
        ({"paired_ratio": 0.39}, "the ratio 0.39 is not that of the times (0.8)"),
        ({"paired_ratio": 1.61}, "the ratio 1.61 is not that of the times (0.8)"),
        ({"paired_ratio": 0.41}, None),
        ({"paired_ratio": 0.39, "baseline_us": None}, None),
        (INTERVAL | {"rounds": 1}, "an interval of fewer than 6 rounds"),
        (INTERVAL | {"rounds": 5}, "an interval of fewer than 6 rounds"),
        (INTERVAL | {"rounds": 6}, None),
        (INTERVAL | {"rounds": None}, "an interval of fewer than 6 rounds"),
        ({"paired_ratio": 0.8, "rounds": 1}, None),
        (INTERVAL | {"ratio_low": 0.8, "ratio_high": 0.8}, "an interval without a width"),
        (INTERVAL | {"ratio_low": 0.8, "ratio_high": 0.8, "stage": "measure"}, None),
        ({"paired_ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "rounds": 9, "baseline_us": 80.0}, None),
        (
            INTERVAL
            | {
                "ratio_low": 0.8,
                "ratio_high": 0.8,
                "median_us": 8.0,
                "q20_us": 8.0,
                "q80_us": 8.0,
                "baseline_us": 10.0,
            },
            None,
        ),
        ({"q20_us": 80.1}, "quantiles that are not around the median"),
        ({"q80_us": 79.9}, "quantiles that are not around the median"),
        ({"status": "wrong", "median_us": 0.001}, None),
    ],
    ids=str,
)
def test_a_row_that_can_not_be_has_a_reason(measurement: Make, changes: dict[str, Any], reason: str | None) -> None:
    """M10. The usual problem takes an H200 8.7 us at its full rate."""
    found = impossible(measurement(**changes))
    assert found is None if reason is None else (found or "").startswith(reason)


def test_an_interval_takes_as_many_rounds_here_as_where_it_is_made() -> None:
    assert intervals.FEWEST_ROUNDS == module.FEWEST_ROUNDS
    assert intervals.interval_place(module.FEWEST_ROUNDS) is not None
    assert intervals.interval_place(module.FEWEST_ROUNDS - 1) is None


def decode(length: int) -> Problem:
    return Problem(dtype="bfloat16", head_dim=128, batch=1, seqlen_q=1, seqlen_k=length, num_heads=8, num_heads_kv=8)


def test_what_fits_l2_is_not_bound_by_device_memory() -> None:
    """Keys of a decode step may be in L2 from the launch before. Of what is larger only the rest must be read."""
    small, large = decode(8192), decode(2**20)
    assert small.min_bytes < H200.l2_bytes
    assert limit(small, H200).by == limit(large, H200).by == "bandwidth"
    assert least_seconds(small, H200) < limit(small, H200).seconds / 100
    assert least_us(small, H200.key) == SHORTEST_US
    beyond = (large.min_bytes - H200.l2_bytes) / (H200.bandwidth_gb_s * 1e9)
    assert least_seconds(large, H200) == beyond < limit(large, H200).seconds
    assert least_us(large, H200.key) == SHARE * beyond * 1e6


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_card_of_the_table_is_held_to_more_than_half_of_its_rate(gpu: Any, dtype: str, problem: Make) -> None:
    """Nor one that is not in the table, such as a slice, to more than one that is."""
    asked = problem(dtype=dtype, seqlen_q=8192, seqlen_k=8192)
    assert least_us(asked, gpu.key) <= limit(asked, gpu).seconds * 1e6 / 2
    assert SHORTEST_US < least_us(asked, gpu.key.replace(gpu.name, "sold-since")) <= least_us(asked, gpu.key)
    assert least_us(asked, f"{gpu.key}/mig-1g.10gb") <= least_us(asked, gpu.key)


@pytest.mark.parametrize(
    "key", ["7.5/potato", "9.0a/x/sm", "15.0a/h9/132sm/smem1/l2-1/1gb", f"9.0a/h9/{'9' * 150}sm/smem1/l2-1/1gb"]
)
def test_a_card_of_which_nothing_is_known_is_held_to_what_any_kernel_takes(key: str, problem: Make) -> None:
    assert least_us(problem(), key) == SHORTEST_US


def test_a_chip_without_sms_is_held_to_one() -> None:
    assert least_us(decode(2**20), "9.0a/h9/0sm/smem1/l2-1/1gb") > SHORTEST_US


LIES = {
    "faster than light": {"median_us": 0.001, "q20_us": None, "q80_us": None, "baseline_us": 1000.0, "rounds": 1},
    "of another default": {"baseline_us": 4.0, "paired_ratio": 20.0},
    "one round": INTERVAL | {"rounds": 1},
    "too sure": INTERVAL | {"ratio_low": 0.8, "ratio_high": 0.8},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_claim_that_can_not_be_wins_nothing_and_hides_nothing(
    store: Store, measurement: Make, pair: Make, problem: Make, lie: str
) -> None:
    """M10: neither here, nor of a near problem or chip, and the variant's own true rows count as before."""
    honest = [
        measurement(config=pair(block=16, stages=1), **INTERVAL | {"paired_ratio": 0.805}),
        measurement(config=pair(block=32, stages=1), stage="measure", paired_ratio=0.85),
    ]
    before = rank(honest)
    lies = [
        measurement(config=each, session="liar", unit="z", **{"paired_ratio": 1e-6} | LIES[lie])
        for each in (pair(block=16, stages=1), pair(block=32, stages=1), pair(block=256, stages=1))
    ]
    assert all(impossible(each) for each in lies)
    rows = [*lies, *honest]
    assert rank(rows) == before
    assert list(best_first(lambda stage: [each for each in rows if each.stage == stage])) == before
    assert [each.config for each in variants(lies)] == []
    assert trust_of(rows, honest[0].variant) == trust_of(honest, honest[0].variant)
    store.add(lies)
    near = problem(seqlen_q=1100, seqlen_k=1100)
    for asked, gpu in ((problem(), H200), (near, H200), (problem(), gpu_by_alias("h100"))):
        assert find(asked, gpu, store_path=store.path).level == "default"
    store.add(honest)
    assert [find(asked, H200, store_path=store.path).level for asked in (problem(), near)] == ["exact", "neighbour"]


def test_a_lie_of_a_session_does_not_say_what_its_default_was(measurement: Make, pair: Make) -> None:
    """Nor that there were two, which is taken for not knowing."""
    default = {"paired_ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "baseline_us": 80.0}
    rows = [
        measurement(session=each, unit=each, created=f"2026-11-0{each}T12:00:00.000Z", config=config, **more)
        for each, base in (("1", 64), ("2", 32))
        for config, more in (
            (pair(block=128, stages=1), INTERVAL),
            (pair(block=base, stages=1), default | {"rounds": 9}),
        )
    ]
    lie = measurement(session="1", config=pair(block=16, stages=1), **default, rounds=1)
    assert trust_of(rows, rows[0].variant) == trust_of([*rows, lie], rows[0].variant)


class TestWithoutARatio:
    """F18: microseconds of different sessions don't compare, whatever their clocks."""

    @pytest.fixture
    def timed(self, measurement: Make, pair: Make) -> Make:
        none = dict.fromkeys(("baseline_us", "paired_ratio", "q20_us", "q80_us"))

        def timed(block: int, time: float, clock: float, session: str = "one", **changes: Any) -> Any:
            config = pair(block=block, stages=1)
            return measurement(
                config=config, median_us=time, clock_mhz=clock, session=session, stage="screen", **none, **changes
            )

        return timed

    def blocks(self, *rows: Measurement) -> list[int]:
        return [each.config.to_json()["block"] for each in rank(rows)]  # type: ignore[misc]

    def test_within_a_session_the_time_decides(self, timed: Make) -> None:
        """A kernel that makes the card draw so much that its clock falls takes as long as it takes."""
        assert self.blocks(timed(16, 1000.0, 1200.0), timed(32, 900.0, 1755.0)) == [32, 16]

    def test_a_fast_card_does_not_win_over_a_thorough_session(self, timed: Make) -> None:
        thorough = [timed(16, 1000.0, 1200.0), timed(32, 1100.0, 1200.0), timed(64, 1050.0, 1200.0)]
        fast = [timed(128, 900.0, 1755.0, "two"), timed(32, 880.0, 1755.0, "two")]
        assert self.blocks(*thorough, *fast) == [16, 64, 32, 128]
        assert self.blocks(*fast, *thorough) == [16, 64, 32, 128]

    def test_of_equal_sessions_the_first_comes_first(self, timed: Make) -> None:
        assert self.blocks(timed(16, 1000.0, 1200.0, "b"), timed(32, 1100.0, 1200.0, "a")) == [32, 16]

    def test_a_session_counts_its_own_times_alone(self, timed: Make) -> None:
        one = [timed(16, 100.0, 1200.0), timed(16, 110.0, 1200.0), timed(32, 107.0, 1200.0), timed(64, 120.0, 1200.0)]
        other = [timed(16, 900.0, 1755.0, "two"), timed(32, 100.0, 1755.0, "two")]
        assert self.blocks(*one, *other) == [16, 32, 64]
