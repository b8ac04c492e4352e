"""The tables of a team's PostgreSQL database: made where they are asked for, upgraded, counted."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, distinct, func, insert, select, text

from flashtune.errors import DatabaseForeign, StoreError
from flashtune.tuned_db.backends.postgres.address import read_address
from flashtune.tuned_db.backends.postgres.connecting import unlimited
from flashtune.tuned_db.backends.postgres.server import VERSION_TABLE, Server
from flashtune.tuned_db.records.measurement import new_id, now
from flashtune.tuned_db.schema.migrate import migrate
from flashtune.tuned_db.schema.models import DeviceRow, EnvironmentRow, MeasurementRow, OriginRow, PredictionRow
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.store import LOCK_TIMEOUT, Store


def create_team(url: str, *, timeout: float = LOCK_TIMEOUT) -> bool:
    """Makes the tables in an empty PostgreSQL database, all or none; False where flashtune's are there already.

    Raises `DatabaseForeign` where another program's are, and the `StoreError` of `Store.on_server`.
    """
    server = Server(read_address(url), readonly=False, timeout=timeout)
    with server.writing() as connection:
        if server.revision(connection):
            return False
        if server.holds_tables(connection):
            raise DatabaseForeign(
                f"{server} holds tables of another program: nothing was made. Create one of its own: createdb tuned"
            )
        encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
        if encoding != "UTF8":
            raise StoreError(f"{server} has encoding {encoding}, and names of GPUs need UTF8: createdb -E UTF8 tuned")
        _migrate(connection)
        connection.execute(insert(OriginRow).values(id=1, uuid=new_id(), created=now()))
    return True


def upgrade_team(url: str, *, timeout: float = LOCK_TIMEOUT) -> tuple[int, int]:
    """Brings the tables to the current schema, wholly or not at all; the versions before and after.

    Older versions of flashtune refuse the database from then on. Raises as `Store.on_server` does.
    """
    server = Server(read_address(url), readonly=False, timeout=timeout)
    with server.writing() as connection:
        before = server.schema(connection)
        if before < SCHEMA_VERSION:
            _migrate(connection)
    return before, SCHEMA_VERSION


def _migrate(connection: Connection) -> None:
    unlimited(connection)
    migrate(connection, "head", version_table=VERSION_TABLE)


@dataclass(frozen=True, slots=True)
class Share:
    """What a team's database holds of one GPU model. Names and dates are as they are stored, not checked."""

    gpu_name: str
    measurements: int
    problems: int
    cards: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a team's database holds."""

    address: str
    """Without a password."""
    origin: str
    server: str
    """Version of PostgreSQL."""
    schema: int
    bytes: int
    """Of the whole database on the server's disk."""
    sessions: int
    measurements: int
    predictions: int
    shares: tuple[Share, ...]


def team_summary(url: str) -> Summary:
    """Counts what is there, on the server. Raises as `Store.on_server` does."""
    server = Server(read_address(url), readonly=True, timeout=LOCK_TIMEOUT)
    store = Store(server)
    counts = (
        select(
            func.substr(DeviceRow.name, 1, 1000),  # one that was there before the server had limits has any length
            func.count(),
            func.count(distinct(MeasurementRow.problem_id)),
            func.count(distinct(EnvironmentRow.unit)),
            func.substr(func.min(MeasurementRow.created), 1, 100),
            func.substr(func.max(MeasurementRow.created), 1, 100),
        )
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .join(EnvironmentRow, EnvironmentRow.id == MeasurementRow.environment_id)
        .group_by(DeviceRow.id)
        .order_by(DeviceRow.key)
    )
    with server.reading() as connection:
        shares = tuple(Share(*row) for row in connection.execute(counts))
        return Summary(
            address=str(server.address),
            origin=store.origin,
            server=str(connection.execute(text("SHOW server_version")).scalar_one()),
            schema=server.schema(connection),
            bytes=int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()),
            sessions=connection.execute(select(func.count(distinct(MeasurementRow.session)))).scalar_one(),
            measurements=sum(each.measurements for each in shares),
            predictions=connection.execute(select(func.count()).select_from(PredictionRow)).scalar_one(),
            shares=shares,
        )
