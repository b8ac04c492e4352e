"""Measurements as Optuna studies: what is in the file, and that no file is ever overwritten."""

from __future__ import annotations

import dataclasses
import errno
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner
from command_line import run as call
from optuna.trial import TrialState
from tuner_fakes import GPU, FakeBench, problem, run

from flashtune import files
from flashtune.cli.main import main
from flashtune.codegen.plan.config import Config
from flashtune.errors import InvalidInput
from flashtune.tuned_db.records.measurement import new_id
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.commands import optuna_export
from flashtune.tuner.commands.optuna_export import export_studies
from flashtune.tuner.trial.outcome import Outcome


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with 7 trials of 2 problems, the third of which failed, and their finals."""
    path = tmp_path_factory.mktemp("measured") / "tuned.db"

    def outcome(config: Config, number: int) -> Outcome | None:
        return Outcome(status="wrong", message="off by one") if number == 3 else None

    run(path, [problem(), problem(2048, causal=True)], 7, bench=FakeBench(outcome=outcome))
    return path


@pytest.fixture(scope="module")
def exported(measured: Path) -> dict[str, optuna.Study]:
    path = measured.parent / "with ? and {braces}.db"
    export_studies(measured, path)
    copy = measured.parent / "plain.db"
    copy.write_bytes(path.read_bytes())
    storage = f"sqlite:///{copy}"
    return {name: optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)}


def test_there_is_a_study_per_problem_gpu_and_family(exported: dict[str, optuna.Study]) -> None:
    assert set(exported) == {f"{each} on {GPU.name} by sm80_fwd" for each in (problem(), problem(2048, causal=True))}


def test_each_measurement_is_a_trial_with_its_time_and_config(
    measured: Path, exported: dict[str, optuna.Study]
) -> None:
    with Store.open(measured, readonly=True) as store:
        for each in (problem(), problem(2048, causal=True)):
            rows = store.measurements(problem=each, gpu_key=GPU.key)
            study = exported[f"{each} on {GPU.name} by sm80_fwd"]
            assert len(study.trials) == len(rows)
            assert study.best_value == min(row.median_us for row in rows if row.median_us) / 1e3
            for trial, row in zip(study.trials, rows, strict=True):
                assert trial.user_attrs["stage"] == row.stage
                assert trial.user_attrs["config"] == row.config.key
                constant = {
                    name.removeprefix("always "): got
                    for name, got in study.user_attrs.items()
                    if name.startswith("always ")
                }
                assert type(row.config)(**constant, **trial.params) == row.config


def test_what_failed_is_a_failed_trial_with_the_reason(exported: dict[str, optuna.Study]) -> None:
    failed = [each for study in exported.values() for each in study.get_trials(states=[TrialState.FAIL])]
    assert [(each.user_attrs["status"], each.user_attrs["message"]) for each in failed] == [("wrong", "off by one")]


def test_a_file_that_exists_is_left_alone(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.db"
    path.write_text("mine")
    with pytest.raises(InvalidInput, match="never overwritten"):
        export_studies(measured, path)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_appears_meanwhile_is_left_alone(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.db"
    with pytest.raises(InvalidInput, match="another process"):
        export_studies(measured, path, progress=lambda *_: path.write_text("theirs") and None)
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_an_export_that_ends_early_leaves_nothing(measured: Path, tmp_path: Path) -> None:
    def interrupt(name: str, number: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_studies(measured, tmp_path / "mine.db", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["new.db", "--gpu", "h100"], 1, "Error: nothing was measured yet on "),
        (["new.db", "--gpu", "h1000"], 1, "h1000"),
        (["missing/new.db"], 1, "the folder missing does not exist"),
        ([], 2, "Missing argument 'FILE'"),
        (["new.db", "--db", "nothing.db"], 1, "there is no tuning database at nothing.db"),
    ],
    ids=["gpu", "no-gpu", "folder", "argument", "database"],
)
def test_misuse_is_one_error_and_no_file(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(measured))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["export-optuna", *arguments])
    assert done.exit_code == code
    assert message in done.output
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote_and_how_to_look_at_it(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(measured))
    path = tmp_path / "studies.db"
    done = CliRunner().invoke(main, ["export-optuna", str(path), "--gpu", GPU.name])
    assert done.exit_code == 0, done.output
    assert f"2 studies with {trials(measured)} trials written to {path}" in done.stdout
    assert f"optuna-dashboard sqlite:///{path}" in done.stdout


def trials(database: Path) -> int:
    with Store.open(database, readonly=True) as store:
        return len(store.measurements())


def test_a_full_disk_is_one_line_and_leaves_nothing(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m5: it was a page of SQL, its parameters and a link to SQLAlchemy."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    monkeypatch.setenv("FLASHTUNE_DB", str(measured))
    said = call("export-optuna", tmp_path / "x.db", code=1).stderr.splitlines()[-1]
    assert said == f"Error: {os.strerror(errno.ENOSPC)}: {tmp_path / 'x.db'}"
    assert list(tmp_path.iterdir()) == []


def test_what_optuna_can_not_store_is_one_line_without_sql(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m5."""

    def small(*words: Any, **options: Any) -> sqlite3.Connection:
        made = connect(*words, **options)
        made.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 700)  # of a text: enough for tables and names, not for configs
        return made

    connect = sqlite3.connect
    with Store.open(measured, readonly=True) as store:
        wide = dataclasses.replace(store.measurements()[0], id=new_id(), status="failed", message="é" * 500)
    with Store.open(tmp_path / "tuned.db") as store:
        store.record(wide)
    monkeypatch.setattr(
        optuna_export.sqlite3,
        "connect",
        lambda *words, **options: (small if ":memory:" in words else connect)(*words, **options),
    )
    said = call("export-optuna", tmp_path / "x.db", "--db", tmp_path / "tuned.db", code=1).stderr.splitlines()[-1]
    assert said == f"Error: {tmp_path / 'tuned.db'} can't be exported: string or blob too big"
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("mask", [0o022, 0o002])
def test_it_is_for_others_as_the_umask_says(measured: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        export_studies(measured, tmp_path / "x.db")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.db").stat().st_mode) == 0o666 & ~mask


def test_links_in_the_folder_lead_nowhere(measured: Path, tmp_path: Path) -> None:
    """C3."""
    (tmp_path / "x.db").symlink_to(tmp_path / "mine")
    with pytest.raises(InvalidInput, match="never overwritten"):
        export_studies(measured, tmp_path / "x.db")
    assert not (tmp_path / "mine").exists()
