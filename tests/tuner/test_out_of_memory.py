"""Device memory that does not suffice: for a problem, and for the workspace of one candidate."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_device import BUILT, CONFIG, OTHER, PROBLEM, Simulation
from tuner_fakes import FAMILY, GPU, run

from flashtune.codegen.plan.plan import Plan
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.run import coordinator
from flashtune.tuner.search.space import make_space

LONG = dataclasses.replace(PROBLEM, seqlen_k=600)
"""Enough keys to share."""
SPLIT = dataclasses.replace(CONFIG, num_splits=2)
"""Needs memory beside output and LSE, where `CONFIG` needs none."""


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)


def test_a_workspace_that_does_not_fit_is_out_of_memory_and_costs_the_others_nothing(simulation: Simulation) -> None:
    """D63 on the device side: it is no verdict on the config, which is measured once there is memory again."""
    bench = simulation.bench
    assert bench.prepare(LONG) is None
    assert bench.attempt(LONG, CONFIG, BUILT, None).status == "ok"
    simulation.largest = 0
    for _ in range(2):
        outcome = bench.attempt(LONG, SPLIT, OTHER, None)
        assert outcome.status == "out_of_memory", outcome.message
        assert "Out of memory" in outcome.message
        assert outcome.timing is None
        assert bench.attempt(LONG, CONFIG, BUILT, None).status == "ok"
    simulation.largest = sys.maxsize
    after = bench.attempt(LONG, SPLIT, OTHER, None)
    assert after.status == "ok", after.message


class Unit:
    """The simulated device, as a run hires it."""

    name = uuid = "GPU-fake"

    def __init__(self, simulation: Simulation) -> None:
        self.open: Any = lambda: simulation.bench

    def sources(self, problem: object) -> list[Any]:
        return []


def test_a_run_passes_over_a_candidate_whose_workspace_does_not_fit(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D63: the candidate is stored as out of memory, not as wrong, and the next run tries it again."""
    monkeypatch.setattr(coordinator, "FINAL_SECONDS", 0.0)
    path, unit = tmp_path / "tuned.db", Unit(simulation)
    assert simulation.bench.prepare(LONG) is None
    assert simulation.bench.attempt(LONG, CONFIG, BUILT, None).status == "ok"
    simulation.largest = 0
    report = run(path, [LONG], 3, benches=[unit], first=[SPLIT])  # type: ignore[list-item]
    assert (report.tried, report.stopped) == (3, "")
    assert report.failed == {"out_of_memory": 1}
    assert report.rows[0].config not in (None, SPLIT)
    with Store.open(path, readonly=True) as store:
        (row,) = store.measurements(status="out_of_memory")
        assert row.config == SPLIT
        assert store.rejected(LONG.spec, row.gpu_key) == frozenset()
    simulation.largest = sys.maxsize
    assert run(path, [LONG], 1, benches=[unit], first=[SPLIT]).failed == {}  # type: ignore[list-item]
    with Store.open(path, readonly=True) as store:
        assert SPLIT in [each.config for each in store.measurements(status="ok", stage="measure")]


def test_what_problems_share_can_be_had_again_and_their_references_not(simulation: Simulation) -> None:
    """A hole in the tests: a reference, which is kept for all of the run, could count as memory for other problems."""
    arena = simulation.bench._full._arena
    used, shared = [], []
    for scale in (1, 2, 3):
        problem = dataclasses.replace(PROBLEM, num_heads=4 * scale, batch=12 // scale)  # as large, and other references
        problem = dataclasses.replace(problem, num_heads_kv=2 * scale)
        assert simulation.bench.prepare(problem) is None
        used.append(sum(simulation.runtime.ranges.values()))
        shared.append(arena.reusable_bytes)
    assert len(set(shared)) == 1
    assert used == sorted(set(used))


def test_a_bench_keeps_no_kernels_of_candidates(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole in the tests: kernels could stay loaded, thousands of them in a long run."""
    alive: weakref.WeakSet[Callable[..., None]] = weakref.WeakSet()
    make = simulation.kernel

    def kernel(plan: Plan, scale: float) -> Callable[..., None]:
        made = make(plan, scale)
        alive.add(made)
        return made

    monkeypatch.setattr(simulation, "kernel", kernel)
    configs = [each for each in make_space(PROBLEM, GPU, FAMILY).configs if each != CONFIG][:4]
    assert simulation.bench.prepare(PROBLEM) is None
    kept = []
    for number, config in enumerate(configs):
        built = dataclasses.replace(BUILT, digest=f"{number:064x}")
        assert simulation.bench.attempt(PROBLEM, config, built, None, CONFIG).status == "ok"
        gc.collect()
        kept.append(len(alive))
    assert len(set(kept)) == 1, kept
    simulation.bench.finals(PROBLEM, configs, 0.0)
    gc.collect()
    assert len(alive) == kept[0]
