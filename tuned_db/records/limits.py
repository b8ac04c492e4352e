"""What a record may hold: types, ranges and listed words; and `settled`, a record without values that can't be stored.

Any record is checked here, wherever it comes from. `parse.py` makes records of what is not one yet.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from flashtune.errors import InvalidInput

from .dates import FORM, is_date
from .measurement import STAGES, STATUSES, THROTTLES, Measurement, Prediction

MESSAGE_LIMIT = 2000
_TEXT_LIMIT = 200
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_GPU_KEY = re.compile(r"\d{1,2}\.\d[a-z]?/[^/]+(/[^/]+)*", re.ASCII)
_VERSION = re.compile(r"[0-9A-Za-z.+_-]{0,60}")

T = TypeVar("T", "Measurement", "Prediction")


def check(record: T) -> T:
    """``record``, if every field has the right type and range; else :class:`InvalidInput` names field and value."""
    get, numbers = NUMBERS[type(record)]
    for got, (name, types, low, high, optional) in zip(get(record), numbers, strict=True):
        if type(got) in types and low <= got <= high:
            continue
        if not (got is None and optional):
            check_number(name, got)
    _check_text(record)
    if isinstance(record, Measurement):
        check_words("status", record.status, STATUS_WORDS)
        check_words("stage", record.stage, STAGES)
        check_ok(record.status, record.median_us, record.source_digest)
        check_interval(record.ratio_low, record.paired_ratio, record.ratio_high)
        check_card(record.contended, record.throttle)
    return record


def check_number(name: str, got: object) -> None:
    """What :func:`check` says of one number."""
    limits = _LIMITS[name]
    if got is None:
        if limits.optional:
            return
        raise InvalidInput(f"{name} is missing")
    if isinstance(got, bool) or not isinstance(got, limits.types):
        raise InvalidInput(f"{name} must be {limits.words}, not {show(got)}")
    number: Any = got
    if not limits.low <= number <= limits.high:
        raise InvalidInput(f"{name}={show(got)} must be from {limits.low:g} to {limits.high:g}")


def settled(record: Measurement) -> Measurement:
    """``record`` as it is stored: a time that is no time makes it ``failed``, an error that is no number ``wrong``.

    The offending values go to the message, since neither JSON nor SQLite can hold them (SQLite turns NaN into NULL,
    and NULL sorts first). Nothing else is changed, but an overlong message is cut.
    """
    if _is_settled(record):
        return record
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
    if not message.isprintable():
        message = "".join(char if char.isprintable() or char in "\n\t" else "?" for char in message)
    changes["message"] = message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 4] + " ..."
    return with_floats(dataclasses.replace(record, **changes))


def _is_settled(record: Measurement) -> bool:
    """Whether :func:`settled` would change nothing, as with nearly all rows."""
    for got, (_, _, low, high, _) in zip(_get_floats(record), _FLOAT_LIMITS, strict=True):
        if got is not None and (type(got) is not float or not low <= got <= high or _is_minus_zero(got)):
            return False
    message = record.message
    if not isinstance(message, str) or len(message) > MESSAGE_LIMIT or not message.isprintable():
        return False
    return record.status != "ok" or record.median_us is not None


def _is_minus_zero(got: Any) -> bool:
    return got == 0 and math.copysign(1, got) < 0


def with_floats(record: Measurement) -> Measurement:
    """``record`` with numbers as columns of floats hold them: 80 is 80.0, -0.0 is 0.0. So a row has one spelling."""
    changes: dict[str, Any] = {}
    for name in _FLOATS:
        got = getattr(record, name)
        if (type(got) is int and abs(got) <= _ERROR.high) or (type(got) is float and _is_minus_zero(got)):
            changes[name] = got + 0.0
    return dataclasses.replace(record, **changes) if changes else record


def _within(name: str, got: object) -> bool:
    """Whether a number is one that can be stored; what is no number is left to :func:`check`."""
    return not isinstance(got, int | float) or _LIMITS[name].low <= got <= _LIMITS[name].high


_INTERVAL = ("paired_ratio", "ratio_low", "ratio_high")


def check_ok(status: object, median_us: object, source_digest: object) -> None:
    """An ``ok`` row has a time and a source; else :class:`InvalidInput`, as all of these raise."""
    if status == "ok" and (median_us is None or not source_digest):
        raise InvalidInput("a measurement with status ok needs median_us and source_digest")


def check_interval(low: float | None, middle: float | None, high: float | None) -> None:
    """Both ends and the ratio between them, or no ends."""
    if low is None and high is None:
        return
    if low is None or middle is None or high is None or not low <= middle <= high:
        shown = f"ratio_low={low}, paired_ratio={middle}, ratio_high={high}"
        raise InvalidInput(f"{shown} must be all there and in this order, or low and high missing")


def check_card(contended: object, throttle: object) -> None:
    """What was read of the card: contention, and reasons for a throttle."""
    if contended is not None and not isinstance(contended, bool):
        raise InvalidInput(f"contended={show(contended)} must be true or false")
    if throttle is not None:
        if not isinstance(throttle, str):
            raise InvalidInput(f"throttle must be text, not {show(throttle)}")
        if throttle and not (len(throttle) <= _TEXT_LIMIT and _is_throttle(throttle)):
            raise InvalidInput(f"throttle={show(throttle)} must be empty or have each once of: {','.join(THROTTLES)}")


@functools.lru_cache(maxsize=1024)
def _is_throttle(text: str) -> bool:
    """Whether ``text`` is known words, each once, with commas between them."""
    words = text.split(",")
    return THROTTLES.keys() >= set(words) and len(set(words)) == len(words)


@dataclass(frozen=True, slots=True)
class _Limits:
    types: tuple[type, ...]
    low: float
    high: float
    optional: bool = True

    @property
    def words(self) -> str:
        return "a whole number" if self.types == (int,) else "a number"


def _numbers(cls: type, names: Collection[str] | None = None) -> tuple[Callable[[Any], tuple[Any, ...]], list[_Number]]:
    """What reads all limited fields of a record at once, and their limits: one by one would cost most of a check."""
    listed = [field.name for field in dataclasses.fields(cls) if field.name in (_LIMITS if names is None else names)]
    limits = [(name, each.types, each.low, each.high, each.optional) for name in listed for each in [_LIMITS[name]]]
    return operator.attrgetter(*listed), limits


_Number = tuple[str, tuple[type, ...], float, float, bool]
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
NUMBERS = {cls: _numbers(cls) for cls in (Measurement, Prediction)}
"""By class: what reads its numbers, and (name, types, low, high, optional) of each."""
_FLOATS = tuple(name for name, types, *_ in NUMBERS[Measurement][1] if float in types)
_get_floats, _FLOAT_LIMITS = _numbers(Measurement, _FLOATS)
STATUS_WORDS = tuple(STATUSES)

_OWN_TEXTS = ("id", "created", "source_digest")
"""Few rows share them."""


def _texts(cls: type) -> tuple[tuple[str, ...], Callable[[Any], Any], tuple[str, ...], Callable[[Any], Any]]:
    """Names of text fields with what reads them: those of a row itself, and those that it shares with others."""
    names = [field.name for field in dataclasses.fields(cls) if field.type == "str" and field.name != "message"]
    checked = [name for name in names if name not in ("status", "stage")]
    own = tuple(name for name in checked if name in _OWN_TEXTS)
    shared = tuple(name for name in checked if name not in _OWN_TEXTS)
    return own, operator.attrgetter(*own), shared, operator.attrgetter(*shared)


TEXTS = {cls: _texts(cls) for cls in (Measurement, Prediction)}
"""By class: names and getter of a row's own texts, then of those it shares with others."""
_FORMS: dict[str, tuple[Callable[[str], object], str]] = {
    "id": (_ID.fullmatch, "a UUID in lower case"),
    "created": (is_date, FORM),
    "gpu_key": (_GPU_KEY.fullmatch, "a device-model key such as 9.0a/h200/132sm/..."),
    "nvrtc": (_VERSION.fullmatch, "a version"),
    "cupy": (_VERSION.fullmatch, "a version"),
    "flashtune": (_VERSION.fullmatch, "a version"),
}
_NOT_EMPTY = ("session", "gpu_name")
EXACT: dict[str, Callable[[str], object]] = {
    "id": _ID.fullmatch,
    "created": is_date,
    "source_digest": _DIGEST.fullmatch,
}
"""What fits is short, printable and not empty: one look is enough, and these are checked for every row."""


def _check_text(record: Measurement | Prediction) -> None:
    own, get_own, shared, get_shared = TEXTS[type(record)]
    _check_texts(own, get_own(record))
    try:
        _check_shared_texts(shared, get_shared(record))
    except TypeError:  # something that is no text and can't be remembered
        _check_texts(shared, get_shared(record))
        raise
    check_model(record.gpu_key, record.gpu_name)
    check_message(getattr(record, "message", ""))


def check_model(gpu_key: str, gpu_name: str) -> None:
    """The name of a model is what its key says: with another, nobody could add rows of that model any more."""
    if gpu_key.split("/", 2)[1] != gpu_name:
        raise InvalidInput(f"gpu_name={show(gpu_name)} must be {show(gpu_key.split('/', 2)[1])}, as the key says")


def check_message(message: object) -> None:
    """Text of at most `MESSAGE_LIMIT` characters."""
    if not isinstance(message, str) or len(message) > MESSAGE_LIMIT:
        raise InvalidInput(f"message must be text of at most {MESSAGE_LIMIT} characters, not {show(message)}")


def _check_texts(names: tuple[str, ...], texts: tuple[object, ...]) -> None:
    for name, got in zip(names, texts, strict=True):
        check_text(name, got)


_check_shared_texts = functools.lru_cache(maxsize=4096)(_check_texts)
"""Rows of a session share GPU, versions and more, which are checked once. Refusals are not kept."""


def check_text(name: str, got: object) -> None:
    """What :func:`check` says of one text."""
    if type(got) is str and name in EXACT and EXACT[name](got):
        return
    if not isinstance(got, str):
        raise InvalidInput(f"{name} must be text, not {show(got)}")
    if len(got) > _TEXT_LIMIT or not got.isprintable() or (not got and name in _NOT_EMPTY):
        raise InvalidInput(f"{name}={show(got)} must be 1 to {_TEXT_LIMIT} printable characters")
    form = _FORMS.get(name)
    if form and not form[0](got):
        raise InvalidInput(f"{name}={show(got)} must be {form[1]}")
    if name == "source_digest" and got and not _DIGEST.fullmatch(got):
        raise InvalidInput(f"source_digest={show(got)} must be 64 hexadecimal digits")


def check_words(name: str, got: str, allowed: tuple[str, ...]) -> None:
    """One of the ``allowed`` words."""
    if got not in allowed:
        raise InvalidInput(f"{name}={show(got)} is not known. Known: {', '.join(allowed)}")


def show(got: object) -> str:
    """A value as messages show it: what it is, and not too long."""
    text = repr(got[:60]) if isinstance(got, str | bytes) else repr(got)
    return text if len(text) <= 80 else text[:76] + " ..."
