"""Where rows are from: the log of what came from elsewhere, and the names that travel with rows."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from postgres_server import on_both
from sqlalchemy import select

from flashtune.cli.main import main
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import DatabaseDamaged, InvalidInput
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.schema.models import MeasurementRow
from flashtune.tuned_db.sharing import merge, transfer
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
H200 = gpu_by_alias("h200")


class TestArrivals:
    """The log of what came from elsewhere."""

    def test_each_way_is_logged_where_it_arrives(
        self, store: Store, tmp_path: Path, team_url: str, other: tuple[Path, list[Measurement]],
        monkeypatch: pytest.MonkeyPatch, measurement: Make,
    ) -> None:  # fmt: skip
        monkeypatch.setenv("FLASHTUNE_AUTHOR", "Ada")
        source, rows = other
        team = Store.on_server(team_url)
        with Store.open(source) as local:
            digest = write_export(rows[:3], tmp_path / "some.jsonl", origin=local.origin).digest
            add_file(store, tmp_path / "some.jsonl", check=lambda header: "node 7")
            add_file(store, tmp_path / "some.jsonl")
            add_database(store, source)
            add_database(store, source)
            carry(local, team)
            team.record(measurement(session="another"))
            carry(team, store)
            origin = local.origin
        said = [(each.kind, each.source, each.digest, each.signer, each.new, each.author) for each in store.arrivals()]
        assert said == [
            ("import", origin, digest, "node 7", 3, "Ada"),
            ("merge", origin, "", "", 5, "Ada"),
            ("pull", team.origin, "", "", 1, "Ada"),
        ], "what added nothing is not logged"
        assert [(each.kind, each.source, each.new) for each in team.arrivals()] == [("push", origin, 8)]

    @on_both
    def test_each_row_keeps_the_number_of_what_brought_it(
        self, store: Store, tmp_path: Path, other: tuple[Path, list[Measurement]], measurement: Make
    ) -> None:
        """M11: or what should not have come could not be told from the rest again."""
        own = store.record(measurement(session="own"))
        with Store.open(other[0]) as source:
            write_export(other[1][:3], tmp_path / "some.jsonl", origin=source.origin)
            carry(store, source)
            add_file(store, tmp_path / "some.jsonl")
            add_database(store, other[0])
        assert [(each.number, each.new) for each in store.arrivals()] == [(1, 3), (2, 5)]
        assert store.arrived() == {1: 3, 2: 5}
        rows = {each.id: number for each, number in zip(other[1], [1] * 3 + [2] * 5, strict=True)}
        with store.backend.reading() as connection:
            query = select(MeasurementRow.id, MeasurementRow.arrival)
            assert dict(map(tuple, connection.execute(query))) == rows | {own.id: None}

    def test_it_stays_where_it_is(self, store: Store, tmp_path: Path, other: tuple[Path, list[Measurement]]) -> None:
        add_database(store, other[0])
        with Store.open(tmp_path / "third.db") as third:
            add_database(third, store.path)
            assert [each.source for each in third.arrivals()] == [store.origin]
            for each in (store, third):
                write_export(each.measurements(), tmp_path / f"{each.path.stem}.jsonl", origin="x")
        assert (tmp_path / "third.jsonl").read_bytes() == (tmp_path / "tuned.jsonl").read_bytes()

    def test_a_refused_merge_is_not_logged(self, store: Store, other: tuple[Path, list[Measurement]]) -> None:
        store.record(dataclasses.replace(other[1][0], median_us=1.0))
        with pytest.raises(InvalidInput, match="with other values"):
            add_database(store, other[0])
        assert store.arrivals() == []

    def test_the_command_shows_it_and_text_of_others_as_text(
        self, store: Store, path: Path, other: tuple[Path, list[Measurement]]
    ) -> None:
        nothing = CliRunner().invoke(main, ["db", "log", "--db", str(path)])
        assert nothing.output == "Nothing came from elsewhere\n"
        add_database(store, other[0])
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute("UPDATE arrival SET author = ?", ("\x1b[2Jroot",))
        said = CliRunner().invoke(main, ["db", "log", "--db", str(path)])
        assert said.exit_code == 0
        assert "\x1b" not in said.output
        assert "merge         8 new from " in said.output
        assert said.output.endswith("by '\\x1b[2Jroot'\n")

    @pytest.mark.parametrize(
        "values", ["created = x'ff'", "id = x'ff'", "new = x'ff'", "new = char(27) || '[2J'", "kind = NULL || x'1b'"]
    )
    def test_one_that_was_tampered_with_is_listed(
        self, store: Store, path: Path, other: tuple[Path, list[Measurement]], measurement: Make, values: str
    ) -> None:
        add_database(store, other[0])
        with Store.open(other[0]) as adding:
            adding.record(measurement(session="later"))
        add_database(store, other[0])
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute(f"UPDATE OR IGNORE arrival SET {values} WHERE id = (SELECT min(id) FROM arrival)")
        for command in ("log", "info"):
            said = CliRunner().invoke(main, ["db", command, "--db", str(path)], color=True)  # nothing is stripped
            assert said.exit_code == 0, said.exception
            assert "\x1b" not in said.output

    @pytest.mark.parametrize("origin", ["\ud800", "a\0b", "\x1b[2J", "x" * 201, 7])
    def test_an_export_of_no_printable_origin_is_refused(
        self, store: Store, tmp_path: Path, measurement: Make, origin: Any
    ) -> None:
        """A surrogate is no text for SQLite, and NUL none for PostgreSQL."""
        file = tmp_path / "rows.jsonl"
        write_export([measurement()], file, origin="x")
        first, rest = file.read_text("utf-8").split("\n", 1)
        file.write_text(json.dumps(json.loads(first) | {"origin": origin}) + "\n" + rest, encoding="utf-8")
        with pytest.raises(InvalidInput, match="line 1: origin="):
            add_file(store, file)
        assert store.count() == 0

    @pytest.mark.parametrize("uuid", ["'a' || char(0)", "x'ff'", "char(27) || '[2J'"])
    @pytest.mark.parametrize("readonly", [True, False])
    def test_a_database_of_no_printable_id_is_not_used(
        self, store: Store, other: tuple[Path, list[Measurement]], uuid: str, readonly: bool
    ) -> None:
        """M3: others store and print it as the source of what it holds."""
        with closing(sqlite3.connect(other[0])) as plain, plain:
            plain.execute(f"UPDATE origin SET uuid = {uuid}")
        with pytest.raises(DatabaseDamaged, match="damaged: its id is ") as caught:
            Store.open(other[0], readonly=readonly)
        assert str(caught.value).isprintable()
        with pytest.raises(DatabaseDamaged, match="damaged: its id is "):
            add_database(store, other[0])
        assert store.count() == 0


class TestAuthor:
    """The name that travels with rows."""

    def test_one_that_can_not_be_stored_is_said_before_any_work(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: tuple[Path, list[Measurement]]
    ) -> None:
        def work(*arguments: object, **options: object) -> None:
            raise AssertionError("in vain")

        write_export(other[1], tmp_path / "rows.jsonl", origin="x")
        monkeypatch.setenv("FLASHTUNE_AUTHOR", "x" * 101)
        for module, name in ((merge, "read_export"), (merge, "_compared"), (transfer, "_Comparison")):
            monkeypatch.setattr(module, name, work)
        with Store.open(other[0]) as source:
            for add in (
                lambda: add_file(store, tmp_path / "rows.jsonl"),
                lambda: add_database(store, source.path),
                lambda: carry(source, store),
            ):
                with pytest.raises(InvalidInput, match="FLASHTUNE_AUTHOR"):
                    add()

    def test_it_is_stored_exported_and_merged(self, store: Store, tmp_path: Path, measurement: Make) -> None:
        rows = [measurement(author="Ada, Ä. & 数"), measurement(), measurement(author="Bob")]
        store.record_all(rows)
        assert {each.author for each in store.measurements()} == {"Ada, Ä. & 数", "", "Bob"}
        write_export(rows, tmp_path / "rows.jsonl", origin="x")
        lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()[1:]]
        assert sorted(each.get("author", "-") for each in lines) == ["-", "Ada, Ä. & 数", "Bob"]
        with Store.open(tmp_path / "other.db") as other:
            add_file(other, tmp_path / "rows.jsonl")
            assert add_database(other, store.path) == Added(new=0, known=3)
            assert other.measurements() == store.measurements()

    def test_one_that_is_no_name_is_refused(self, store: Store, measurement: Make) -> None:
        for bad in ("x" * 201, "a\nb", 7):
            with pytest.raises(InvalidInput, match="author"):
                store.record(measurement(author=bad))
