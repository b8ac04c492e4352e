"""What all values that travel have in common: a stable key, a JSON form, strict reading.

A value is a frozen dataclass of ``int``, ``float``, ``bool`` and ``str`` fields. Keys and JSON leave out fields at
their default (the neutral default), so a field added later orphans nothing that is stored. New fields go last:
the key lists them in order of declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from flashtune.errors import InvalidInput

T = TypeVar("T")
Scalar = int | float | bool | str

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def to_json(value: Any) -> dict[str, Scalar]:
    """Fields that differ from their neutral default, in order of declaration."""
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }


def key(value: Any) -> str:
    """``name=value`` pairs of :func:`to_json`, joined by commas: readable, greppable, stable."""
    return ",".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in to_json(value).items())


def from_json(cls: type[T], data: Mapping[str, object]) -> T:
    """Builds ``cls`` from untrusted data. Unknown or missing names and wrong types raise :class:`InvalidInput`."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    what = cls.__name__
    unknown = sorted(str(name)[:60] for name in data if name not in fields)
    if unknown:
        raise InvalidInput(f"{what} has no field {', '.join(unknown)}. Known: {', '.join(fields)}")
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                raise InvalidInput(f"{what} needs a value for {name}")
            continue
        allowed = _TYPES[str(field.type)]
        got = data[name]
        if not isinstance(got, allowed) or (isinstance(got, bool) and bool not in allowed):
            raise InvalidInput(f"{what}.{name} must be {field.type}, not {str(got)[:60]!r}")
    return cls(**data)
