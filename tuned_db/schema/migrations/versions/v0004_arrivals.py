"""Which arrival brought a measurement, one origin, and bounds for what a server takes from anyone who may insert.

Which arrival brought the rows that are there is not known.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_LONGEST = {
    "origin": {"uuid": 200, "created": 40},
    "problem": {"key": 1000, "spec_key": 1000, "op": 40, "dtype": 40, "json": 1000},
    "device": {"key": 200, "name": 200, "capability": 200},
    "environment": {"unit": 200, "driver": 200, "nvrtc": 60, "cupy": 60, "flashtune": 60, "author": 200},
    "variant": {"family": 40, "config": 2000, "source_digest": 64},
    "measurement": {
        "id": 36,
        "created": 24,
        "session": 200,
        "status": 40,
        "stage": 40,
        "message": 2000,
        "throttle": 200,
    },
    "tombstone": {"id": 36, "removed": 40},
    "arrival": {"id": 36, "created": 40, "kind": 40, "source": 200, "digest": 64, "signer": 200, "author": 200},
    "prediction": {"created": 40, "nvrtc": 60, "flashtune": 60},
}
"""Characters, by table and column."""


def upgrade() -> None:
    op.add_column("measurement", sa.Column("arrival", sa.Integer(), nullable=True))
    op.add_column("arrival", sa.Column("number", sa.Integer(), nullable=True))
    op.execute(
        "UPDATE arrival SET number = counted.number FROM "
        "(SELECT id, row_number() OVER (ORDER BY created, id) AS number FROM arrival) AS counted "
        "WHERE counted.id = arrival.id"
    )
    with op.batch_alter_table("arrival") as table:
        table.alter_column("number", existing_type=sa.Integer(), nullable=False)
        table.create_unique_constraint("uq_arrival_number", ["number"])
    with op.batch_alter_table("origin") as table:
        table.create_check_constraint(op.f("ck_origin_only"), "id = 1")
    if op.get_bind().dialect.name == "postgresql":
        for table_name, longest in _LONGEST.items():
            _bound(table_name, " AND ".join(f"length({name}) <= {most}" for name, most in longest.items()))


def _bound(table_name: str, said: str) -> None:
    """For what is inserted from now on. A row that is there and too long, which anyone may have pushed, must not keep
    the team from its upgrade; where there is none, the constraint holds for all rows."""
    name = f"ck_{table_name}_bounded"
    op.execute(f"ALTER TABLE {table_name} ADD CONSTRAINT {name} CHECK ({said}) NOT VALID")
    if not op.get_bind().exec_driver_sql(f"SELECT EXISTS (SELECT FROM {table_name} WHERE NOT ({said}))").scalar_one():
        op.execute(f"ALTER TABLE {table_name} VALIDATE CONSTRAINT {name}")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table_name in _LONGEST:
            op.drop_constraint(op.f(f"ck_{table_name}_bounded"), table_name, type_="check")
    with op.batch_alter_table("origin") as table:
        table.drop_constraint(op.f("ck_origin_only"), type_="check")
    with op.batch_alter_table("arrival") as table:
        table.drop_constraint("uq_arrival_number", type_="unique")
        table.drop_column("number")
    op.drop_column("measurement", "arrival")
