from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashtune import settings
from flashtune.cli.main import main
from flashtune.errors import InvalidInput
from flashtune.tuned_db.store.store import Store

VARIABLES = (
    "FLASHTUNE_DB",
    "FLASHTUNE_AUTHOR",
    "FLASHTUNE_CACHE_DIR",
    "FLASHTUNE_CAPTURE",
    "XDG_DATA_HOME",
    "XDG_CACHE_HOME",
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="XDG_* variables are a Linux convention")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("command", [["info"], ["list"], ["tune", "--captured"]], ids=str)
def test_a_database_that_is_the_root_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """It is a path without a name, beside which nothing can be."""
    monkeypatch.setenv("FLASHTUNE_DB", "/")
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 1
    assert "FLASHTUNE_DB=/ must be the path of a file" in ended.output


@linux
def test_home_is_the_last_resort(tmp_path: Path) -> None:
    assert settings.database_path() == tmp_path / "home/.local/share/flashtune/tuned.db"
    assert settings.cache_dir() == tmp_path / "home/.cache/flashtune"


@linux
def test_xdg_beats_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert settings.database_path() == tmp_path / "data/flashtune/tuned.db"
    assert settings.cache_dir() == tmp_path / "cache/flashtune"


@linux
def test_a_setting_beats_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "my.db"))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "mine"))
    assert settings.database_path() == tmp_path / "my.db"
    assert settings.cache_dir() == tmp_path / "mine"


@linux
@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_means_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: str) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, empty)
    assert settings.database_path() == tmp_path / "home/.local/share/flashtune/tuned.db"
    assert settings.cache_dir() == tmp_path / "home/.cache/flashtune"


def test_relative_paths_count_from_where_the_process_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = Path.cwd()
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", "my cache")
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    monkeypatch.chdir(tmp_path)
    assert settings.cache_dir() == started / "my cache"
    assert settings.database_path().is_absolute()


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", "~/team/tuned.db")
    assert settings.database_path() == tmp_path / "home/team/tuned.db"


def test_a_tilde_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", "~no-such-user-here/tuned.db")
    with pytest.raises(InvalidInput, match="FLASHTUNE_DB='~no-such-user-here"):
        settings.database_path()


@linux
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with an arbitrary user id. A directory called ~ must not appear either."""
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(InvalidInput, match="no home directory: set HOME, XDG_DATA_HOME or FLASHTUNE_DB"):
        settings.database_path()
    with pytest.raises(InvalidInput, match="no home directory: set HOME, XDG_CACHE_HOME or FLASHTUNE_CACHE_DIR"):
        settings.cache_dir()


@linux
def test_a_tilde_that_platformdirs_leaves_is_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/flashtune"))
    with pytest.raises(InvalidInput, match="no home directory"):
        settings.cache_dir()


@pytest.mark.parametrize(("given", "on"), [("1", True), ("On", True), ("0", False), ("off", False), ("  ", False)])
def test_capture_is_on_or_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, on: bool) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "team.db"))
    monkeypatch.setenv("FLASHTUNE_CAPTURE", given)
    assert settings.capture_path() == (tmp_path / "team.captured.jsonl" if on else None)


def test_capture_takes_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHTUNE_CAPTURE", str(tmp_path / "here.jsonl"))
    assert settings.capture_path() == tmp_path / "here.jsonl"


def test_an_author_is_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.author() == ""
    monkeypatch.setenv("FLASHTUNE_AUTHOR", "  Ada Ä. \t")
    assert settings.author() == "Ada Ä."
    for bad in ("x" * 101, "a\nb", "a\x1b[2J"):
        monkeypatch.setenv("FLASHTUNE_AUTHOR", bad)
        with pytest.raises(InvalidInput, match="at most 100 printable characters"):
            settings.author()


def test_an_address_is_refused_without_showing_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", "postgresql://me:secret@host/db")
    with pytest.raises(InvalidInput, match="postgresql://") as caught:
        settings.database_path()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [
        ("FLASHTUNE_TEAM_DB", "postgresql://me:secret@host/db", "postgresql://..."),
        ("FLASHTUNE_DB", "postgresql://me:secret@host/db", "not shown: it looks like an address"),
        ("FLASHTUNE_TEAM_DB", "me:secret@host/db", "not an address"),
        ("FLASHTUNE_TEAM_DB", "me:secret@://host/db", "not an address"),
        ("FLASHTUNE_TEAM_DB", "", ""),
        ("FLASHTUNE_DB", "team.db", "team.db"),
    ],
)
def test_what_may_hold_a_password_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str, shown: str
) -> None:
    monkeypatch.setenv(name, given)
    assert settings.presentable(name) == shown


SECRET = "Xq7Zv"
MISTAKEN = [
    f"host=h user=tuner password={SECRET}",
    f"dbname=team host={SECRET}",
    f"user={SECRET}",
    f"postgresql:tuner:{SECRET}@host/team",
    f"postgresql:/tuner:{SECRET}@host/team",
    f"postgresql+psycopg:{SECRET}@host",
    f"jdbc:postgresql:{SECRET}",
    f"'postgresql:{SECRET}'",
    f"//{SECRET}@host/team",
    f"//tuner:{SECRET}@host/team",
    f"tuner:{SECRET}@host/team",
    f"tuner:a/{SECRET}@host/team",
    f"tuner@{SECRET}@host/team",
    f"{SECRET}://tuner@host/team",
    f"PGPASSWORD={SECRET} psql",
    f"/data/team&password={SECRET}",
    f"password: {SECRET}",
]
"""Addresses of a server with a password, typed in ways that no server takes."""
TAKE_A_FILE = (
    "db info --db", "list --db", "db merge", "db import", "db export", "db backup", "db restore", "db diff x.db",
    "db digest --problems", "tune --problems", "tune --gpu h100 --ray", "db import x.jsonl --trusted",
)  # fmt: skip
HARMLESS = [
    "/home/me@corp/x/tuned.db",
    "/home/me/run:1@host/t.db",
    "~/run:1@host/t.db",
    "me@host/tuned.db",
    "runs/3/tuned.db",
    "2026-11-30T12:00/t.db",
    "run=3/t.db",
    "C:\\x@y\\t.db",
    "Ada <ada@example.org>",
]


@pytest.mark.parametrize("given", MISTAKEN)
def test_an_address_in_any_variable_is_neither_shown_nor_taken(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """m9: only what holds ``://`` was known for an address."""
    for name, read in (
        ("FLASHTUNE_DB", settings.database_path),
        ("FLASHTUNE_CACHE_DIR", settings.cache_dir),
        ("FLASHTUNE_CAPTURE", settings.capture_path),
        ("FLASHTUNE_AUTHOR", settings.author),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, given)
            assert SECRET not in settings.presentable(name)
            with pytest.raises(InvalidInput, match=f"^{name} must be") as caught:
                read()
            assert SECRET not in str(caught.value)
            shown = CliRunner().invoke(main, ["info"])
            assert SECRET not in shown.output + repr(shown.exception)
    monkeypatch.setenv("FLASHTUNE_TEAM_DB", given)
    assert settings.presentable("FLASHTUNE_TEAM_DB") == "not an address"


@pytest.mark.parametrize("given", MISTAKEN)
def test_an_address_in_place_of_a_database_is_not_shown(tmp_path: Path, given: str) -> None:
    """m9: nor does any command that takes a file."""
    with pytest.raises(InvalidInput, match="not an address") as caught:
        Store.open(given)
    assert SECRET not in str(caught.value)
    for command in TAKE_A_FILE:
        shown = CliRunner().invoke(main, [*command.split(), given])
        assert shown.exit_code == (1 if command.endswith("--ray") else 2), shown.output
        assert SECRET not in shown.output


@pytest.mark.parametrize("given", HARMLESS)
def test_what_is_no_address_is_taken_and_shown(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", given)
    monkeypatch.setenv("FLASHTUNE_AUTHOR", given)
    assert settings.presentable("FLASHTUNE_DB") == settings.author() == given
    assert settings.database_path().name == Path(given).name


def test_a_team_database_is_named_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_TEAM_DB", " postgresql://me@host/tuned ")
    assert settings.team_database() == "postgresql://me@host/tuned"
    for empty in ("", " "):
        monkeypatch.setenv("FLASHTUNE_TEAM_DB", empty)
        with pytest.raises(InvalidInput, match="set FLASHTUNE_TEAM_DB"):
            settings.team_database()


def test_the_table_names_every_variable_that_is_read() -> None:
    """A variable read anywhere but through the table would be one that nobody can find."""
    source = Path(settings.__file__).read_text(encoding="utf-8")
    for each in settings.SETTINGS:
        assert each.name.startswith("FLASHTUNE_")
        read = "_path_setting" if "path" in each.type else "environ.get"
        assert f'{read}("{each.name}"' in source
        assert each.meaning
        assert each.default
    assert source.count('_path_setting("') == sum("path" in each.type for each in settings.SETTINGS)


def test_import_creates_nothing_and_works_where_the_directory_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, sys; os.rmdir(os.getcwd())\n"
        "from flashtune import settings\n"
        "from flashtune.errors import InvalidInput\n"
        "settings.database_path(); settings.cache_dir()\n"
        "os.environ['FLASHTUNE_DB'] = 'relative.db'\n"
        "try:\n    settings.database_path()\n"
        "except InvalidInput as error:\n    print(error)\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    source = Path(settings.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=gone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "relative.db" in done.stdout
    assert list(home.iterdir()) == []
