"""What all values that travel have in common: a stable key, a JSON form, strict reading.

A value is a frozen dataclass of ``int``, ``float``, ``bool`` and ``str`` fields. Keys and JSON leave out fields at
their default (the neutral default), so a field added later orphans nothing that is stored. New fields go last:
the key lists them in order of declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import InvalidInput, InvalidType

T = TypeVar("T")
Scalar = int | float | bool | str

NAMED = 5
"""Names of data of others that a message has."""

_known_fields: dict[type, dict[str, dataclasses.Field[Any]]] = {}

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def to_json(value: Any) -> dict[str, Scalar]:
    """Fields that differ from their neutral default, in order of declaration."""
    return {
        name: getattr(value, name)
        for name, field in _fields(type(value)).items()
        if getattr(value, name) != field.default
    }


def key(value: Any) -> str:
    """``name=value`` pairs of :func:`to_json`, joined by commas: readable, greppable, stable."""
    return ",".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in to_json(value).items())


def shown(got: object, limit: int = 60) -> str:
    """``repr(got)`` for a message, whatever it is: at most ``limit`` characters."""
    try:
        text = repr(got)
    except ValueError:  # an int with more digits than Python prints
        text = f"a value of type {type(got).__qualname__} with very many digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def plain(got: object, limit: int = 200) -> str:
    """``got`` itself where it is printable text of at most ``limit`` characters, else :func:`shown`.

    For names of others: what is printed of them moves no cursor, and it fits into any store.
    """
    return got if isinstance(got, str) and got.isprintable() and len(got) <= limit else shown(got)


def printable(text: str, limit: int = 400) -> str:
    """``text`` of somebody else as one line for a message, a log or a terminal: at most ``limit`` characters.

    White space of any length is one space, and ``?`` stands for each character that is not printable, such as those
    that move a cursor, set colours or turn the direction of what follows.
    """
    line = " ".join(text.split())
    clean = "".join(each if each.isprintable() else "?" for each in line)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def listed(names: list[str]) -> str:
    """Names that data of others holds, for a message: there may be thousands."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def check_types(value: Any) -> None:
    """Raises :class:`InvalidType` for the first field that does not hold exactly its type: True is no int."""
    for name, field in _fields(type(value)).items():
        if reason := _mismatch(type(value), field, getattr(value, name)):
            raise InvalidType(reason)


def from_json(cls: type[T], data: Mapping[str, object]) -> T:
    """Builds ``cls`` from untrusted data. Unknown or missing names and wrong types raise :class:`InvalidInput`."""
    if not isinstance(data, Mapping):
        raise InvalidInput(f"{cls.__name__} must be named values, not {shown(data)}")
    fields = _fields(cls)
    what = cls.__name__
    unknown = sorted(shown(name).strip("'") for name in data if name not in fields)
    if unknown:
        raise InvalidInput(f"{what} has no field {listed(unknown)}. Known: {', '.join(fields)}")
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                raise InvalidInput(f"{what} needs a value for {name}")
            continue
        if reason := _mismatch(cls, field, data[name]):
            raise InvalidInput(reason)
    return cls(**data)


def _fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    found = _known_fields.get(cls)
    if found is None:
        found = _known_fields[cls] = {field.name: field for field in dataclasses.fields(cls)}
    return found


def _mismatch(cls: type, field: dataclasses.Field[Any], got: object) -> str | None:
    if type(got) in _TYPES[str(field.type)]:
        return None
    return f"{cls.__name__}.{field.name} must be {field.type}, not {shown(got)}"
