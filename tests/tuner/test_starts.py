"""What is tried first: what the user gives, what attention() would use, winners nearby. And what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, problem, run

from flashtune.codegen.families.registry import unusable
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import FlashtuneError, IllegalConfig, InvalidInput, InvalidType
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import new_id
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.gc import collect
from flashtune.tuner.results.rows import MAX_STARTS, NEAR_STARTS, starts
from flashtune.tuner.search.space import make_space
from flashtune.tuner.tune.session import tune

PROBLEM = problem()
SPACE = make_space(PROBLEM, GPU, FAMILY)
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)
PICKED = [config for config in SPACE.configs if config != DEFAULT][10:20]


def tuned(path: Path, winners: Mapping[Problem, Config], gpu_key: str = GPU.key) -> None:
    """Makes each config the winner of its problem on the GPU with ``gpu_key``."""
    source = path.with_suffix(".rows.db")
    source.unlink(missing_ok=True)
    for each, winner in winners.items():
        bench = FakeBench(only(winner))
        run(source, [each], 2, bench=bench, first=[winner])
    with Store.open(source, readonly=True) as made, Store.open(path) as store:
        rows = made.measurements()
        model = {"gpu_key": gpu_key, "gpu_name": gpu_key.split("/")[1]}
        store.record_all(dataclasses.replace(row, id=new_id(), **model) for row in rows)


def only(winner: Config) -> Callable[[Config], float]:
    return lambda config: 1e-2 if config == winner else 1e-1


def listed(path: Path) -> list[Config]:
    with Store.open(path) as store:
        return starts(store, PROBLEM, GPU)


def test_without_any_rows_only_what_attention_would_use_is_tried_first(path: Path) -> None:
    assert len(listed(path)) == 1


def test_winners_of_near_problems_come_nearest_first_behind_what_attention_would_use(path: Path) -> None:
    near, nearer, far = problem(4096), problem(2048), problem(16384)
    tuned(path, {near: PICKED[0], nearer: PICKED[1], far: PICKED[2]})
    used = find(PROBLEM, GPU, store_path=path).config
    assert used in PICKED
    asked = [each for each in listed(path) if each in PICKED]
    assert asked == list(dict.fromkeys([used, PICKED[1], PICKED[0], PICKED[2]]))


def test_the_same_problem_on_other_gpus_comes_behind_near_problems_the_nearest_first(path: Path) -> None:
    h200, a30 = gpu_by_alias("h200"), gpu_by_alias("a30")
    tuned(path, {PROBLEM: PICKED[4]}, h200.key)
    tuned(path, {PROBLEM: PICKED[5]}, a30.key)
    tuned(path, {problem(512): PICKED[6]})
    assert [each for each in listed(path) if each in PICKED] == [PICKED[6], PICKED[5], PICKED[4]]


def test_near_problems_leave_room_for_other_gpus(path: Path) -> None:
    tuned(path, {problem(256 * 2**number): PICKED[number] for number in range(6) if number != 2})
    tuned(path, {PROBLEM: PICKED[8]}, gpu_by_alias("h200").key)
    found = listed(path)
    assert len(found) == MAX_STARTS
    assert found[-1] == PICKED[8]
    assert NEAR_STARTS <= len([each for each in found if each in PICKED[:6]]) < MAX_STARTS


def test_what_is_not_legal_here_is_left_out(path: Path) -> None:
    """Of an H200, say, with more shared memory than the GPU that is tuned."""
    small = dataclasses.replace(GPU, name="small", shared_memory_block=49152)
    large = max(SPACE.configs, key=lambda config: FAMILY.resources(config, PROBLEM.spec).shared_memory)
    assert unusable(large, PROBLEM, small) is not None
    tuned(path, {PROBLEM: large})
    with Store.open(path) as store:
        assert large in starts(store, PROBLEM, GPU)
        assert all(unusable(each, PROBLEM, small) is None for each in starts(store, PROBLEM, small))


def test_a_run_tries_what_the_user_gives_right_behind_the_default(path: Path) -> None:
    bench = FakeBench()
    run(path, [PROBLEM, problem(512)], 10, bench=bench, first=PICKED[:2])
    for each in (PROBLEM, problem(512)):
        assert [config for asked, config in bench.attempts if asked == each][:3] == [DEFAULT, *PICKED[:2]]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("sm80_fwd", InvalidType, "must be a list of configs"),
        (DEFAULT, InvalidType, "must be a list of configs"),
        ([{"block_m": 64}], InvalidType, "is not a config"),
        ([gpu_by_alias("h100")], InvalidType, "is not a config"),
        (["block_m=64"], InvalidType, "is not a config"),
    ],
    ids=["text", "one", "dict", "gpu", "texts"],
)
def test_first_must_be_a_list_of_configs(path: Path, given: Any, error: type[FlashtuneError], message: str) -> None:
    with pytest.raises(error, match=message):
        tune([PROBLEM], "h100", mode="predict", first=given, database=path)
    assert not path.exists()


def test_first_must_be_legal_for_each_problem(path: Path) -> None:
    wide = problem(head_dim=256)
    large = next(config for config in SPACE.configs if unusable(config, wide, GPU))
    with pytest.raises(IllegalConfig, match=r"first: sm80_fwd\(.*d256.* on h100.*: "):
        tune([PROBLEM, wide], "h100", mode="predict", first=[large], database=path)
    assert not path.exists()


def test_first_must_be_of_a_family_that_is_searched(path: Path) -> None:
    with pytest.raises(InvalidInput, match="another family than families="):
        tune([PROBLEM], "h100", mode="predict", families=["fma_fwd"], first=[DEFAULT], database=path)
    assert not path.exists()


def test_an_unknown_sampler_is_refused_before_the_database_is_touched(path: Path) -> None:
    with pytest.raises(InvalidInput, match="sampler 'best' is not known"):
        tune([PROBLEM], "h100", mode="predict", sampler="best", database=path)
    assert not path.exists()


def test_after_gc_a_run_measures_anew_and_keeps_the_winner(path: Path) -> None:
    (before,) = run(path, [PROBLEM], 20).rows
    with Store.open(path) as store:
        assert collect(store, days=0).removed >= 15
    bench = FakeBench()
    (after,) = run(path, [PROBLEM], 20, bench=bench).rows
    assert after.config == before.config
    assert len(bench.attempts) >= 15, "their times are not known any more"
    with Store.open(path, readonly=True) as store:
        assert len({each.session for each in store.measurements(stage="final")}) == 2
