"""The gate for values from anywhere, a tuner, a file or a database: known names, types, ranges and listed words.

Nothing is evaluated, and no text gets into a config but as a listed value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flashtune.codegen import value
from flashtune.codegen.config import Config
from flashtune.codegen.family import read_config
from flashtune.codegen.problem import Problem
from flashtune.errors import InvalidInput

from .records import STAGES, STATUSES, THROTTLES, Measurement, Prediction

MESSAGE_LIMIT = 2000
_TEXT_LIMIT = 200
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CREATED = re.compile(r"\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\d(\.\d{1,6})?Z")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_GPU_KEY = re.compile(r"\d{1,2}\.\d[a-z]?/[^/]+(/[^/]+)*")
_VERSION = re.compile(r"[0-9A-Za-z.+_-]{0,60}")

_FIELDS = dataclasses.fields(Measurement)
_KNOWN = frozenset({"family", *(field.name for field in _FIELDS)})
_NEEDED = frozenset({"family", *(field.name for field in _FIELDS if field.default is dataclasses.MISSING)})

T = TypeVar("T", "Measurement", "Prediction")


def measurement_from_json(data: object) -> Measurement:
    """A measurement from untrusted JSON data; :class:`InvalidInput` says what is wrong with it."""
    if not isinstance(data, Mapping):
        raise InvalidInput(f"a measurement is a JSON object, not {_show(data)}")
    unknown = sorted(_show(name) for name in data if name not in _KNOWN)
    if unknown:
        raise InvalidInput(f"a measurement has no field {', '.join(unknown)}")
    missing = sorted(_NEEDED - data.keys())
    if missing:
        raise InvalidInput(f"a measurement needs {', '.join(missing)}")
    plain = {name: data[name] for name in data if name not in ("family", "problem", "config")}
    problem = read_problem(data["problem"])
    config = read_any_config(data["family"], data["config"])
    return check(Measurement(problem=problem, config=config, **plain))


def read_problem(data: object) -> Problem:
    """A problem from untrusted JSON data."""
    if not isinstance(data, Mapping):
        raise InvalidInput(f"problem must be a JSON object, not {_show(data)}")
    return value.from_json(Problem, data)


def read_any_config(family: object, data: object) -> Config:
    """A config of the family named by untrusted data: known names and listed values, nothing is evaluated."""
    if not isinstance(family, str):
        raise InvalidInput(f"family must be text, not {_show(family)}")
    if not isinstance(data, Mapping):
        raise InvalidInput(f"config must be a JSON object, not {_show(data)}")
    return read_config(family, data)


@functools.lru_cache(maxsize=4096)
def problem_from_text(text: object) -> Problem:
    """:func:`read_problem` of canonical JSON text, as a database holds it."""
    return read_problem(_parsed("problem", text))


@functools.lru_cache(maxsize=16384)
def config_from_text(family: object, text: object) -> Config:
    """:func:`read_any_config` of canonical JSON text, as a database holds it."""
    return read_any_config(family, _parsed("config", text))


def check(record: T) -> T:
    """``record``, if every field has the right type and range; else :class:`InvalidInput` names field and value."""
    for name, limits in _LIMITS.items():
        got: object = getattr(record, name, None)
        if got is None:
            if limits.optional or not hasattr(record, name):
                continue
            raise InvalidInput(f"{name} is missing")
        if isinstance(got, bool) or not isinstance(got, limits.types):
            raise InvalidInput(f"{name} must be {limits.words}, not {_show(got)}")
        number: Any = got
        if not limits.low <= number <= limits.high:
            raise InvalidInput(f"{name}={_show(got)} must be from {limits.low:g} to {limits.high:g}")
    _check_text(record)
    if isinstance(record, Measurement):
        _check_words("status", record.status, tuple(STATUSES))
        _check_words("stage", record.stage, STAGES)
        if record.status == "ok" and (record.median_us is None or not record.source_digest):
            raise InvalidInput("a measurement with status ok needs median_us and source_digest")
        _check_interval(record)
        _check_card(record)
    return record


def settled(record: Measurement) -> Measurement:
    """``record`` as it is stored: a time that is no time makes it ``failed``, an error that is no number ``wrong``.

    The offending values go to the message, since neither JSON nor SQLite can hold them (SQLite turns NaN into NULL,
    and NULL sorts first). Nothing else is changed, but an overlong message is cut.
    """
    changes: dict[str, Any] = {}
    notes = []
    for name in ("median_us", "q20_us", "q80_us", "baseline_us", "max_error", "rms_error"):
        got = getattr(record, name)
        is_error = name.endswith("_error")
        if not _within(name, got):
            changes[name] = None
            notes.append(f"{name}={got}")
            if record.status == "ok" and name != "baseline_us" and changes.get("status") != "wrong":
                changes["status"] = "wrong" if is_error else "failed"
    bad = [name for name in _INTERVAL if not _within(name, getattr(record, name))]
    if bad:  # a part of an interval decides nothing
        changes |= dict.fromkeys(_INTERVAL)
        notes += [f"{name}={getattr(record, name)}" for name in bad]
    for name in ("clock_mhz", "power_w", "temperature_c"):
        if not _within(name, getattr(record, name)):
            changes[name] = None
            notes.append(f"{name}={getattr(record, name)}")
    if record.status == "ok" and record.median_us is None:
        changes["status"] = "failed"
        notes.append("no time")
    message = "; ".join(filter(None, [record.message, *notes]))
    message = "".join(char if char.isprintable() or char in "\n\t" else "?" for char in message)
    changes["message"] = message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 4] + " ..."
    return dataclasses.replace(record, **changes)


def _within(name: str, got: object) -> bool:
    """Whether a number is one that can be stored; what is no number is left to :func:`check`."""
    return not isinstance(got, int | float) or _LIMITS[name].low <= got <= _LIMITS[name].high


_INTERVAL = ("paired_ratio", "ratio_low", "ratio_high")


def _check_interval(record: Measurement) -> None:
    low, middle, high = record.ratio_low, record.paired_ratio, record.ratio_high
    if low is None and high is None:
        return
    if low is None or middle is None or high is None or not low <= middle <= high:
        shown = f"ratio_low={low}, paired_ratio={middle}, ratio_high={high}"
        raise InvalidInput(f"{shown} must be all there and in this order, or low and high missing")


def _check_card(record: Measurement) -> None:
    if record.contended is not None and not isinstance(record.contended, bool):
        raise InvalidInput(f"contended={_show(record.contended)} must be true or false")
    if record.throttle is not None:
        if not isinstance(record.throttle, str):
            raise InvalidInput(f"throttle must be text, not {_show(record.throttle)}")
        for word in filter(None, record.throttle.split(",")):
            _check_words("throttle", word, tuple(THROTTLES))


@dataclass(frozen=True, slots=True)
class _Limits:
    types: tuple[type, ...]
    low: float
    high: float
    optional: bool = True

    @property
    def words(self) -> str:
        return "a whole number" if self.types == (int,) else "a number"


_TIME = _Limits((int, float), 1e-3, 1e12)
_RATIO = _Limits((int, float), 1e-6, 1e6)
_ERROR = _Limits((int, float), 0.0, 1.7e308)
_BYTES = _Limits((int,), 0, 2**31 - 1)
_LIMITS: dict[str, _Limits] = {
    "median_us": _TIME,
    "q20_us": _TIME,
    "q80_us": _TIME,
    "baseline_us": _TIME,
    "predicted_us": dataclasses.replace(_TIME, optional=False),
    "rank": _Limits((int,), 1, 2**31 - 1, optional=False),
    "samples": _Limits((int,), 0, 2**31 - 1, optional=False),
    "max_error": _ERROR,
    "rms_error": _ERROR,
    "registers": _Limits((int,), 0, 65536),
    "spill_bytes": _BYTES,
    "shared_bytes": _BYTES,
    "paired_ratio": _RATIO,
    "ratio_low": _RATIO,
    "ratio_high": _RATIO,
    "rounds": _Limits((int,), 1, 2**31 - 1),
    "clock_mhz": _Limits((int, float), 0.0, 100_000.0),
    "power_w": _Limits((int, float), 0.0, 100_000.0),
    "temperature_c": _Limits((int, float), -100.0, 1000.0),
    "seed": _Limits((int,), 0, 2**63 - 1),
}


_TEXTS = {
    cls: tuple(field.name for field in dataclasses.fields(cls) if field.type == "str" and field.name != "message")
    for cls in (Measurement, Prediction)
}
_PATTERNS: dict[str, tuple[re.Pattern[str], str]] = {
    "id": (_ID, "a UUID in lower case"),
    "created": (_CREATED, "a UTC time such as 2026-11-29T17:40:12.123Z"),
    "gpu_key": (_GPU_KEY, "a device-model key such as 9.0a/h200/132sm/..."),
    "nvrtc": (_VERSION, "a version"),
    "cupy": (_VERSION, "a version"),
    "flashtune": (_VERSION, "a version"),
}
_NOT_EMPTY = ("session", "gpu_name")


def _check_text(record: Measurement | Prediction) -> None:
    for name in _TEXTS[type(record)]:
        got = getattr(record, name)
        if not isinstance(got, str):
            raise InvalidInput(f"{name} must be text, not {_show(got)}")
        if len(got) > _TEXT_LIMIT or not got.isprintable() or (not got and name in _NOT_EMPTY):
            raise InvalidInput(f"{name}={_show(got)} must be 1 to {_TEXT_LIMIT} printable characters")
        pattern = _PATTERNS.get(name)
        if pattern and not pattern[0].fullmatch(got):
            raise InvalidInput(f"{name}={_show(got)} must be {pattern[1]}")
    if record.source_digest and not _DIGEST.fullmatch(record.source_digest):
        raise InvalidInput(f"source_digest={_show(record.source_digest)} must be 64 hexadecimal digits")
    message = getattr(record, "message", "")
    if not isinstance(message, str) or len(message) > MESSAGE_LIMIT:
        raise InvalidInput(f"message must be text of at most {MESSAGE_LIMIT} characters, not {_show(message)}")


def _check_words(name: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise InvalidInput(f"{name}={_show(got)} is not known. Known: {', '.join(allowed)}")


def _parsed(what: str, text: object) -> object:
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be JSON text, not {_show(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{what}={_show(text)} is not JSON") from error


def _show(got: object) -> str:
    text = repr(got[:60]) if isinstance(got, str | bytes) else repr(got)
    return text if len(text) <= 80 else text[:76] + " ..."
