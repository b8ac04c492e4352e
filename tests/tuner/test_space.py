"""The space of a problem: which configs it holds, their order, and what lies next to a config or a point."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tuner_fakes import FAMILY, GPU, problem

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuner.search.space import make_space

SPACE = make_space(problem(), GPU, FAMILY)


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


def test_the_nearest_config_to_a_legal_point_is_its_own_until_closed() -> None:
    config = SPACE.configs[17]
    assert SPACE.nearest(SPACE.point(config), set()) == config
    neighbour = SPACE.nearest(SPACE.point(config), {config})
    assert neighbour not in (None, config)
    assert SPACE.nearest(SPACE.point(config), set(SPACE.configs)) is None
