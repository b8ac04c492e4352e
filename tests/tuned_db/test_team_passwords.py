"""However a team's address is mistyped: no command shows a part of its password, logs it, or sends it anywhere.

Addresses are put together with mistakes, and each goes through every command, against a real server where one of them
is well formed. Names are not looked up: what would be is kept.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from postgres_server import Cluster

from flashtune.cli.main import main
from flashtune.errors import InvalidInput
from flashtune.tuned_db.backends.postgres import connecting, watched
from flashtune.tuned_db.backends.postgres.address import read_address
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

MARK = "Xq7Zv"
"""In each part of the password."""
COMMANDS = (
    "db push", "db push --create", "db pull", "db team info", "db team log", "db team create", "db team upgrade",
    "db team gc --dry-run", "info", "db info",
)  # fmt: skip


@dataclass
class Sent:
    """What was to be looked up, and where connections were to go."""

    names: list[str] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)


@pytest.fixture
def sent() -> Iterator[Sent]:
    found = Sent()
    connect = watched.WatchedConnection.connect

    def look_up(host: object, *others: object, **named: object) -> NoReturn:
        found.names.append(str(host))
        raise socket.gaierror(-2, "Name or service not known")

    def connected(*others: object, **parameters: Any) -> Any:
        found.places += [parameters.get(name) for name in ("host", "hostaddr", "dbname", "port")]
        return connect(**parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up)
        patch.setattr(watched.WatchedConnection, "connect", connected)
        patch.setenv("PGCONNECT_TIMEOUT", "2")
        yield found


@pytest.fixture
def folder(tmp_path: Path, measurement: Make) -> Path:
    Store.open(tmp_path / "own.db").record(measurement())
    return tmp_path


def name_of(team_url: str) -> str:
    return team_url.rpartition("/")[2]


def told(address: str, sent: Sent, folder: Path, caplog: pytest.LogCaptureFixture, as_option: bool) -> str:
    """All that is said, logged or sent where the address of the team is ``address``."""
    sent.names.clear()
    sent.places.clear()
    caplog.clear()
    for logger in ("", "sqlalchemy"):  # which has a level of its own, and looks at it when an engine is made
        caplog.set_level(logging.DEBUG, logger)
    connecting.engine.cache_clear()
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHTUNE_DB", str(folder / "own.db"))
        if not as_option:
            patch.setenv("FLASHTUNE_TEAM_DB", address)
        for command in COMMANDS:
            takes_option = as_option and command not in ("info", "db info")
            result = CliRunner().invoke(main, [*command.split(), *(["--team", address] if takes_option else [])])
            assert isinstance(result.exception, SystemExit | None), repr(result.exception)
            assert "Traceback" not in result.output
            said.append(result.output)
    return "\n".join([*said, caplog.text, *sent.names, *map(str, sent.places)])


SEPARATORS = ("", ":", "@", "/", "//", "?", "&", ";", "#", ",", " ", "=", "%40", "%3A", "\\", "'", ":@", "\n")
SCHEMES = ("postgresql://", "postgres://", "postgresql:", "postgresql:/", "postgresql:///", "", "mysql://")
PASSWORDS = (
    "{}", "p@{}", "{}@{}", "p/{}", "p:{}", "p#{}", "p?{}", "p%{}", "p {}", "p;{}", "p&{}", "'{}'", "p\\{}", "p={}",
    "[{}]", "{}\N{EURO SIGN}",
)  # fmt: skip
LOGINS = ("tuner:{}@", "{}@", "tuner@{}@", ":{}@", "tuner@", "")
OPTIONS = (
    "", "?sslmode={}", "?connect_timeout={}", "?port={}", "?password={}", "?{}", "?{}=1", "&password={}",
    ";password={}", "?sslmode=disable&password={}&x={}", "?options=-c%20{}",
    "?options=-c%20statement_timeout={}", "?passfile=/{}", "?client_encoding={}", "?service={}",
    "?sslrootcert=/{}&sslmode=verify-full",
    "?target_session_attrs={}",
    "?application_name={}", "/{}", ":{}", " {}", "#{}", "?hostaddr={}", "?keepalives_idle={}", "?gssencmode={}",
)  # fmt: skip


@st.composite
def mistyped(draw: st.DrawFn, places: tuple[str, ...], team: str) -> str:
    """An address of one of ``places`` (host and port) with its password in any form, order and place."""
    password = draw(st.sampled_from(PASSWORDS)).replace("{}", MARK)
    place, database = draw(st.sampled_from(places)), draw(st.sampled_from([team, "none"]))
    login = draw(st.sampled_from(LOGINS)).replace("{}", password)
    options = draw(st.sampled_from(OPTIONS)).replace("{}", password)
    kind = draw(st.integers(0, 2))
    if kind == 0:  # as it should be, but for a mistake in what is typed around it
        text = f"{draw(st.sampled_from(SCHEMES))}{login}{place}/{database}{options}"
    elif kind == 1:  # with characters that were left out or typed twice
        text = f"postgresql://{login}{place}/{database}{options}"
        for _ in range(draw(st.integers(1, 2))):
            special = [at for at, char in enumerate(text) if not char.isalnum()]
            at = draw(st.sampled_from(special))
            text = text[:at] + draw(st.sampled_from(["", text[at] * 2, " ", "%"])) + text[at + 1 :]
    else:  # its parts in any order
        parts = draw(st.permutations(["tuner", password, place, database]))
        text = draw(st.sampled_from(SCHEMES)) + "".join(part + draw(st.sampled_from(SEPARATORS)) for part in parts)
    return text


def is_host_or_database(text: str) -> bool:
    """Whether ``text`` is a well-formed address of a host or database with the mark as its name: no mistake is left."""
    try:
        found = read_address(text)
    except InvalidInput:
        return False
    return MARK in found.host + found.database + dict(found.options).get("hostaddr", "")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), as_option=st.booleans())
def test_no_command_shows_a_password_however_the_address_is_mistyped(
    data: st.DataObject,
    as_option: bool,
    cluster: Cluster,
    team_url: str,
    sent: Sent,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """M7, M8"""
    places = (f"127.0.0.1:{cluster.port}", "127.0.0.1:1", "db.example", "[::1]:1")
    text = data.draw(mistyped(places, name_of(team_url)))
    assume(not is_host_or_database(text) and "\0" not in text)
    assert MARK.lower() not in told(text, sent, folder, caplog, as_option).lower()


LIKELY = (
    "postgresql://tuner:p@{}@{place}/{team}",
    "postgresql://tuner:{}@{place}/{team}&password={}",
    "postgresql://tuner@{place}/{team};password={}",
    "postgresql://tuner@{}@{place}/{team}",
    "postgresql://{}@{place}/{team}",
    "postgresql://{}@{place}/none",
    "postgresql://guarded:{}@{place}/{team}",
    "postgresql://tuner@{place}/{team}?port={}",
    "postgresql://tuner@{place}/{team}?port=5432{}",
    "postgresql://tuner@{place}/{team}?sslmode={}",
    "postgresql://tuner@{place}/{team}?connect_timeout={}",
    "postgresql://tuner@{place}/{team}?options=-c%20{}=1",
    "postgresql://tuner@{place}/{team}?options=--{}",
    "postgresql://tuner@{place}/{team}?client_encoding={}",
    "postgresql://tuner@{place}/{team}?{}=1",
    "postgresql://tuner@{place}/{team}?xq7zv=1",
    "postgresql://tuner:{}@{place}/none?sslrootcert=/{}&sslmode=verify-full",
    "postgresql://tuner:{}@db.example/{team}",
)


@pytest.mark.parametrize("form", LIKELY)
def test_likely_mistakes_show_nothing(
    form: str, cluster: Cluster, team_url: str, sent: Sent, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """M7: each of these showed it, or sent it to the name server or as the name of a database."""
    text = form.replace("{place}", f"127.0.0.1:{cluster.port}").replace("{team}", name_of(team_url)).replace("{}", MARK)
    assert MARK.lower() not in told(text, sent, folder, caplog, False).lower()


@pytest.mark.parametrize("query", ["port=abc", "port=5432x", "host=a,b&port=1,2,3", "host=a&host=b&port=1,2,3", "x=1"])
def test_an_odd_address_is_one_line(sent: Sent, folder: Path, query: str) -> None:
    """M8: SQLAlchemy refused some of these when the engine connected, and that was a traceback."""
    for command in (each for each in COMMANDS if each not in ("info", "db info")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLASHTUNE_DB", str(folder / "own.db"))
            result = CliRunner().invoke(main, [*command.split(), "--team", f"postgresql://me@host/team?{query}"])
        assert result.exit_code == 1
        assert re.fullmatch(
            r"Error: [^\n]*(address|can't be reached: [^\n]* 3 port numbers [^\n]* 2 hosts)[^\n]*\n", result.output
        )


def test_one_port_may_be_that_of_several_hosts(cluster: Cluster, team_url: str, sent: Sent) -> None:
    """M8: libpq takes it, and SQLAlchemy did not."""
    sent.places.clear()
    address = f"postgresql://tuner@/{name_of(team_url)}?host=127.0.0.1,127.0.0.2&port={cluster.port}"
    result = CliRunner().invoke(main, ["db", "team", "info", "--team", address])
    assert result.exit_code == 0, result.output
    assert sent.places == ["127.0.0.1,127.0.0.2", None, name_of(team_url), str(cluster.port)] * (len(sent.places) // 4)
