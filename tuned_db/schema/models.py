"""The tables. A measurement points at the problem, device model, environment and variant that it shares with others.

A change here needs a migration and the next `version.SCHEMA_VERSION`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import BigInteger, CheckConstraint, Double, ForeignKey, Index, MetaData, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Constraints get names, without which SQLite migrations can't address them."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double()}
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def _bounded(**longest: int) -> CheckConstraint:
    """On a server no text is longer than this many characters, whoever inserts it: each pull would have to carry it.

    No record that `limits.py` takes comes near. In a file it is the reader who sets limits, as whoever makes a file
    makes its constraints.
    """
    said = " AND ".join(f"length({name}) <= {most}" for name, most in longest.items())
    return CheckConstraint(said, name="bounded").ddl_if(dialect="postgresql")


class OriginRow(Base):
    """One row, the first and only: which database this is."""

    __tablename__ = "origin"
    __table_args__ = (CheckConstraint("id = 1", name="only"), _bounded(uuid=200, created=40))

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str]
    created: Mapped[str]


class ProblemRow(Base):
    """What is asked: core fields for queries, ``json`` (canonical) for everything."""

    __tablename__ = "problem"
    __table_args__ = (_bounded(key=1000, spec_key=1000, op=40, dtype=40, json=1000),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    spec_key: Mapped[str] = mapped_column(index=True)
    op: Mapped[str]
    dtype: Mapped[str]
    head_dim: Mapped[int]
    batch: Mapped[int]
    seqlen_q: Mapped[int]
    seqlen_k: Mapped[int]
    num_heads: Mapped[int]
    num_heads_kv: Mapped[int]
    causal: Mapped[bool]
    json: Mapped[str]


class DeviceRow(Base):
    """A device model, by its key."""

    __tablename__ = "device"
    __table_args__ = (_bounded(key=200, name=200, capability=200),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    capability: Mapped[str] = mapped_column(index=True)
    """The first part of the key, e.g. ``9.0a``."""


class EnvironmentRow(Base):
    """Where a measurement was made and by whom: the unit, the software, and the name that the author gave."""

    __tablename__ = "environment"
    __table_args__ = (
        UniqueConstraint("unit", "driver", "nvrtc", "cupy", "flashtune", "author"),
        _bounded(unit=200, driver=200, nvrtc=60, cupy=60, flashtune=60, author=200),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    unit: Mapped[str]
    driver: Mapped[str]
    nvrtc: Mapped[str]
    cupy: Mapped[str]
    flashtune: Mapped[str]
    author: Mapped[str] = mapped_column(server_default=text("''"))


class VariantRow(Base):
    """One piece of code: a config (canonical JSON) of a family, and the digest of its source."""

    __tablename__ = "variant"
    __table_args__ = (
        UniqueConstraint("family", "config", "source_digest"),
        _bounded(family=40, config=2000, source_digest=64),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    family: Mapped[str]
    config: Mapped[str]
    source_digest: Mapped[str]


class MeasurementRow(Base):
    """An immutable fact; see `records.Measurement` for the fields."""

    __tablename__ = "measurement"
    __table_args__ = (
        CheckConstraint("status <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)", name="ok_has_time"),
        # What a look-up asks: rows of a problem by outcome, then by device and stage.
        Index(None, "problem_id", "status", "device_id", "stage"),
        _bounded(id=36, created=24, session=200, status=40, stage=40, message=2000, throttle=200),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    created: Mapped[str]
    session: Mapped[str] = mapped_column(index=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"), index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    variant_id: Mapped[int] = mapped_column(ForeignKey("variant.id"))
    status: Mapped[str]
    stage: Mapped[str]
    median_us: Mapped[float | None]
    q20_us: Mapped[float | None]
    q80_us: Mapped[float | None]
    samples: Mapped[int] = mapped_column(server_default=text("0"))
    baseline_us: Mapped[float | None]
    max_error: Mapped[float | None]
    rms_error: Mapped[float | None]
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    shared_bytes: Mapped[int | None]
    clock_mhz: Mapped[float | None]
    seed: Mapped[int | None] = mapped_column(BigInteger)
    message: Mapped[str] = mapped_column(server_default=text("''"))
    paired_ratio: Mapped[float | None]
    ratio_low: Mapped[float | None]
    ratio_high: Mapped[float | None]
    rounds: Mapped[int | None]
    power_w: Mapped[float | None]
    temperature_c: Mapped[float | None]
    throttle: Mapped[str | None]
    contended: Mapped[bool | None]
    arrival: Mapped[int | None]
    """Number of the arrival that brought it here; None for what was measured into this database. It is no part of the
    measurement, and stays here."""


class TombstoneRow(Base):
    """A measurement that was removed here on purpose (`removal.py`): a merge does not bring it back."""

    __tablename__ = "tombstone"
    __table_args__ = (_bounded(id=36, removed=40), {"sqlite_with_rowid": False})  # the id is stored once, not twice

    id: Mapped[str] = mapped_column(primary_key=True)
    removed: Mapped[str]


class ArrivalRow(Base):
    """What one import, merge, pull or push added; see `arrivals.Arrival`. It stays in this database."""

    __tablename__ = "arrival"
    __table_args__ = (_bounded(id=36, created=40, kind=40, source=200, digest=64, signer=200, author=200),)

    id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(unique=True)
    """Counts them here: what people call it by, and measurements."""
    created: Mapped[str]
    kind: Mapped[str]
    source: Mapped[str]
    digest: Mapped[str]
    signer: Mapped[str]
    author: Mapped[str]
    new: Mapped[int]


class PredictionRow(Base):
    """The last prediction of a variant for a problem and device model: replaced by the next, never exported."""

    __tablename__ = "prediction"
    __table_args__ = (
        UniqueConstraint("problem_id", "device_id", "variant_id"),
        _bounded(created=40, nvrtc=60, flashtune=60),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    created: Mapped[str]
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    variant_id: Mapped[int] = mapped_column(ForeignKey("variant.id"))
    predicted_us: Mapped[float]
    rank: Mapped[int]
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    shared_bytes: Mapped[int | None]
    nvrtc: Mapped[str]
    flashtune: Mapped[str]
