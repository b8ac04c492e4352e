"""What is stored and what a look-up answers: `Measurement`, `Prediction`, `Choice`. No SQL here.

A measurement is an immutable fact: one config tried once on one unit, whatever came of it. Winners are never stored;
`winners.py` derives them, and `parse.py` decides what may enter.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from flashtune import values
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem

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

THROTTLES: dict[str, str] = {
    "power_cap": "the power limit lowers the clock; normal under load",
    "sync_boost": "the clock follows that of other cards",
    "clock_setting": "the clock is held by a setting",
    "hw_slowdown": "the hardware lowers the clock: heat or power supply",
    "hw_thermal": "too hot, by the hardware's own limit",
    "sw_thermal": "too hot, by the driver's limit",
    "power_brake": "the power supply asks for less",
    "slow_clock": "the clock was far below what this card held before, and no power limit or setting explains it",
    "slow_host": "the host queued its launches so slowly that times count the host",
}
"""What lowers a clock, as NVML reports it (nvml.h, nvmlClocksEventReason*), and what the tuner notices itself."""

SLOWDOWNS = ("hw_thermal", "sw_thermal", "slow_clock", "slow_host")
"""Those under which a time says little about the config. Power is no such reason by itself: a loaded card is at its
limit, or a moment above it, and where that costs much of the clock it is a ``slow_clock``."""

REJECTING = ("wrong", "illegal_access")
"""Statuses that bar a variant for its whole spec, whatever else was measured."""

TRUST: dict[str, str] = {
    "candidate": "one session says so, or none that is independent and can be compared",
    "verified": "at least half of the sessions of other days or cards say the same as the median one",
    "disputed": "fewer than half of the sessions of other days or cards say the same as the median one",
}
"""How far a claim can be trusted; `trust.py` has the policy."""

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
    return stamp(datetime.now(UTC))


def stamp(when: datetime) -> str:
    """A time in UTC as rows hold it."""
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
    """The default config's median, of launches in turns with these."""
    paired_ratio: float | None = None
    """Time relative to the default config, median over rounds: of the same final, or of launches in turns with it. Rows
    of the first schema have none."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    """Interval that holds the true ``paired_ratio`` with 95 %; None where there were too few rounds for one."""
    rounds: int | None = None
    """How many rounds."""
    max_error: float | None = None
    rms_error: float | None = None
    """Errors against the reference; None where the check did not run."""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None
    """Words of :data:`THROTTLES`, each once, with commas between them; empty if there was none; None if not known."""
    contended: bool | None = None
    """Whether another process had the card open; None if not known."""
    unit: str = ""
    """UUID of the device."""
    driver: str = ""
    nvrtc: str = ""
    cupy: str = ""
    flashtune: str = ""
    author: str = ""
    """The name that who measured gave (``FLASHTUNE_AUTHOR``), proved by nothing; empty if none."""
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
        """Time relative to the default config at the same time; below 1 is faster."""
        if self.paired_ratio is not None:
            return self.paired_ratio
        return self.median_us / self.baseline_us if self.median_us and self.baseline_us else None

    @property
    def flagged(self) -> bool:
        """Whether the card was slowed down or shared, so that the time is worth less than another."""
        return bool(self.contended) or any(each in SLOWDOWNS for each in self.reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The words of ``throttle``."""
        return tuple(filter(None, (self.throttle or "").split(",")))


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
class Trust:
    """How far the ratio that finals claim for a variant can be trusted, and on what grounds; see `trust.py`."""

    level: str
    """A word of :data:`TRUST`."""
    sessions: int
    units: tuple[str, ...]
    """UUIDs of the cards, as far as they are known."""
    first: str
    last: str
    """Days (UTC) of the oldest and the newest row."""
    agreeing: int
    others: int
    """Witnesses that are independent of the median one and can be compared with it, and how many of them agree."""
    worst: float
    """The largest upper end of a witness's interval: what all of them say it does not exceed."""

    def __str__(self) -> str:
        said = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        said += f" on {len(self.units)} cards" if len(self.units) > 1 else ""
        said += f" since {self.first}" if self.first != self.last else ""
        if self.level == "candidate":
            return f"candidate, {said} and none to compare it with"
        return f"{self.level}, {said}: {self.agreeing} of {self.others} independent ones agree with the median"


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
    ratio: float | None = None
    """Time of what was measured relative to the default config, median over its sessions; None where none compared."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    """Its 95 % interval; None where there is none."""
    trust: Trust | None = None
    """None where no final claims anything: nothing was compared, or what is chosen is the default."""

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
    data: dict[str, Any] = values.to_json(record)
    data["problem"] = values.to_json(record.problem)
    data["config"] = record.config.to_json()
    data["family"] = record.config.family
    return data
