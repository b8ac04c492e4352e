"""Seeded faults in the templates: the emulator finds each of them. What it can't find is listed with the reason.

The faults are in ``mutations/*.toml``, by template file: ``old`` stands there exactly once and becomes ``new``,
``also`` is a second replacement, ``on`` names the setup below that shows it, ``shows`` says how.
Setups pass without faults.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashtune.codegen.emulator import emulate
from flashtune.codegen.family import read_config
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.codegen.problem import Problem
from flashtune.codegen.reference import rounded
from flashtune.codegen.tolerance import Tolerance, attention_tolerances
from flashtune.errors import EmulationError

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
Inputs = tuple[Array, Array, Array]
ROOT = Path(__file__).parents[3]
SEEDS = (1, 2, 3)
LEAST_CAUGHT = 25

SM80: dict[str, object] = {
    "block_m": 32,
    "block_n": 16,
    "num_warps": 2,
    "num_stages": 2,
    "q_in_registers": False,
    "blocks_per_sm": 1,
}
SM90: dict[str, object] = {
    "warpgroups": 2,
    "block_n": 32,
    "num_stages": 2,
    "q_buffers": 1,
    "softmax": "lazy",
    "ping_pong": False,
    "scheduler": "static",
    "blocks_per_sm": 1,
}
FMA: dict[str, object] = {
    "block_m": 16,
    "block_n": 16,
    "num_threads": 64,
    "threads_n": 8,
    "share_kv": False,
    "blocks_per_sm": 1,
}
# 62 keys: the last row of the first 32, and that of the first 16, is the only one to see the first key of a block.
PROBLEM: dict[str, Any] = {
    "dtype": "float16", "head_dim": 32, "batch": 2, "seqlen_q": 45, "seqlen_k": 62, "num_heads": 4, "num_heads_kv": 2,
    "causal": True,
}  # fmt: skip

# Tiles of 128 rows, of which the last is not full, for two thread blocks. 180 rows see the first key.
SM90_PROBLEM: dict[str, Any] = {"batch": 1, "seqlen_q": 210, "seqlen_k": 180, "num_heads": 2, "num_heads_kv": 1}

REPORTS = {
    "race": r"no barrier orders the two",
    "in flight": r"while a copy to it is in flight",
    "bounds": r"\d bytes at (byte -?\d+ of \w+, which has|address 0x\w+, where there is no tensor)",
    "misaligned": r"not a multiple of 16",
    "index": r"is out of bounds for",
    "gaps": r"wrote \d+ bytes between the elements of out",
    "wrong": r"^wrong: ",
    "diverges": r"diverges|have left the kernel|leaves the kernel",
    "not waited for": r"This thread has not waited for its mbarrier|the block ends while a TMA load",
    "still to be read": r"while it is still to be read",
    "initialised": r"no barrier orders it behind mbarrier.init|where an mbarrier is already",
    "deadlock": r"deadlock",
    "bytes": r"bytes more than it was told to expect|completes while \d+ bytes of TMA loads are still",
    "arrivals": r"arrives once more at the mbarrier",
    "no proxy fence": r"no fence.proxy.async stands|there is no fence.mbarrier_init",
    "no wgmma fence": r"with no wgmma.fence since",
    "accumulator": r"(an accumulator|registers that are A) of a wgmma that has not been waited for",
}
"""What :class:`EmulationError` says; "wrong" is a result beyond the tolerance. Which of two reports comes first may
depend on the order of threads: ``shows = "race or in flight"``."""


@dataclass(frozen=True)
class Setup:
    """A config and a problem; ``values`` changes random q, k and v in place."""

    family: str
    config: Mapping[str, object]
    problem: Mapping[str, Any] = field(default_factory=dict)
    values: Callable[[Array, Array, Array], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    spread: bool = False  # each tensor has strides of its own


def sm80(
    values: Callable[[Array, Array, Array], None] | None = None,
    *,
    config: dict[str, object] | None = None,
    options: Mapping[str, Any] | None = None,
    spread: bool = False,
    **problem: Any,
) -> Setup:
    return Setup("sm80_fwd", SM80 | (config or {}), PROBLEM | problem, values, options or {}, spread)


def fma(
    values: Callable[[Array, Array, Array], None] | None = None,
    *,
    config: dict[str, object] | None = None,
    options: Mapping[str, Any] | None = None,
    spread: bool = False,
    **problem: Any,
) -> Setup:
    return Setup(
        "fma_fwd", FMA | (config or {}), PROBLEM | {"dtype": "float32"} | problem, values, options or {}, spread
    )


def sm90(
    values: Callable[[Array, Array, Array], None] | None = None,
    *,
    config: dict[str, object] | None = None,
    options: Mapping[str, Any] | None = None,
    spread: bool = False,
    **problem: Any,
) -> Setup:
    """On a chip of two SMs, so that thread blocks take several tiles."""
    on_few = {"gpu": replace(gpu_by_alias("h200"), num_sms=2)}
    whole = PROBLEM | SM90_PROBLEM | problem
    return Setup("sm90_fwd", SM90 | (config or {}), whole, values, on_few | dict(options or {}), spread)


def growing(q: Array, k: Array, v: Array) -> None:
    """Later keys have larger scores, up to about 300."""
    k *= np.linspace(0.1, 40, k.shape[1], dtype=np.float32)[:, None, None]


def falling(q: Array, k: Array, v: Array) -> None:
    """Earlier keys have larger scores."""
    k *= np.linspace(40, 0.1, k.shape[1], dtype=np.float32)[:, None, None]


def growing_far(q: Array, k: Array, v: Array) -> None:
    """The same, so far that references have to be subtracted from scores before they are scaled."""
    k *= np.linspace(0.1, 400, k.shape[1], dtype=np.float32)[:, None, None]


def rising(q: Array, k: Array, v: Array) -> None:
    """Scores rise from about -2300 to -570: in the last block of keys references get small enough for the fast way."""
    q[...] = 1
    k[...] = np.linspace(-400, -100, k.shape[1], dtype=np.float32)[:, None, None]


def unseen(q: Array, k: Array, v: Array) -> None:
    """Two keys have large scores, and are none of the first 32 of their block of 64."""
    k[:, 60] *= 4
    k[:, 110] *= 30


def one_far(q: Array, k: Array, v: Array) -> None:
    """One key has scores of thousands, and is none of the first 32 of its block of 64."""
    k[:, 110] *= 3000


def further_far(q: Array, k: Array, v: Array) -> None:
    """The same, behind a key of the first block whose scores are large already."""
    k[:, 20] *= 1000
    k[:, 110] *= 3000


def large_nonfinite(q: Array, k: Array, v: Array) -> None:
    q *= 2**20
    v[:, 60, :, 5] = np.nan


def nonfinite(q: Array, k: Array, v: Array) -> None:
    """NaN and infinities in some columns of V, in the last block of keys and in one before it."""
    v[:, 60, :, 5] = np.nan
    v[:, 40, :, 7] = np.inf
    v[:, 33, 0, 20] = -np.inf


def large(q: Array, k: Array, v: Array) -> None:
    for each in (q, k, v):
        each[...] = 133120


LARGE: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 64, "seqlen_q": 3, "seqlen_k": 3}
NEGATIVE = {"scale": -0.7}
SPREAD = {"out_strides": (30000, 224, 56, 1)}
# 78 keys are 5 blocks: parts of 2, 2 and 1, and a fourth that is empty. Most of the first 32 rows see nothing of the
# third.
SPLIT: dict[str, Any] = {"config": {"num_splits": 4}, "seqlen_k": 78}
PACKED: dict[str, object] = {"pack_heads": True}
ONE_WARP: dict[str, object] = {"block_m": 16, "num_warps": 1}
TWO_Q: dict[str, object] = {"q_buffers": 2}
OVERLAP: dict[str, object] = {"q_buffers": 2, "overlap_tiles": True}
LATE: dict[str, object] = {"softmax": "late", "block_n": 64, "early_columns": 32}

SETUPS = {
    "base": sm80(),
    "not causal": sm80(causal=False),
    "Q kept": sm80(config={"q_in_registers": True}),
    "Q kept, one stage": sm80(config={"q_in_registers": True, "num_stages": 1}),
    "one stage": sm80(config={"num_stages": 1}),
    "three stages": sm80(config={"num_stages": 3}),
    "wide blocks": sm80(config={"block_n": 32}),
    "two row tiles": sm80(config={"block_m": 64}),
    "a tile ends on the diagonal": sm80(seqlen_q=64, seqlen_k=78),
    "empty rows": sm80(seqlen_k=5),
    "growing scores": sm80(growing),
    "large scores": sm80(large, **LARGE),
    "NaN behind the mask": sm80(nonfinite),
    "negative scale": sm80(options=NEGATIVE),
    "no LSE": sm80(options={"want_lse": False}),
    "unaligned": sm80(alignment=2),
    "unaligned, head dim 40": sm80(alignment=2, head_dim=40),
    "strides": sm80(options=SPREAD, spread=True),
    "large scores, several blocks": sm80(large, **LARGE | {"seqlen_k": 62}),
    "large scores, empty rows": sm80(large, **LARGE | {"seqlen_q": 45, "seqlen_k": 5}),
    "longer queries": sm80(seqlen_q=62, seqlen_k=45),
    "falling scores": sm80(falling),
    "scores that grow far": sm80(growing_far),
    "scores that rise from far below": sm80(rising, causal=False),
    "one warp": sm80(config=ONE_WARP, head_dim=64),
    "one warp, head dim 128": sm80(config=ONE_WARP, head_dim=128),
    "split": sm80(**SPLIT),
    "split, growing scores": sm80(growing, **SPLIT),
    "split, negative scale": sm80(options=NEGATIVE, **SPLIT),
    "split, falling scores": sm80(falling, **SPLIT),
    "split, scores that rise from far below": sm80(rising, causal=False, **SPLIT),
    "split, strides": sm80(options=SPREAD, spread=True, **SPLIT),
    "split, two row tiles": sm80(config={"num_splits": 4, "block_m": 64}, seqlen_k=78),
    "split, a block each": sm80(config={"num_splits": 64, "num_stages": 3}, seqlen_k=78),
    "split, odd number of tiles": sm80(**SPLIT, batch=1, num_heads=3, num_heads_kv=3),
    "split, empty rows": sm80(config={"num_splits": 2}, seqlen_k=20),
    "split, NaN behind the mask": sm80(nonfinite, config={"num_splits": 4}),
    "split, a single part": sm80(config={"num_splits": 4}, seqlen_k=5),
    "packed": sm80(config=PACKED),
    "packed, strides": sm80(
        config=PACKED, options={"out_strides": (30000, 336, 56, 1)}, spread=True, num_heads=6, num_heads_kv=2
    ),
    "packed, head dim 40": sm80(config=PACKED, head_dim=40),
    "packed, unaligned": sm80(config=PACKED, alignment=2),
    "packed, NaN behind the mask": sm80(nonfinite, config=PACKED),
    "packed, split": sm80(config={"num_splits": 4, **PACKED}, seqlen_k=78),
    "wide values": sm80(head_dim=24, head_dim_v=56),
    "head dim 16": sm80(head_dim=16),
    "head dim 24": sm80(head_dim=24),
    "head dim 40": sm80(head_dim=40),
    "sm90": sm90(),
    "sm90, not causal": sm90(causal=False),
    "sm90, three stages": sm90(config={"num_stages": 3}),
    "sm90, two Q": sm90(config=TWO_Q, num_heads=4),
    "sm90, overlap": sm90(config=OVERLAP),
    "sm90, turns": sm90(config={"ping_pong": True}),
    "sm90, turns, overlap": sm90(config={"ping_pong": True, "warpgroups": 3} | OVERLAP),
    "sm90, dynamic": sm90(config={"scheduler": "dynamic"}),
    "sm90, sections": sm90(config={"heads_per_section": 2, "warpgroups": 1}, num_heads=3, num_heads_kv=3),
    "sm90, groups": sm90(batch=2, num_heads=4, num_heads_kv=2),
    "sm90, growing scores": sm90(growing, causal=False),
    "sm90, exact, growing scores": sm90(growing, config={"softmax": "exact"}, causal=False),
    "sm90, late, unseen scores": sm90(unseen, config=LATE, causal=False),
    "sm90, late, scores that grow far": sm90(growing_far, config=LATE, causal=False),
    "sm90, late, a score further above": sm90(further_far, config=LATE, causal=False),
    "sm90, late, one score far above": sm90(one_far, config=LATE, causal=False),
    "sm90, large scores, NaN behind the mask": sm90(large_nonfinite, dtype="bfloat16"),
    "sm90, narrow values": sm90(head_dim=64, head_dim_v=32),
    "sm90, wide values": sm90(head_dim=32, head_dim_v=72),
    "sm90, large scores": sm90(large, **LARGE),
    "sm90, wide blocks": sm90(config={"block_n": 64}, seqlen_k=170),
    "sm90, very wide blocks": sm90(config={"block_n": 160}, seqlen_k=300),
    "sm90, few keys": sm90(seqlen_k=20),
    "sm90, empty rows": sm90(seqlen_q=130, seqlen_k=180),
    "sm90, head dim 72": sm90(head_dim=72),
    "sm90, head dim 128": sm90(head_dim=128),
    "sm90, no LSE": sm90(options={"want_lse": False}),
    "sm90, strides": sm90(nonfinite, options={"out_strides": (60000, 224, 56, 1)}, spread=True, batch=2),
    "sm90, NaN behind the mask": sm90(nonfinite),
    "sm90, negative scale": sm90(
        nonfinite, config={"scheduler": "tile"}, options=NEGATIVE, dtype="bfloat16"
    ),  # weights of float16 come to 0, and 0 times an infinity to NaN
    "fma": fma(),
    "fma, float16": fma(dtype="float16"),
    "fma, shared K and V": fma(config={"share_kv": True}),
    "fma, a tile ends on the diagonal": fma(seqlen_q=64, seqlen_k=78),
    "fma, not causal": fma(causal=False),
    "fma, empty rows": fma(seqlen_k=5),
    "fma, NaN behind the mask": fma(nonfinite),
    "fma, negative scale": fma(options=NEGATIVE),
    "fma, no LSE": fma(options={"want_lse": False}),
    "fma, unaligned": fma(alignment=4),
    "fma, strides": fma(options=SPREAD, spread=True),
    "fma, head dim 64": fma(head_dim=64),
    "fma, narrow values": fma(head_dim_v=24),
    "fma, wide values in the place of K": fma(config={"share_kv": True}, head_dim_v=40),
}


@dataclass(frozen=True)
class Mutation:
    file: str
    fault: str
    old: str
    new: str
    on: str
    shows: str = ""
    reason: str = ""
    also: tuple[str, str] = ("", "")

    def text(self) -> str:
        """The template with the fault."""
        text = (ROOT / "templates" / self.file).read_text(encoding="utf-8")
        for old, new in ((self.old, self.new), self.also):
            if old:
                count = text.count(old)
                assert count == 1, f"{self.file}: {old!r} stands there {count} times"
                text = text.replace(old, new)
        return text


def read_mutations(*names: str) -> dict[str, Mutation]:
    found: dict[str, Mutation] = {}
    for name in names:
        tables = tomllib.loads((Path(__file__).parent / "mutations" / f"{name}.toml").read_text(encoding="utf-8"))
        for file, entries in tables.items():
            for entry in entries:
                entry["also"] = tuple(entry.get("also", ("", "")))
                mutation = Mutation(file=file, **entry)
                title = f"{file} {mutation.fault}"
                assert title not in found, f"{title} stands there twice"
                found[title] = mutation
    return found


CAUGHT = read_mutations("sm90_fwd", "sm80_fwd", "blocks", "lib", "fma_fwd")
NOT_CAUGHT = read_mutations("not_caught")


@functools.cache
def inputs(name: str) -> tuple[Problem, Inputs, tuple[Tolerance, Tolerance]]:
    setup = SETUPS[name]
    problem = Problem(**setup.problem)
    draw = np.random.default_rng(5)
    q, k, v = (draw.standard_normal(shape, dtype=np.float32) for shape in problem.shapes[:3])
    if setup.values is not None:
        setup.values(q, k, v)
    q, k, v = (rounded(each, problem.dtype) for each in (q, k, v))
    allowed = attention_tolerances(
        q, k, v, causal=problem.causal, scale=setup.options.get("scale"), dtype=problem.dtype
    )
    if setup.spread:
        q, k, v = (spread(each, gap) for each, gap in ((q, 8), (k, 16), (v, 24)))
    return problem, (q, k, v), allowed


def spread(array: Array, gap: int) -> Array:
    """The same values with ``gap`` elements between heads, and a row more between batch entries."""
    batch, seqlen, heads, head_dim = array.shape
    memory = np.full((batch, seqlen + gap // 8, heads, head_dim + gap), np.nan, array.dtype)
    view = memory[:, :seqlen, :, :head_dim]
    view[...] = array
    return view


def outcome(name: str, templates: Mapping[str, str], seed: int) -> str:
    """What running a setup shows: "right", "wrong: ..." or the report of the emulator."""
    setup = SETUPS[name]
    problem, (q, k, v), allowed = inputs(name)
    config = read_config(setup.family, setup.config)
    try:
        result = emulate(problem, config, q, k, v, seed=seed, timeout=30, templates=templates, **setup.options)
    except EmulationError as error:
        return str(error)
    verdict = allowed[0].judge(result.out)
    if verdict and setup.options.get("want_lse", True):
        verdict = allowed[1].judge(result.lse)
    return "right" if verdict else str(verdict)


@pytest.mark.parametrize("name", SETUPS)
def test_without_a_fault_every_setup_is_right(name: str) -> None:
    for seed in SEEDS:
        assert outcome(name, {}, seed) == "right"


def by_turns(found: Mapping[str, Mutation]) -> list[Any]:
    """Each takes seconds of a core, so a bare `pytest` leaves out every second one that shows alike."""
    seen: Counter[str] = Counter()
    params = []
    for name, mutation in found.items():
        params.append(pytest.param(mutation, id=name, marks=[pytest.mark.slow] * (seen[mutation.shows] % 2)))
        seen[mutation.shows] += 1
    return params


@pytest.mark.parametrize("mutation", by_turns(CAUGHT))
def test_a_fault_in_a_template_is_caught(mutation: Mutation) -> None:
    templates = {mutation.file: mutation.text()}
    expected = "|".join(REPORTS[each] for each in mutation.shows.split(" or "))
    found = "right"
    for seed in SEEDS:
        found = outcome(mutation.on, templates, seed)
        if found != "right":
            break
    assert re.search(expected, found), f"{mutation.fault}: {mutation.shows} was expected, found: {found}"


@pytest.mark.parametrize("mutation", by_turns(NOT_CAUGHT))
def test_what_is_listed_as_not_caught_passes(mutation: Mutation) -> None:
    assert mutation.reason
    templates = {mutation.file: mutation.text()}
    if not mutation.on:  # undefined behaviour: any result may come
        return
    for seed in SEEDS:
        assert outcome(mutation.on, templates, seed) == "right"


def test_there_are_enough_faults() -> None:
    assert len(CAUGHT) >= LEAST_CAUGHT
    assert {mutation.shows for mutation in CAUGHT.values()} >= set(REPORTS)
    always = [each.values[0] for each in by_turns(CAUGHT) if not each.marks]
    assert {word for mutation in always for word in mutation.shows.split(" or ")} == set(REPORTS)
    assert {mutation.on for mutation in (*CAUGHT.values(), *NOT_CAUGHT.values())} - {""} == set(SETUPS)
