"""Connections to a team's PostgreSQL server: how they are made, take turns, and give up."""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from flashtune.errors import InvalidInput, MissingDependency

from .address import Address

STATEMENT_SECONDS = 120.0
"""For one statement; the server ends what takes longer."""
SILENCE_SECONDS = 150.0
"""For the server to say anything at all. More than a statement has: this is for a server that is frozen."""
IDLE_SECONDS = 300.0
"""For a transaction to go on after a statement; the server ends it then, with its locks. A laptop may be closed."""

_PATIENCE = {"connect_timeout": "10", "keepalives_idle": "30", "tcp_user_timeout": "30000", "client_encoding": "utf8"}
"""What libpq is told where the address doesn't say: a machine that went away is noticed after half a minute."""
_LOCK = int.from_bytes(b"flashtun", "big", signed=True)
"""Key of the advisory lock that writers of one database take in turn."""


def driver() -> ModuleType:
    """The module psycopg. Raises `MissingDependency` where it or libpq is not there."""
    try:
        return importlib.import_module("psycopg")
    except ImportError as error:
        raise MissingDependency(
            'a team database needs psycopg with libpq, which is not installed: pip install "flashtune[postgres]"'
        ) from error


@functools.lru_cache(maxsize=16)
def engine(address: Address, *, writing: bool, timeout: float) -> Engine:
    """Kept, since it keeps compiled statements; it holds no connection between uses, so it survives fork.

    Whatever keeps it from connecting is an `OperationalError` of psycopg that can be logged, as SQLAlchemy does.
    """
    psycopg = driver()
    _check_options(address, psycopg)
    from .watched import WatchedConnection

    parameters: dict[str, Any] = address.parameters(**_PATIENCE)

    def connect() -> WatchedConnection:
        try:
            return WatchedConnection.connect(**parameters)
        except Exception as error:  # of the driver, of the name server, of an odd value
            raise psycopg.OperationalError(address.cleaned(str(error))) from None

    made = create_engine(
        "postgresql+psycopg://",
        creator=connect,
        poolclass=NullPool,
        # A writer is to see what the one before it has committed; a reader all of one moment.
        isolation_level="READ COMMITTED" if writing else "REPEATABLE READ",
        hide_parameters=True,
    )

    @event.listens_for(made, "begin")
    def begin(connection: Connection) -> None:
        if writing:
            take_turn(connection, timeout)
        else:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        _limit(connection, STATEMENT_SECONDS, SILENCE_SECONDS)

    return made


def take_turn(connection: Connection, timeout: float) -> None:
    """Waits until no other writer is in a transaction, at most ``timeout`` seconds; until the end of this one."""
    _limit(connection, 0, timeout + SILENCE_SECONDS)
    _set(connection, lock_timeout=max(timeout, 1e-3))
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")


def unlimited(connection: Connection) -> None:
    """Lets each statement of the transaction take as long as it may, as a change of large tables does."""
    _limit(connection, 0, math.inf)


def _limit(connection: Connection, statement: float, silence: float) -> None:
    """Seconds for a statement, 0 for any number, and for the server to say nothing."""
    _watched(connection).patience = silence
    _set(connection, statement_timeout=statement, idle_in_transaction_session_timeout=IDLE_SECONDS)


def _watched(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _set(connection: Connection, **seconds: float) -> None:
    """Until the end of the transaction."""
    each = (f"pg_catalog.set_config('{name}', '{math.ceil(1000 * value)}', true)" for name, value in seconds.items())
    connection.exec_driver_sql(f"SELECT {', '.join(each)}")


def _check_options(address: Address, psycopg: ModuleType) -> None:
    """Raises `InvalidInput` for an option that libpq doesn't know. It would quote the name, which may be a password."""
    known = sorted(each.keyword.decode() for each in psycopg.pq.Conninfo.get_defaults())
    for number, (name, _) in enumerate(address.options, start=1):
        if name not in known:
            raise InvalidInput(
                f"option {number} behind the ? of the team database's address is none that libpq knows. It knows "
                f"{', '.join(known)}"
            )
