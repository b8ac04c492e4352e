"""Merging is a union of sets, and text is as good as a database: for any measurements that may be stored."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from generated import GPUS, extremes, measurements, sets_of_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import LINE_LIMIT, read_export, read_lines, write_export
from flashtune.tuned_db.lookup.sources import Shipped
from flashtune.tuned_db.records.limits import check, settled
from flashtune.tuned_db.records.measurement import STAGES, STATUSES, Measurement, canonical, capability, to_json
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file
from flashtune.tuned_db.store.store import Store

Rows = Sequence[Measurement]
lawful = settings(max_examples=25, suppress_health_check=list(HealthCheck))
three_sets = sets_of_rows(9).flatmap(
    lambda rows: st.tuples(*[st.lists(st.sampled_from(rows), unique_by=id) if rows else st.just([])] * 3)
)
"""Sets that overlap, as those of machines that have merged before."""


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory, empty_database: bytes) -> Callable[..., Path]:
    """Makes databases: of rows, then of others that are merged into it, in that order."""

    def fresh(rows: Rows = (), *others: Path) -> Path:
        path = tmp_path_factory.mktemp("law") / "tuned.db"
        path.write_bytes(empty_database)
        with Store.open(path) as store:
            store.add(rows)
            for each in others:
                add_database(store, each)
        return path

    return fresh


def content(path: Path) -> bytes:
    """The canonical export: databases with the same rows have the same."""
    with Store.open(path, readonly=True) as store:
        write_export(store.measurements(), path.with_suffix(".jsonl"), origin="anywhere")
    return path.with_suffix(".jsonl").read_bytes()


@pytest.mark.parametrize("examples", [8, pytest.param(80, marks=pytest.mark.slow)])
def test_merging_commutes_associates_and_repeats(fresh: Callable[..., Path], examples: int) -> None:
    @settings(lawful, max_examples=examples)
    @given(sets=three_sets)
    def law(sets: tuple[Rows, Rows, Rows]) -> None:
        holds_for(fresh, sets)

    law()


def holds_for(fresh: Callable[..., Path], sets: tuple[Rows, Rows, Rows]) -> None:
    a, b, c = map(fresh, sets)
    together = content(fresh((), a, b, c))
    assert content(fresh((), c, b, a)) == together
    assert content(fresh((), fresh((), a, b), c)) == content(fresh((), a, fresh((), b, c))) == together
    assert content(fresh(sets[0], b, c, b, a)) == together
    with Store.open(a) as store:
        before = content(a)
        assert add_database(store, fresh((), a)) == Added(new=0, known=len(sets[0]))
    assert content(a) == before


@lawful
@given(rows=sets_of_rows())
def test_export_and_import_are_the_identity(fresh: Callable[..., Path], rows: Rows) -> None:
    path = fresh(rows)
    first = content(path)
    export = read_export(path.with_suffix(".jsonl"))
    with Store.open(path, readonly=True) as store:
        assert {each.id: each for each in export.measurements} == {each.id: each for each in store.measurements()}
    assert {each.id: each for each in export.measurements} == {each.id: settled(each) for each in rows}
    other = fresh()
    with Store.open(other) as store:
        assert add_file(store, path.with_suffix(".jsonl")) == Added(new=len(rows), known=0)
        assert add_file(store, path.with_suffix(".jsonl")) == Added(new=0, known=len(rows))
    assert content(other) == first


@lawful
@given(rows=sets_of_rows(9))
def test_what_ships_answers_as_a_database_of_the_same_rows(fresh: Callable[..., Path], rows: Rows) -> None:
    """A look-up asks both in the same words."""
    path = fresh(rows)
    content(path)
    lines = list(read_lines(path.with_suffix(".jsonl"))[1])
    places = {(each.problem, each.gpu_key) for each in rows}
    with Store.open(path, readonly=True) as store:
        for wanted in {capability(key) for key, _ in GPUS if key.isascii()}:  # as those of all cards are
            ships = Shipped(lines, wanted)
            assert ships.gpu_keys(capability=wanted) == store.gpu_keys(capability=wanted)
            for problem, gpu_key in {place for place in places if capability(place[1]) == wanted}:
                where = {"problem": problem, "gpu_key": gpu_key}
                for status, stage in itertools.product(STATUSES, STAGES):
                    asked = where | {"status": status, "stage": stage}
                    found = [
                        sorted(source.measurements(**asked), key=lambda each: each.id) for source in (ships, store)
                    ]
                    assert found[0] == found[1]
                spec = problem.spec
                assert ships.problems(spec=spec, gpu_key=gpu_key) == store.problems(spec=spec, gpu_key=gpu_key)
                assert ships.rejected(spec, gpu_key) == store.rejected(spec, gpu_key)
                assert ships.predictions(**where) == store.predictions(**where) == []


@lawful
@given(
    rows=st.lists(extremes(), min_size=1, max_size=40, unique_by=(lambda each: each.id, lambda each: each.gpu_key)),
    packed=st.booleans(),
)
def test_rows_at_their_limits_get_out_and_in_again(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, packed: bool
) -> None:
    """M5: no row that is accepted can keep all others from being read."""
    valid = [check(settled(each)) for each in rows]
    assert max(len(canonical(to_json(each))) for each in valid) <= LINE_LIMIT
    path = tmp_path_factory.mktemp("limits") / f"rows.jsonl{'.gz' if packed else ''}"
    header = write_export(rows, path, origin="\U00010380" * 200)
    export = read_export(path)
    assert export.header == header
    assert {each.id: each for each in export.measurements} == {each.id: each for each in valid}


@lawful
@given(row=measurements())
def test_what_is_settled_stays_so(row: Measurement) -> None:
    once = check(settled(row))
    assert repr(check(settled(once))) == repr(once)
    assert repr(settled(settled(row))) == repr(once)


@lawful
@given(row=measurements())
def test_one_device_model_has_one_name(fresh: Callable[..., Path], row: Measurement) -> None:
    """M5: a row with another would keep all of that model out, of whoever took it first."""
    other = dataclasses.replace(row, id="0" * 8 + row.id[8:-1] + "0", gpu_name=row.gpu_name + "2")
    with Store.open(fresh()) as store:
        with pytest.raises(InvalidInput, match="as the key says"):
            store.add([other])
        assert store.add([row]).new == 1
