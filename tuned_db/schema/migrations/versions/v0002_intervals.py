"""What a final decides by, and what the card did meanwhile; all of it unknown in rows that are there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def _columns() -> list[sa.Column[object]]:
    return [
        sa.Column("paired_ratio", sa.Double(), nullable=True),
        sa.Column("ratio_low", sa.Double(), nullable=True),
        sa.Column("ratio_high", sa.Double(), nullable=True),
        sa.Column("rounds", sa.Integer(), nullable=True),
        sa.Column("power_w", sa.Double(), nullable=True),
        sa.Column("temperature_c", sa.Double(), nullable=True),
        sa.Column("throttle", sa.String(), nullable=True),
        sa.Column("contended", sa.Boolean(), nullable=True),
    ]


def upgrade() -> None:
    for column in _columns():  # nullable and without a default, so that SQLite touches no row
        op.add_column("measurement", column)


def downgrade() -> None:
    with op.batch_alter_table("measurement") as table:
        for column in _columns():
            table.drop_column(column.name)
