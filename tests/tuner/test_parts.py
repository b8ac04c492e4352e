"""Budgets, presets, spaces, the sampler, timing arithmetic and host inputs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuner_fakes import FAMILY, GPU, landscape, problem

from flashtune.codegen.bits import from_memory, to_memory
from flashtune.codegen.config import Config
from flashtune.codegen.family import family
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.codegen.problem import Spec
from flashtune.codegen.reference import plain_attention
from flashtune.errors import InvalidInput, InvalidType
from flashtune.tuner.budget import Budget, Meter, parse_budget
from flashtune.tuner.inputs import random_values
from flashtune.tuner.intervals import paired_ratio, ratios_to
from flashtune.tuner.presets import preset
from flashtune.tuner.sample import samples
from flashtune.tuner.space import Space, make_space
from flashtune.tuner.strategy import EXHAUSTIVE, strategy
from flashtune.tuner.study import Search
from flashtune.tuner.timing import shuffled, summarise

SPACE = make_space(problem(), GPU, FAMILY)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("120s", Budget(seconds=120)),
        ("10m", Budget(seconds=600)),
        ("1.5h", Budget(seconds=5400)),
        (" 90 S", Budget(seconds=90)),
        ("200", Budget(trials=200)),
    ],
)
def test_budgets_are_times_or_trials(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-5", "1.5", "10 minutes", "s", "1e3", "nan", "10mm", "\u0661s", "9" * 400 + "s"]
)
def test_other_budgets_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidInput, match="120s, 10m or 1h"):
        parse_budget(text)


@pytest.mark.parametrize(
    "amounts", [{}, {"seconds": 1.0, "trials": 1}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"trials": 0}]
)
def test_a_budget_is_one_positive_amount(amounts: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="one of them must be set, and positive"):
        Budget(**amounts)


def test_a_budget_that_is_no_text_is_refused() -> None:
    given: Any = 200
    with pytest.raises(InvalidType, match="budget is a int"):
        parse_budget(given)


def test_a_meter_runs_from_one_to_zero() -> None:
    now = [100.0]
    meter = Meter(Budget(seconds=10), clock=lambda: now[0])
    assert meter.left == 1
    now[0] = 105.0
    assert (meter.left, meter.elapsed, meter.spent) == (0.5, 5.0, False)
    now[0] = 120.0
    assert (meter.left, meter.spent) == (0.0, True)
    counted = Meter(Budget(trials=4))
    counted.trials = 3
    assert counted.left == 0.25


@pytest.mark.parametrize(("name", "count"), [("quick", 4), ("grid", 36), ("wide", 15), ("llm", 8), ("models", 54)])
def test_presets_hold_distinct_problems_that_the_default_gpu_serves(name: str, count: int) -> None:
    problems = preset(name)
    assert len(set(problems)) == count
    assert all(FAMILY.unsupported(each.spec, gpu_by_alias("h100")) is None for each in problems)


def test_problems_that_were_measured_keep_their_place() -> None:
    """Result files of the wide set list its problems in order: what is new comes last."""
    narrow = [each for each in preset("wide") if each.head_dim_v]
    assert [str(each) for each in narrow] == ["bfloat16 d192/128 b4 s4096 h16", "bfloat16 d192/128 b4 s4096 h16 causal"]
    assert preset("wide")[-2:] == narrow


def test_the_grid_needs_few_specs_and_keeps_tokens_and_width() -> None:
    problems = preset("grid")
    assert len({each.spec for each in problems}) == 6
    assert {each.batch * each.seqlen_q for each in problems} == {16384}
    assert {each.num_heads * each.head_dim for each in problems} == {2048}


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(InvalidInput, match="quick, grid, wide, llm, models"):
        preset("tiny")


def test_a_space_holds_legal_configs_in_the_models_order() -> None:
    assert [FAMILY.illegal(config, problem().spec, GPU) for config in SPACE.configs] == [None] * len(SPACE)
    times = [estimate.seconds for estimate in SPACE.estimates]
    assert times == sorted(times)
    assert sum(SPACE.rejected.values()) > 0
    parameters = FAMILY.config_type.parameters()
    neutral = {each.name: each.neutral for each in parameters if each.by_problem}
    enumerated = {dataclasses.replace(config, **neutral) for config in SPACE.configs}
    assert len(enumerated) + sum(SPACE.rejected.values()) == math.prod(
        len(each.choices) for each in parameters if each.searched and not each.by_problem
    )


def test_a_space_has_the_variants_that_may_pay_for_its_problem() -> None:
    few = make_space(dataclasses.replace(problem(4096), batch=1, seqlen_q=1, num_heads_kv=2), GPU, FAMILY)
    seen = {(config.pack_heads, config.num_splits) for config in few.configs}
    assert {(False, 1), (True, 1), (True, 0)} < seen
    assert [few.at(few.point(config)) for config in few.configs] == list(few.configs)
    many = make_space(dataclasses.replace(problem(), batch=64), GPU, FAMILY)
    assert {(config.pack_heads, config.num_splits) for config in many.configs} == {(False, 1)}


@pytest.mark.parametrize("name", ["sm90_fwd", "sm80_fwd", "fma_fwd"])
@pytest.mark.parametrize("seqlen", [1, 100, 1000, 4096])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_searched_holds_the_default(name: str, seqlen: int, causal: bool) -> None:
    """Else it would never be measured, and no winner could be compared with it."""
    kind, gpu = family(name), gpu_by_alias("h200")
    for head_dim in (64, 256):
        asked = dataclasses.replace(problem(seqlen, causal=causal, head_dim=head_dim), seqlen_k=4096)
        assert kind.default_for(asked, gpu) in make_space(asked, gpu, kind).rank, asked


def test_points_lead_back_to_their_configs() -> None:
    assert [SPACE.at(SPACE.point(config)) for config in SPACE.configs] == list(SPACE.configs)


def test_a_neighbour_is_one_step_of_one_parameter_away() -> None:
    for config in SPACE.configs[:: len(SPACE) // 20]:
        closed = {config}
        while (found := SPACE.neighbour(config, closed)) is not None:
            own, other = SPACE.point(config), SPACE.point(found)
            (name,) = (each for each in own if own[each] != other[each])
            between = range(min(own[name], other[name]) + 1, max(own[name], other[name]))
            assert not any(SPACE.point(each)[name] in between for each in SPACE.configs), "a value is left out"
            closed.add(found)
        assert len(closed) > 1


def test_neighbours_come_in_the_order_of_the_model() -> None:
    config = SPACE.configs[0]
    first = SPACE.neighbour(config, set())
    assert first is not None
    second = SPACE.neighbour(config, {first})
    assert second is not None
    assert SPACE.rank[first] < SPACE.rank[second]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_the_trials_goes_next_to_the_fastest(share: float) -> None:
    """So that all around the fastest is tried, which random proposals alone leave to chance."""
    target = SPACE.configs[len(SPACE) // 2]

    def distance(config: Config) -> int:
        own, other = SPACE.point(config), SPACE.point(target)
        return sum(abs(own[name] - other[name]) for name in own)

    search = Search(SPACE, dataclasses.replace(strategy("random"), near_share=share), seed=3)
    tried = set()
    for _ in range(80):
        config = search.ask()
        assert config is not None
        search.tell(config, 1e-3 * (1 + distance(config)))
        tried.add(config)
    fastest = min(tried, key=distance)
    assert (SPACE.neighbour(fastest, tried) is None) == (share > 0)


def test_the_nearest_config_to_a_legal_point_is_its_own_until_closed() -> None:
    config = SPACE.configs[17]
    assert SPACE.nearest(SPACE.point(config), set()) == config
    neighbour = SPACE.nearest(SPACE.point(config), {config})
    assert neighbour not in (None, config)
    assert SPACE.nearest(SPACE.point(config), set(SPACE.configs)) is None


def smaller(count: int) -> Space:
    return Space(SPACE.family, SPACE.configs[:count], SPACE.estimates[:count], SPACE.rejected)


def test_small_spaces_are_walked_in_the_models_order() -> None:
    space = smaller(EXHAUSTIVE)
    search = Search(space)
    asked = []
    while (config := search.ask()) is not None:
        asked.append(config)
        search.tell(config, landscape(config))
    assert asked == list(space.configs)


@pytest.mark.parametrize("failing", [0, 3], ids=["all-correct", "every-third-fails"])
def test_a_search_asks_for_every_legal_config_exactly_once(failing: int) -> None:
    space = smaller(EXHAUSTIVE + 30)
    search = Search(space, seed=3)
    asked: list[Config] = []
    while (config := search.ask()) is not None:
        asked.append(config)
        search.tell(config, None if failing and len(asked) % failing == 0 else landscape(config))
    assert sorted(config.key for config in asked) == sorted(config.key for config in space.configs)


def test_several_configs_may_be_out_at_once() -> None:
    search = Search(SPACE, seed=1)
    out = [search.ask() for _ in range(30)]
    assert len(set(out)) == 30


def test_a_search_starts_with_what_it_is_told_and_leaves_out_what_is_known() -> None:
    first = [SPACE.configs[40], SPACE.configs[9], SPACE.configs[40]]
    known = {SPACE.configs[0]: 1e-3, SPACE.configs[1]: None, SPACE.configs[9]: 2e-3}
    search = Search(SPACE, known=known, first=first)
    asked = [search.ask() for _ in range(20)]
    assert asked[0] == SPACE.configs[40]
    assert not set(asked) & set(known)


def test_known_times_steer_the_search() -> None:
    """With many results known, proposals are better than the average of the space."""
    known = {config: landscape(config) for config in SPACE.configs[::4]}
    search = Search(SPACE, known=known, seed=5)
    asked = [search.ask() for _ in range(24)]
    mean = np.mean([landscape(config) for config in asked if config is not None])
    assert mean < 0.9 * np.mean([landscape(config) for config in SPACE.configs])


def test_searching_leaves_the_callers_log_level_alone() -> None:
    before = optuna.logging.get_verbosity()
    Search(SPACE).ask()
    assert optuna.logging.get_verbosity() == before


def test_quantiles_are_those_of_numpy() -> None:
    times = [3e-3, 1e-3, 2e-3, 5e-3, 9e-3, 4e-3]
    timing = summarise(times)
    assert timing.median == pytest.approx(np.median(times))
    assert (timing.q20, timing.q80) == pytest.approx(tuple(np.quantile(times, [0.2, 0.8])))
    assert timing.count == 6


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1e-3])
def test_a_time_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="no time"):
        summarise([1e-3, bad])


def test_paired_ratios_cancel_drift() -> None:
    drift = [1.0, 1.3, 0.9, 2.0, 1.1]
    assert paired_ratio([0.8 * each for each in drift], drift) == pytest.approx(0.8)
    assert ratios_to({"a": [0.8 * each for each in drift], "default": drift}, "default")["default"] == 1


def test_each_round_has_an_order_of_its_own() -> None:
    orders = [shuffled("abcdef", number) for number in range(200)]
    assert orders == [shuffled("abcdef", number) for number in range(200)]
    assert all(sorted(each) == list("abcdef") for each in orders)
    behind = Counter(pair for each in orders for pair in itertools.pairwise(each))
    assert len(behind) == 30
    assert max(behind.values()) < 2 * min(behind.values()), "each comes behind each other about as often"


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_rounds_to_the_nearest_even(value: float) -> None:
    single = np.array([value], np.float32)
    got = float(from_memory(to_memory(single, "bfloat16"), "bfloat16")[0])
    bits = int(single.view(np.uint32)[0])
    low = np.array([bits & 0xFFFF0000], np.uint32).view(np.float32)[0]
    high_bits = (bits & 0xFFFF0000) + 0x10000
    high = np.array([high_bits], np.uint32).view(np.float32)[0]
    below, above = abs(float(single[0]) - float(low)), abs(float(high) - float(single[0]))
    if math.isinf(float(high)):
        return
    if below != above:
        assert got == float(low if below < above else high)
    else:
        assert got == float(low if bits >> 16 & 1 == 0 else high)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_memory_form_keeps_rounded_values(dtype: str) -> None:
    values = from_memory(random_values(dtype, 1000, seed=1), dtype)
    assert np.array_equal(from_memory(to_memory(values, dtype), dtype), values)
    assert values.std() == pytest.approx(1, abs=0.1)
    assert np.array_equal(random_values(dtype, 1000, seed=1), random_values(dtype, 2000, seed=1)[:1000])


def test_samples_have_the_widths_of_their_spec() -> None:
    for sample in samples(Spec(dtype="float16", head_dim=40, head_dim_v=24, causal=True)):
        assert (sample.problem.head_dim, sample.problem.head_dim_v) == (40, 24)
        assert (sample.q.shape[3], sample.k.shape[3], sample.v.shape[3]) == (40, 40, 24)
        assert sample.out.reference.shape == sample.problem.shapes[3]
        halves = (each.view(np.float16) for each in (sample.q, sample.k, sample.v))
        assert sample.out.judge(plain_attention(*halves, causal=True, compute_dtype=np.float32)[0])


def test_samples_reject_what_kernels_get_wrong() -> None:
    spec = Spec(dtype="float16", head_dim=64, causal=True)
    sample = samples(spec)[0]
    halves = (each.view(np.float16) for each in (sample.q, sample.k, sample.v))
    right, _ = plain_attention(*halves, causal=True, compute_dtype=np.float32)
    assert sample.out.judge(right)
    for wrong in (np.zeros_like(right), np.full_like(right, np.nan)):
        assert not sample.out.judge(wrong)
    last_column = right.copy()
    last_column[..., -1] = last_column[..., -2]
    assert not sample.out.judge(last_column)
    even_rows = right.copy()
    even_rows[:, 1::2] = np.nan
    assert not sample.out.judge(even_rows)
