"""Migrations of an open database with Alembic, inside the transaction of whoever asks."""

from __future__ import annotations

import threading

from sqlalchemy import Connection

from .version import MIGRATIONS

_one_at_a_time = threading.Lock()
"""Alembic keeps its context in a global."""


def migrate(connection: Connection, target: str, *, down: bool = False, version_table: str = "alembic_version") -> None:
    """Alembic's ``upgrade`` (or ``downgrade``) to ``target`` on an open connection and inside its transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes.update(connection=connection, version_table=version_table)
    with _one_at_a_time:
        (command.downgrade if down else command.upgrade)(config, target)
