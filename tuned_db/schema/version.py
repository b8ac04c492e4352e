"""The version of the tables: what a database says it has, and where the scripts are that lead from one to the next."""

from __future__ import annotations

from pathlib import Path

SCHEMA_VERSION = 4
"""Counts the migrations. It is a file's ``user_version``, so a database from the future is known by its header."""
APPLICATION_ID = 0x464C5455
"""'FLTU' in the header of an SQLite file says that flashtune wrote it."""
MIGRATIONS = Path(__file__).parent / "migrations"
"""Alembic's scripts, and beside them ``vNNNN.sql``: what a new database of that version has."""
