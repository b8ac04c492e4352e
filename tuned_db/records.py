"""What is stored and what a look-up answers: `Measurement`, `Prediction`, `Choice`. No SQL here.

A measurement is an immutable fact: one config tried once on one unit, whatever came of it. Winners are never stored;
`winners.py` derives them, and `gate.py` decides what may enter.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from flashtune.codegen import value
from flashtune.codegen.config import Config
from flashtune.codegen.problem import Problem

STATUSES: dict[str, str] = {
    "ok": "correct and timed",
    "wrong": "output outside the tolerance; never a winner",
    "compile_error": "NVRTC refused the source",
    "spills": "compiled, but spills registers or takes more than its block may; not timed",
    "illegal_access": "an illegal memory access or another error that cost the worker; never a winner",
    "timeout": "stopped at its time limit, compiling or running",
    "out_of_memory": "the device lacked memory for it",
    "failed": "any other failure, a time that is no time among them",
    "skipped": "not tried; the message says why",
}
STAGES = ("screen", "measure", "final")
"""From rough to trusted. Finals run interleaved with the default config."""

REJECTING = ("wrong", "illegal_access")
"""Statuses that bar a variant for its whole spec, whatever else was measured."""

Level = Literal["explicit", "exact", "older_source", "neighbour", "borrowed", "predicted", "default"]
Variant = tuple[str, str, str]
"""Family, config key, source digest: one piece of code."""


def new_id() -> str:
    """A UUIDv7: sorts by time (to a quarter of a microsecond), unique without asking anyone."""
    now = time.time_ns()
    milliseconds, rest = divmod(now, 1_000_000)
    fraction = rest * 4096 // 1_000_000
    number = (milliseconds & (1 << 48) - 1) << 80 | 7 << 76 | fraction << 64 | 2 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=number))


def now() -> str:
    """The present in UTC, as ``created`` holds it: ``2026-11-29T17:40:12.123Z``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One config, tried once. Times in microseconds; None where it did not get that far."""

    id: str
    created: str
    session: str
    """Id of the tuning session; times compare within one session."""
    problem: Problem
    gpu_key: str
    gpu_name: str
    config: Config
    source_digest: str
    """`Source.digest` of what ran; empty where nothing was rendered."""
    status: str
    stage: str
    median_us: float | None = None
    q20_us: float | None = None
    q80_us: float | None = None
    samples: int = 0
    baseline_us: float | None = None
    """The default config's median in the same interleaved final."""
    max_error: float | None = None
    rms_error: float | None = None
    """Errors against the reference; None where the check did not run."""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    clock_mhz: float | None = None
    unit: str = ""
    """UUID of the device."""
    driver: str = ""
    nvrtc: str = ""
    cupy: str = ""
    flashtune: str = ""
    seed: int | None = None
    message: str = ""

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def variant(self) -> Variant:
        return self.config.family, self.config.key, self.source_digest

    @property
    def ratio(self) -> float | None:
        """Time relative to the default config in the same final; below 1 is faster."""
        return self.median_us / self.baseline_us if self.median_us and self.baseline_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model and the compiler say of a config that was not timed. Never exported as a result."""

    created: str
    problem: Problem
    gpu_key: str
    gpu_name: str
    config: Config
    source_digest: str
    predicted_us: float
    rank: int
    """1 is the best of its problem."""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    nvrtc: str = ""
    flashtune: str = ""

    @property
    def family(self) -> str:
        return self.config.family


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The config to run, and why. ``evidence`` is a sentence for people."""

    config: Config
    level: Level
    evidence: str
    origin: str = ""
    """Where the row came from: ``user`` or ``bundled``; empty for explicit and default."""
    measurement: Measurement | None = None
    prediction: Prediction | None = None

    @property
    def family(self) -> str:
        return self.config.family

    def __str__(self) -> str:
        return f"{self.config}, {self.level.replace('_', ' ')}: {self.evidence}"


def capability(gpu_key: str) -> str:
    """Compute capability with suffix, e.g. ``9.0a``: the first part of a device-model key."""
    return gpu_key.partition("/")[0]


def canonical(data: object) -> str:
    """JSON with one spelling per value: sorted names, no spaces, ASCII, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def to_json(record: Measurement | Prediction) -> dict[str, Any]:
    """Fields that differ from their default, with ``family`` beside ``config``."""
    data: dict[str, Any] = value.to_json(record)
    data["problem"] = value.to_json(record.problem)
    data["config"] = record.config.to_json()
    data["family"] = record.config.family
    return data
