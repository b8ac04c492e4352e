"""Measurements and predictions, with what they share in tables of its own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "origin",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uuid", sa.String(), nullable=False),
        sa.Column("created", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_origin"),
    )
    op.create_table(
        "problem",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("spec_key", sa.String(), nullable=False),
        sa.Column("op", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("seqlen_q", sa.Integer(), nullable=False),
        sa.Column("seqlen_k", sa.Integer(), nullable=False),
        sa.Column("num_heads", sa.Integer(), nullable=False),
        sa.Column("num_heads_kv", sa.Integer(), nullable=False),
        sa.Column("causal", sa.Boolean(), nullable=False),
        sa.Column("json", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_problem"),
        sa.UniqueConstraint("key", name="uq_problem_key"),
    )
    op.create_index("ix_problem_spec_key", "problem", ["spec_key"])
    op.create_table(
        "device",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("capability", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_device"),
        sa.UniqueConstraint("key", name="uq_device_key"),
    )
    op.create_index("ix_device_capability", "device", ["capability"])
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("nvrtc", sa.String(), nullable=False),
        sa.Column("cupy", sa.String(), nullable=False),
        sa.Column("flashtune", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environment"),
        sa.UniqueConstraint(
            "unit", "driver", "nvrtc", "cupy", "flashtune", name="uq_environment_unit_driver_nvrtc_cupy_flashtune"
        ),
    )
    op.create_table(
        "variant",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("config", sa.String(), nullable=False),
        sa.Column("source_digest", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_variant"),
        sa.UniqueConstraint("family", "config", "source_digest", name="uq_variant_family_config_source_digest"),
    )
    op.create_table(
        "measurement",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created", sa.String(), nullable=False),
        sa.Column("session", sa.String(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("variant_id", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("stage", sa.String(), nullable=False),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("q20_us", sa.Double(), nullable=True),
        sa.Column("q80_us", sa.Double(), nullable=True),
        sa.Column("samples", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("baseline_us", sa.Double(), nullable=True),
        sa.Column("max_error", sa.Double(), nullable=True),
        sa.Column("rms_error", sa.Double(), nullable=True),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.Column("shared_bytes", sa.Integer(), nullable=True),
        sa.Column("clock_mhz", sa.Double(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("message", sa.String(), server_default=sa.text("''"), nullable=False),
        sa.CheckConstraint(
            "status <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)", name=op.f("ck_measurement_ok_has_time")
        ),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_measurement_problem_id"),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name="fk_measurement_device_id"),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name="fk_measurement_environment_id"),
        sa.ForeignKeyConstraint(["variant_id"], ["variant.id"], name="fk_measurement_variant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_measurement"),
    )
    op.create_index(
        "ix_measurement_problem_id_status_device_id_stage",
        "measurement",
        ["problem_id", "status", "device_id", "stage"],
    )
    op.create_index("ix_measurement_session", "measurement", ["session"])
    op.create_index("ix_measurement_device_id", "measurement", ["device_id"])
    op.create_table(
        "prediction",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("created", sa.String(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Integer(), nullable=False),
        sa.Column("variant_id", sa.Integer(), nullable=False),
        sa.Column("predicted_us", sa.Double(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spill_bytes", sa.Integer(), nullable=True),
        sa.Column("shared_bytes", sa.Integer(), nullable=True),
        sa.Column("nvrtc", sa.String(), nullable=False),
        sa.Column("flashtune", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_prediction_problem_id"),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name="fk_prediction_device_id"),
        sa.ForeignKeyConstraint(["variant_id"], ["variant.id"], name="fk_prediction_variant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_prediction"),
        sa.UniqueConstraint(
            "problem_id", "device_id", "variant_id", name="uq_prediction_problem_id_device_id_variant_id"
        ),
    )


def downgrade() -> None:
    for table in ("prediction", "measurement", "variant", "environment", "device", "problem", "origin"):
        op.drop_table(table)
