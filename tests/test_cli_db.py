"""`flashtune db`: rows travel from one database to another by its commands."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import run

from flashtune.cli.main import main
from flashtune.tuned_db.exchange.export_file import read_export

SHIPPED = Path(__file__).parents[1] / "tuned_db" / "bundled" / "h200.jsonl"

call = functools.partial(run, "db")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "own.db"))
    return tmp_path / "own.db"


def test_rows_travel_and_come_back_the_same(tmp_path: Path) -> None:
    rows = read_export(SHIPPED).measurements
    count, sessions = len(rows), len({each.session for each in rows})
    assert f"{count} new measurements, 0 that were there" in call("import", str(SHIPPED)).output
    assert f"0 new measurements, {count} that were there" in call("import", str(SHIPPED)).output
    assert f"{count} measurements written" in call("export", str(tmp_path / "out.jsonl"), "--gpu", "h200").output
    assert read_export(tmp_path / "out.jsonl").measurements == read_export(SHIPPED).measurements
    team = str(tmp_path / "team.db")
    assert f"{count} new measurements" in call("merge", str(tmp_path / "own.db"), "--db", team).output
    shown = call("info", "--db", team).output
    assert f"measurements  {count} of {sessions} session" in shown
    assert "h200" in shown
    assert team in shown


def test_what_was_imported_is_listed(tmp_path: Path) -> None:
    call("import", str(SHIPPED))
    listed = CliRunner().invoke(main, ["list", "--gpu", "h200"])
    assert listed.exit_code == 0
    assert "sm90_fwd" in listed.output


@pytest.mark.parametrize("command", ["info", "export", "import", "merge", "verify"])
def test_every_command_teaches_by_example(command: str) -> None:
    assert f"flashtune db {command}" in call(command, "--help").output


def test_misuse_is_one_line_with_a_way_out(tmp_path: Path, own: Path) -> None:
    assert "flashtune tune makes one" in call("info", code=1).output
    assert "flashtune tune makes one" in call("export", str(tmp_path / "x.jsonl"), code=1).output
    call("import", str(SHIPPED))
    assert "flashtune db import" in call("merge", str(SHIPPED), code=1).output
    assert "flashtune db merge" in call("import", str(own), code=1).output
    assert "no flashtune export" in call("export", str(own), code=1).output
    assert "no measurements" in call("export", str(tmp_path / "x.jsonl"), "--gpu", "a100", code=1).output
    assert "does not exist" in call("merge", str(tmp_path / "none.db"), code=2).output
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(SHIPPED.read_bytes()[:-100])
    assert "cut off" in call("import", str(cut), code=1).output
