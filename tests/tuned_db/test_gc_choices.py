"""What look-ups go by is left by gc: it changes no choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generated import measurements
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_server import on_both

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.lookup.lookup import find, find_in, source_digest
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.records.measurement import Measurement, new_id
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.gc import collect

Make = Callable[..., Any]
H200 = gpu_by_alias("h200")


def older_source(rows: list[Measurement]) -> list[Measurement]:
    """An update changed the source of the finalists, and of no other config."""
    return [dataclasses.replace(each, source_digest="a" * 64) if each.stage == "final" else each for each in rows]


def barred(rows: list[Measurement]) -> list[Measurement]:
    """The finalists turned out to be wrong."""
    return [*rows, *(dataclasses.replace(each, id=new_id(), status="wrong") for each in rows[6:])]


def slower(rows: list[Measurement]) -> list[Measurement]:
    """No finalist may win: the default was not among them."""
    return [dataclasses.replace(each, paired_ratio=1.1) if each.stage == "final" else each for each in rows]


@on_both
@pytest.mark.parametrize("changed", [older_source, barred, slower])
def test_times_that_a_look_up_goes_by_stay(
    store: Store, searched: Callable[..., list[Measurement]], changed: Callable[..., list[Measurement]]
) -> None:
    rows = changed(searched())
    store.record_all(rows)
    before = find_in(rows[0].problem, H200, [store])
    assert (before.level, before.measurement and before.measurement.stage) == ("exact", "measure")
    assert collect(store, days=0, dry_run=True).removed == collect(store, days=0).removed == 0
    assert find_in(rows[0].problem, H200, [store]) == before


def test_times_of_an_older_source_go_with_its_finals(store: Store, searched: Callable[..., list[Measurement]]) -> None:
    rows = searched(source_digest="a" * 64)
    store.record_all(rows)
    before = find_in(rows[0].problem, H200, [store])
    assert (before.level, collect(store, days=0).removed) == ("older_source", 6)
    assert find_in(rows[0].problem, H200, [store]) == before


def test_nor_does_a_look_up_of_a_near_problem_or_chip_go_by_them(
    store: Store, path: Path, searched: Callable[..., list[Measurement]], problem: Make
) -> None:
    """What is lent won a final: times of others don't take its place where it can't be used."""
    rows = searched(problem=problem(dtype="bfloat16"))
    unusable = [
        dataclasses.replace(each, id=new_id(), problem=problem(), status="wrong", median_us=None) for each in rows[6:]
    ]
    store.record_all([*rows, *unusable])
    gpus = (H200, gpu_by_alias("h100"))
    before = [find(problem(), gpu, store_path=path) for gpu in gpus]
    assert {each.level for each in before} == {"default"}
    assert collect(store, days=0).removed == 6
    assert [find(problem(), gpu, store_path=path) for gpu in gpus] == before


def test_choices_are_as_before_for_any_rows(
    tmp_path_factory: pytest.TempPathFactory, empty_database: bytes, problem: Make
) -> None:
    """A variant that has finals counts by them alone, and each finished search has some."""

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(drawn=st.lists(measurements(), min_size=1, max_size=14, unique_by=lambda each: each.id), seed=st.randoms())
    def law(drawn: list[Measurement], seed: Any) -> None:
        asked = problem()
        rows = [
            dataclasses.replace(
                each, problem=asked, gpu_key=H200.key, gpu_name=H200.name, nvrtc="13.0",
                session=seed.choice("ab"), status=seed.choice(("ok", "ok", "ok", "wrong")),
                source_digest=seed.choice(("a" * 64, source_digest(asked.spec, each.config))),
                median_us=seed.choice((80.0, 90.0, 99.0)), baseline_us=100.0,
            )
            for each in drawn
        ]  # fmt: skip
        path = tmp_path_factory.mktemp("law") / "tuned.db"
        path.write_bytes(empty_database)
        with Store.open(path) as store:
            store.add(rows)
            before, chosen = rank(store.measurements()), find_in(asked, H200, [store])
            collect(store, days=0)
            after = rank(store.measurements())
            assert find_in(asked, H200, [store]) == chosen
        finals = [each for each in before if each.measurement.stage == "final"]
        assert after[: len(finals)] == finals

    law()
