"""Presets: which problems stand behind a name."""

from __future__ import annotations

import pytest
from tuner_fakes import FAMILY

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import InvalidInput
from flashtune.tuner.tune.presets import preset


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
