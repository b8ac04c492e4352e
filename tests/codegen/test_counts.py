"""What is counted of a problem, against counts one by one: pairs that the mask shows, tiles, blocks of keys."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flashtune.cli.explain import problem_flags
from flashtune.cli.main import main
from flashtune.codegen.families.counts import masked, walk
from flashtune.codegen.families.family import Family
from flashtune.codegen.families.registry import family, predict, supporting
from flashtune.codegen.gpu.roofline import limit
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec

GPUS = ("h200", "a100", "t4")
BLOCKS = st.sampled_from((16, 32, 48, 64, 128))
CORNERS = ((7, 3), (3, 7), (5, 5), (4, 0), (1, 6), (64, 64), (65, 64), (64, 65), (90, 26), (33, 97))
"""Queries and keys: more of the first, fewer, as many, no key, one query, and one more or less than a block holds."""


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    seqlen_q, seqlen_k = draw(st.sampled_from(CORNERS) | st.tuples(st.integers(1, 150), st.integers(0, 150)))
    group, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Problem(
        dtype=draw(st.sampled_from(("float16", "float32"))),
        head_dim=draw(st.sampled_from((24, 64, 128))),
        head_dim_v=draw(st.sampled_from((0, 64))),
        batch=draw(st.integers(1, 3)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=group * heads,
        num_heads_kv=heads,
        causal=draw(st.booleans()),
    )


@functools.cache
def legal(name: str, spec: Spec, gpu: str) -> list[Config]:
    return family(name).enumerate(spec, gpu_by_alias(gpu))[0]


def seen(problem: Problem) -> list[set[int]]:
    """The keys that each query sees, by the sentence in `Problem`."""
    offset = problem.seqlen_k - problem.seqlen_q
    return [
        {key for key in range(problem.seqlen_k) if not problem.causal or key <= query + offset}
        for query in range(problem.seqlen_q)
    ]


def visited(problem: Problem, block_m: int, block_n: int) -> list[tuple[int, int]]:
    """Of each tile of queries: blocks of keys of which any query sees one, and those that not all of them see whole."""
    counts = []
    rows = seen(problem)
    for first in range(0, len(rows), block_m):
        tile = rows[first : first + block_m]
        some, every = set.union(*tile), set.intersection(*tile)
        touched = {key // block_n for key in some}
        whole = {block for block in touched if {*range(block * block_n, (block + 1) * block_n)} <= every}
        counts.append((len(touched), len(touched - whole)))
    return counts


def operations(problem: Problem) -> int:
    """Of Q K^T and P V: a product and a sum for each column of each pair that the mask shows."""
    pairs = sum(map(len, seen(problem)))
    return sum(2 * pairs * (problem.head_dim + problem.value_dim) for _ in range(problem.batch * problem.num_heads))


@given(problems())
def test_visible_pairs_are_those_of_the_mask(problem: Problem) -> None:
    """A hole in the tests: with ``if not count`` for ``if count`` a causal problem had 0 pairs and 0 FLOP."""
    assert problem.visible_pairs == sum(map(len, seen(problem)))
    assert problem.flops == operations(problem)


@given(problems())
def test_a_mask_hides_pairs_and_adds_none(problem: Problem) -> None:
    open_ = dataclasses.replace(problem, causal=False)
    assert 0 <= problem.visible_pairs <= open_.visible_pairs == problem.seqlen_q * problem.seqlen_k
    assert problem.min_bytes == open_.min_bytes


@given(problems(), BLOCKS, BLOCKS)
def test_blocks_of_keys_are_those_that_the_mask_touches(problem: Problem, block_m: int, block_n: int) -> None:
    counts = visited(problem, block_m, block_n)
    mean, longest = walk(problem, block_m, block_n)
    assert mean * len(counts) == pytest.approx(sum(touched for touched, _ in counts))
    assert longest == max(touched for touched, _ in counts)
    assert masked(problem, block_m, block_n) * len(counts) == pytest.approx(sum(cut for _, cut in counts))


@given(st.data(), problems(), st.sampled_from(GPUS))
def test_no_kernel_does_less_than_the_mask_asks_for(data: st.DataObject, problem: Problem, alias: str) -> None:
    """Of any config: a thread block for each tile of each head, whose steps hold all visible pairs; its time, to the
    rate that is shown, makes all operations, and is not below what the card's rates allow."""
    gpu = gpu_by_alias(alias)
    kind = data.draw(st.sampled_from(supporting(problem.spec, gpu)), label="family")
    config = data.draw(st.sampled_from(legal(kind.name, problem.spec, alias)), label="config")
    heads = problem.batch * problem.num_heads
    if type(kind).work is not Family.work:
        work = kind.work(config, problem, gpu)
        blocks = visited(problem, config.to_json()["block_m"], config.to_json()["block_n"])
        assert work.tiles == len(blocks) * heads
        assert work.steps * work.tiles == pytest.approx(heads * sum(touched for touched, _ in blocks))
        assert work.steps * work.tiles * work.flops >= operations(problem) * (1 - 1e-12)
    estimate = predict(problem, config, gpu)
    assert estimate.tflops * estimate.seconds * 1e12 == pytest.approx(operations(problem))
    bound = limit(problem, gpu)
    assert 0 < bound.reached(estimate.seconds) <= 1
    assert bound.seconds >= operations(problem) / (bound.tflops * 1e12) * (1 - 1e-12)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), CORNERS)
@pytest.mark.parametrize("causal", [False, True])
def test_explain_shows_the_operations_that_the_mask_asks_for(
    seqlen_q: int, seqlen_k: int, causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "none.db"))
    problem = Problem(
        dtype="float16", head_dim=64, batch=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=6, num_heads_kv=2,
        causal=causal, head_dim_v=128,
    )  # fmt: skip
    command = ["explain", "--gpu", "h200", *shlex.split(" ".join(problem_flags(problem)))]
    expected = operations(problem)
    document = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert document["flops"] == expected
    found = re.search(
        r"(\S+) GFLOP, at least (\S+) MB.*?(\S+) FLOP/byte", CliRunner().invoke(main, command).stdout, re.S
    )
    assert found is not None
    gflop, megabytes, intensity = map(float, found.groups())
    assert gflop == pytest.approx(expected / 1e9, rel=1e-3)
    assert gflop / megabytes * 1e3 == pytest.approx(intensity, rel=2e-3)
