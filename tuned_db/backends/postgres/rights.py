"""What a role of PostgreSQL may do in a team's database, as GRANTs: what its commands need, and nothing else.

Whoever may push adds rows, to the tables that a push fills. Ids that the server counts are not theirs to give, so that
nobody takes those that come next; nor are the tables that say which database this is and which schema it has, and what
was removed.
"""

from __future__ import annotations

from flashtune.errors import InvalidInput
from flashtune.tuned_db.schema.models import (
    ArrivalRow,
    Base,
    DeviceRow,
    EnvironmentRow,
    MeasurementRow,
    ProblemRow,
    TombstoneRow,
    VariantRow,
)
from flashtune.values import shown

from .address import NAME_BYTES
from .server import VERSION_TABLE

MAY = ("pull", "push", "gc")
"""What a role may be for; each includes the ones before it. To pull is to read everything, and who may collect may
forget."""

_PUSHED: tuple[type[Base], ...] = (ProblemRow, DeviceRow, EnvironmentRow, VariantRow, ArrivalRow, MeasurementRow)
_TABLES = (*sorted(Base.metadata.tables), VERSION_TABLE)
_COUNTED = tuple(name for name, table in sorted(Base.metadata.tables.items()) if table.autoincrement_column is not None)
"""Tables whose ids the server counts."""


def grants(role: str, may: str = "push") -> str:
    """Statements for psql that give ``role`` the rights to ``may``, and take all others in our tables.

    Whoever owns the tables runs them, and again after an upgrade, which may make tables. Raises `InvalidInput`.
    """
    if may not in MAY:
        raise InvalidInput(f"may={shown(may)} must be one of {', '.join(MAY)}")
    to = _quoted(role)
    lines = [
        "-- Before PostgreSQL 15 everybody may make functions that others' statements then call.",
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC;",
        f"REVOKE ALL ON {', '.join(_TABLES)} FROM {to};",
        f"REVOKE ALL ON SEQUENCE {', '.join(map(_sequence, _COUNTED))} FROM {to};",
        f"GRANT SELECT ON {', '.join(_TABLES)} TO {to};",
    ]
    if may != "pull":
        lines += [_insert(each, to) for each in _PUSHED]
        used = [_sequence(each.__tablename__) for each in _PUSHED if each.__tablename__ in _COUNTED]
        lines.append(f"GRANT USAGE ON SEQUENCE {', '.join(used)} TO {to};")
    if may == "gc":
        gone = ", ".join(each.__tablename__ for each in (MeasurementRow, DeviceRow))
        lines += [f"GRANT DELETE ON {gone} TO {to};", _insert(TombstoneRow, to)]
    return "\n".join(["BEGIN;", *lines, "COMMIT;", ""])


def _insert(model: type[Base], to: str) -> str:
    table = model.__table__
    given = [each.name for each in table.columns if each is not getattr(table, "autoincrement_column", None)]
    return f"GRANT INSERT ({', '.join(given)}) ON {model.__tablename__} TO {to};"


def _sequence(table: str) -> str:
    return f"{table}_id_seq"


def _quoted(role: str) -> str:
    """``role`` as an identifier; PostgreSQL would cut a longer one."""
    if not role or not role.isprintable() or len(role.encode(errors="replace")) > NAME_BYTES:
        raise InvalidInput(f"role={shown(role)} must be 1 to {NAME_BYTES} bytes of printable text")
    doubled = role.replace('"', '""')
    return f'"{doubled}"'
