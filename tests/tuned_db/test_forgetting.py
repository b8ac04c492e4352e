"""What should not have come is taken out: that and nothing else, it stays out, and there is a way back."""

from __future__ import annotations

import shlex
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import H200, PairConfig
from postgres_server import on_both
from sqlalchemy import text

from flashtune.cli.main import main
from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import read_export, write_export
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.removed import bury
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.forgetting import Which, forget

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where copies of a server's rows go."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own(store: Store, measurement: Make) -> Measurement:
    """What was measured into `store`."""
    return store.record(measurement(session="own"))


def ids(rows: Any) -> set[str]:
    return {each.id for each in rows}


@on_both
@pytest.mark.parametrize("by", ["arrival", "session", "source"])
def test_what_was_named_goes_and_stays_out(
    store: Store, other: tuple[Path, list[Measurement]], folder: Path, own: Measurement, by: str
) -> None:
    """M11: what a merge had brought could not be taken out again."""
    path, rows = other
    add_database(store, path)
    with Store.open(path) as source:
        which = Which(**{by: {"arrival": 1, "session": rows[0].session, "source": source.origin}[by]})
        found = forget(store, which)
        assert (found.removed, found.left, found.lost) == (8, 1, 0)
        assert store.measurements() == [own]
        assert found.copy is not None
        assert ids(read_export(found.copy).measurements) == ids(rows)
        write_export(rows, folder / "rows.jsonl", origin="x")
        refused = Added(new=0, known=0, removed=8)
        assert add_database(store, path) == add_file(store, folder / "rows.jsonl") == carry(source, store) == refused
        assert store.add(rows).removed == 8
        assert store.measurements() == [own]
        assert carry(store, source) == Added(new=1, known=0), "nothing of it travels"
        assert ids(source.measurements()) == ids([own, *rows])


@on_both
@pytest.mark.parametrize("way", ["the copy", "the source", "a server or file"])
def test_it_can_be_taken_back(store: Store, other: tuple[Path, list[Measurement]], own: Measurement, way: str) -> None:
    path, rows = other
    add_database(store, path)
    copy = forget(store, Which(arrival=1)).copy
    assert copy is not None
    with Store.open(path) as source:
        back = {
            "the copy": lambda: add_file(store, copy, take_back=True),
            "the source": lambda: add_database(store, path, take_back=True),
            "a server or file": lambda: carry(source, store, take_back=True),
        }
        assert back[way]() == Added(new=8, known=0)
    assert ids(store.measurements()) == ids([own, *rows])
    assert store.count_removed() == 0
    assert store.arrived() == {2: 8}
    assert forget(store, Which(arrival=2)).removed == 8


def test_what_is_taken_back_may_be_a_part(store: Store, other: tuple[Path, list[Measurement]], folder: Path) -> None:
    add_database(store, other[0])
    forget(store, Which(arrival=1))
    write_export(other[1][:3], folder / "rows.jsonl", origin="x")
    assert add_file(store, folder / "rows.jsonl", take_back=True) == Added(new=3, known=0)
    assert add_database(store, other[0]) == Added(new=0, known=3, removed=5)


@on_both
def test_only_what_an_arrival_was_first_to_bring_goes(
    store: Store, other: tuple[Path, list[Measurement]], folder: Path, own: Measurement
) -> None:
    """What was there before it stays, though it was in the file, too."""
    write_export(other[1][:5], folder / "rows.jsonl", origin="x")
    add_file(store, folder / "rows.jsonl")
    add_database(store, other[0])
    assert forget(store, Which(arrival=2)).removed == 3
    assert ids(store.measurements()) == ids([own, *other[1][:5]])


def test_a_dry_run_changes_nothing(store: Store, path: Path, other: tuple[Path, list[Measurement]]) -> None:
    add_database(store, other[0])
    before, files = path.read_bytes(), sorted(path.parent.iterdir())
    found = forget(Store.open(path, readonly=True), Which(arrival=1), dry_run=True)
    assert (found.removed, found.left, found.copy) == (8, 0, None)
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == (before, files)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (Which(arrival=7), r"no measurement of arrival 7 in .*\. flashtune db log lists what came, .* here: 1"),
        (Which(session="s1"), r"no measurement of session 's1' in .*\. flashtune db history lists the sessions"),
        (Which(source="x"), r"no measurement from 'x' in .*\. flashtune db log lists"),
        (Which(source="\ud800"), r"'\\ud800' must be at most 200 printable characters"),
        (Which(session="x" * 201), r"must be at most 200 printable characters"),
    ],
    ids=str,
)
def test_where_there_is_none_it_says_what_there_is(
    store: Store, other: tuple[Path, list[Measurement]], which: Which, said: str
) -> None:
    add_database(store, other[0])
    with pytest.raises(InvalidInput, match=said):
        forget(store, which)
    assert store.count() == 8


def test_what_came_before_rows_were_told_apart_is_said_to(store: Store, other: tuple[Path, list[Measurement]]) -> None:
    add_database(store, other[0])
    with store.backend.writing() as connection:
        connection.execute(text("UPDATE measurement SET arrival = NULL"))
    for which in (Which(arrival=1), Which(source=store.arrivals()[0].source)):
        with pytest.raises(InvalidInput, match=r"it came before they were told apart\. --session removes"):
            forget(store, which)


def test_a_dry_run_on_an_older_schema_says_that_it_knows_no_arrivals(folder: Path) -> None:
    old = folder / "old.db"
    shutil.copy(Path(__file__).parents[1] / "upgrade_assets" / "v0003.db", old)
    with Store.open(old, readonly=True) as store:
        with pytest.raises(InvalidInput, match="no measurement of arrival 1 in"):
            forget(store, Which(arrival=1), dry_run=True)
        session = store.measurements()[0].session
        assert forget(store, Which(session=session), dry_run=True).removed == 4


@pytest.mark.parametrize(
    "poison", ["throttle = ','", "created = 'today'", "id = x'ff'", "id = 'x' || substr(id, 1, 3)", "samples = 'many'"]
)
def test_rows_that_can_not_be_read_go_too(
    store: Store, path: Path, other: tuple[Path, list[Measurement]], own: Measurement, poison: str
) -> None:
    add_database(store, other[0])
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute(f"UPDATE measurement SET {poison} WHERE id = ?", (other[1][3].id,))
    found = forget(store, Which(arrival=1))
    assert (found.removed, found.lost, found.left) == (8, 1, 1)
    assert found.copy is not None
    assert len(read_export(found.copy).measurements) == 7
    assert store.measurements() == [own]


@on_both
def test_a_name_that_came_with_them_is_not_held_against_the_right_one(store: Store, measurement: Make) -> None:
    """A made-up name for a model that others have kept all of theirs out, for ever."""
    lie, truth = measurement(session="lie"), measurement(session="truth")
    store.add([lie])
    with store.backend.writing() as connection:
        connection.execute(text("UPDATE device SET name = 'potato'"))
    with pytest.raises(InvalidInput, match="gpu_name='h200' must be 'potato'"):
        store.add([truth])
    forget(store, Which(session="lie"))
    assert store.add([truth]).new == 1


def test_what_only_they_used_goes_and_what_others_use_stays(
    store: Store, path: Path, measurement: Make, prediction: Make, problem: Make
) -> None:
    def count() -> list[int]:
        tables = ("problem", "device", "environment", "variant", "prediction")
        with closing(sqlite3.connect(path)) as plain:
            assert plain.execute("PRAGMA foreign_key_check").fetchall() == []
            return [plain.execute(f"SELECT count(*) FROM {each}").fetchone()[0] for each in tables]

    store.record(measurement())
    store.record_prediction(prediction())
    before = count()
    store.add(
        measurement(
            session="s", problem=problem(seqlen_q=length), gpu_key=f"9.0a/x{length}", author=str(length),
            config=PairConfig(block=block, stages=1),
        )
        for length in (17, 33) for block in (16, 256)
    )  # fmt: skip
    assert count() > before
    forget(store, Which(session="s"))
    assert count() == before


def test_failures_of_a_made_up_card_are_undone_by_one_command(
    store: Store, tmp_path: Path, measurement: Make, problem: Make
) -> None:
    """M11: two sessions of it, so that they count."""
    store.record(measurement())
    with Store.open(tmp_path / "poison.db") as poison:
        lie = {"gpu_key": "7.5/potato", "gpu_name": "potato", "status": "wrong", "median_us": None}
        poison.add([measurement(session=day, created=f"2026-11-0{day}T12:00:00.000Z", **lie) for day in "12"])
    assert find(problem(), H200, store_path=store.path).level == "exact"
    add_database(store, poison.path)
    assert find(problem(), H200, store_path=store.path).level == "default"
    forget(store, Which(arrival=1))
    add_database(store, poison.path)
    assert find(problem(), H200, store_path=store.path).level == "exact"


def test_in_any_order_merges_and_what_was_forgotten_come_to_the_same(
    store: Store, tmp_path: Path, searched: Make, empty_database: bytes
) -> None:
    """The union of all, without what was removed here."""
    parts = {each: searched(each) for each in "abc"}
    for each, rows in parts.items():
        with Store.open(tmp_path / f"{each}.db") as made:
            made.add(rows)
    for order in ("abc", "cba", "bca"):
        path = tmp_path / f"{order}.db"
        path.write_bytes(empty_database)
        with Store.open(path) as merged:
            for each in order:
                add_database(merged, tmp_path / f"{each}.db")
                if each == "b":
                    forget(merged, Which(session="b"))
            for each in order:
                add_database(merged, tmp_path / f"{each}.db")
            assert ids(merged.measurements()) == ids([*parts["a"], *parts["c"]])


def test_an_id_that_is_none_leaves_nothing_behind(store: Store) -> None:
    with store.backend.writing() as connection:
        bury(connection, ["x", b"x", 7, None, "01935f6e-0000-7000-8000-00000000dead"])
    assert store.count_removed() == 1


class TestCommand:
    def run(self, *words: str, code: int = 0) -> str:
        said = CliRunner().invoke(main, ["db", *words])
        assert said.exit_code == code, said.output
        return said.output

    def test_the_log_numbers_what_came_and_forget_takes_it_out(
        self, store: Store, path: Path, other: tuple[Path, list[Measurement]]
    ) -> None:
        add_database(store, other[0])
        (line,) = self.run("log", "--db", str(path)).splitlines()
        assert line.startswith("  1  20")
        assert "8 new from" in line
        assert "Would remove 8 of 8" in self.run("forget", "--arrival", "1", "--dry-run", "--db", str(path))
        said = self.run("forget", "--arrival", "1", "--db", str(path)).splitlines()
        assert said[0] == "Removed 8 of 8 measurements: those of arrival 1"
        _, _, copy, _ = shlex.split(said[1].split("take them back: flashtune ")[1])
        assert "0 of them here" in self.run("log", "--db", str(path))
        assert "8 by gc or forget" in self.run("info", "--db", str(path))
        assert "8 that were removed here and stay so" in self.run("merge", str(other[0]), "--db", str(path))
        assert "8 new measurements" in self.run("import", copy, "--take-back", "--db", str(path))

    @pytest.mark.parametrize("words", [[], ["--arrival", "1", "--session", "x"]])
    def test_it_wants_one_thing_to_go_by(self, path: Path, store: Store, words: list[str]) -> None:
        assert "one of --arrival, --session and --source" in self.run("forget", *words, "--db", str(path), code=2)

    def test_a_team_forgets_what_was_pushed(
        self, store: Store, path: Path, team_url: str, other: tuple[Path, list[Measurement]]
    ) -> None:
        self.run("push", "--team", team_url, "--db", str(other[0]))
        assert self.run("team", "log", "--team", team_url).startswith("  1  ")
        assert "Would remove 8 of 8" in self.run("team", "forget", "--arrival", "1", "--dry-run", "--team", team_url)
        said = self.run("team", "forget", "--arrival", "1", "--team", team_url)
        assert "They are kept in team.forgotten-" in said
        assert "8 that were removed here and stay so" in self.run("push", "--team", team_url, "--db", str(other[0]))
        back = self.run("push", "--take-back", "--team", team_url, "--db", str(other[0]))
        assert back.startswith("8 new measurements")
