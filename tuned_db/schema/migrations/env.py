"""Run by Alembic: applies migrations on the connection that `migrate.py` passes, inside its transaction.

The same ones for SQLite and PostgreSQL: both undo a migration that fails.
"""

from __future__ import annotations

from alembic import context

from flashtune.tuned_db.schema.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=context.config.attributes["version_table"],
    render_as_batch=True,  # SQLite can't alter a table: Alembic copies it
)
with context.begin_transaction():
    context.run_migrations()
