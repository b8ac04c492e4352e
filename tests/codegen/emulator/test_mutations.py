"""Seeded faults in the templates: the emulator finds each of them. What it can't find is listed with the reason.

The faults are in ``mutations/*.toml``, by template file: ``old`` stands there exactly once and becomes ``new``,
``also`` is a second replacement, ``on`` names the setup of mutation_setups.py that shows it, ``shows`` says how.
Setups pass without faults.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutation_setups import SETUPS
from numpy.typing import NDArray
from turns import by_turns

from flashtune.codegen.families.registry import read_config
from flashtune.codegen.problem.problem import Problem
from flashtune.codegen.problem.reference import rounded
from flashtune.codegen.problem.tolerance import Tolerance, attention_tolerances
from flashtune.emulator import emulate
from flashtune.errors import EmulationError

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
Inputs = tuple[Array, Array, Array]
ROOT = Path(__file__).parents[3]
SEEDS = (1, 2, 3)
LEAST_CAUGHT = 400

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


@pytest.mark.parametrize("name", by_turns(SETUPS, 2))
def test_without_a_fault_every_setup_is_right(name: str) -> None:
    for seed in SEEDS:
        assert outcome(name, {}, seed) == "right"


def by_fault(found: Mapping[str, Mutation]) -> list[Any]:
    """Those that show alike take turns."""
    titles = {mutation: title for title, mutation in found.items()}
    return by_turns(titles, 4, alike=lambda mutation: mutation.shows, name=titles.__getitem__)


@pytest.mark.parametrize("mutation", by_fault(CAUGHT))
def test_a_fault_in_a_template_is_caught(mutation: Mutation) -> None:
    templates = {mutation.file: mutation.text()}
    expected = "|".join(REPORTS[each] for each in mutation.shows.split(" or "))
    found = "right"
    for seed in SEEDS:
        found = outcome(mutation.on, templates, seed)
        if found != "right":
            break
    assert re.search(expected, found), f"{mutation.fault}: {mutation.shows} was expected, found: {found}"


@pytest.mark.parametrize("mutation", by_fault(NOT_CAUGHT))
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
    always = [each.values[0] for each in by_fault(CAUGHT) if not each.marks]
    assert {word for mutation in always for word in mutation.shows.split(" or ")} == set(REPORTS)
    assert {mutation.on for mutation in (*CAUGHT.values(), *NOT_CAUGHT.values())} - {""} == set(SETUPS)
