"""Who measured, what came from elsewhere, and what was removed; the author of rows that are there is not known."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_BEFORE = ["unit", "driver", "nvrtc", "cupy", "flashtune"]


def upgrade() -> None:
    op.create_table(
        "tombstone",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("removed", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tombstone"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "arrival",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("signer", sa.String(), nullable=False),
        sa.Column("author", sa.String(), nullable=False),
        sa.Column("new", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_arrival"),
    )
    with op.batch_alter_table("environment") as table:  # few rows: one for each card and version
        table.add_column(sa.Column("author", sa.String(), server_default=sa.text("''"), nullable=False))
        table.drop_constraint("uq_environment_" + "_".join(_BEFORE), type_="unique")
        names = [*_BEFORE, "author"]
        table.create_unique_constraint("uq_environment_" + "_".join(names), names)


def downgrade() -> None:
    """Fails where two environments differ in their author alone: that can't be said with the columns of before."""
    with op.batch_alter_table("environment") as table:
        table.drop_constraint("uq_environment_" + "_".join([*_BEFORE, "author"]), type_="unique")
        table.drop_column("author")
        table.create_unique_constraint("uq_environment_" + "_".join(_BEFORE), _BEFORE)
    op.drop_table("arrival")
    op.drop_table("tombstone")
