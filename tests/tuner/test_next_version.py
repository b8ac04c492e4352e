"""A database that an older flashtune has filled, with fewer choices of a parameter or with other kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, FakeBuilder, landscape, problem, run

from flashtune.codegen.plan import config as config_module
from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records import parse
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.search import space

PROBLEM = problem()
OLD_CHOICES = (64, 128)

Version = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def older() -> Iterator[Version]:
    """A context in which this is the version before: it knows `OLD_CHOICES` of block_m and no others."""

    def forget() -> None:
        space._legal.cache_clear()
        parse.config_from_text.cache_clear()

    @contextmanager
    def older() -> Iterator[None]:
        kind = type(FAMILY.default(PROBLEM.spec, GPU))
        fewer = tuple(
            dataclasses.replace(each, choices=OLD_CHOICES) if each.name == "block_m" else each
            for each in kind.parameters()
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(config_module._known_parameters, kind, fewer)
            patch.delitem(config_module._known_choices, kind, raising=False)  # made from these when asked for
            forget()
            yield
        forget()

    yield older
    forget()


def block_m(config: Config) -> object:
    return config.to_json()["block_m"]


def rows(path: Path) -> dict[str, Measurement]:
    with Store.open(path, readonly=True) as store:
        return {each.id: each for each in store.measurements()}


@pytest.mark.parametrize("sampler", ["residual", "tpe"])
def test_a_choice_that_the_next_version_adds_is_explored_and_old_rows_serve(
    path: Path, older: Version, sampler: str
) -> None:
    """D69. Tuned with 64 and 128 rows a block; the next version knows 256 as well."""
    first, second = FakeBench(), FakeBench()
    with older():
        (winner,) = run(path, [PROBLEM], 12, bench=first, sampler=sampler).rows
    before = rows(path)
    assert {block_m(config) for _, config in first.attempts} == set(OLD_CHOICES)

    report = run(path, [PROBLEM], 30, bench=second, sampler=sampler)
    assert report.tried == 30
    assert report.rows[0].known == 12
    assert 256 in {block_m(config) for _, config in second.attempts}
    assert not {config for _, config in first.attempts} & {config for _, config in second.attempts}
    assert winner.config in second.finalists[PROBLEM], "what was measured before is there to be beaten"
    after = rows(path)
    assert {id: after[id] for id in before} == before


def test_a_new_choice_that_is_faster_wins_and_the_version_before_still_runs(path: Path, older: Version) -> None:
    """D69, and back: the version before passes over rows that it can't read, and keeps them."""

    def seconds(config: Config) -> float:
        return landscape(config) / (4 if block_m(config) == 256 else 1)

    with older():
        (old,) = run(path, [PROBLEM], 8, bench=FakeBench(seconds)).rows
    added = [config for config in space.make_space(PROBLEM, GPU, FAMILY).configs if block_m(config) == 256]
    (new,) = run(path, [PROBLEM], 4, bench=FakeBench(seconds), first=[min(added, key=landscape)]).rows
    assert new.config in added
    everything = rows(path)

    with older():
        (again,) = run(path, [PROBLEM], 3, bench=FakeBench(seconds)).rows
        assert old.config is not None
        assert again.config is not None
        assert block_m(again.config) in OLD_CHOICES
        assert find(PROBLEM, GPU, store_path=path).config == again.config
    after = rows(path)
    assert {id: after[id] for id in everything} == everything
    assert find(PROBLEM, GPU, store_path=path).config == new.config


def test_winners_of_a_changed_template_are_history_and_where_the_search_starts(path: Path) -> None:
    """D81: nothing that was measured with the older source counts, and its winner is tried right behind the default."""
    first, second = FakeBench(), FakeBench()
    older_source = FakeBuilder(lambda source: Built(digest="e" * 64, registers=96))
    run(path, [PROBLEM], 12, bench=first, builder=older_source)
    before = rows(path)
    assert {each.source_digest for each in before.values()} == {"e" * 64}
    old, default = find(PROBLEM, GPU, store_path=path), FAMILY.default(PROBLEM.spec, GPU)
    assert old.level == "older_source"
    assert old.config != default

    report = run(path, [PROBLEM], 4, bench=second)
    assert report.rows[0].known == 0
    assert [config for _, config in second.attempts][:2] == [default, old.config]
    after = rows(path)
    assert {id: after[id] for id in before} == before
    choice = find(PROBLEM, GPU, store_path=path)
    assert choice.level == "exact"
    assert choice.measurement is not None
    assert choice.measurement.id not in before
