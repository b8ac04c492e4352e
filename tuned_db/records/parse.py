"""The gate for values from anywhere, a tuner, a file or a database: known names and listed values; `limits.py` has the
types, ranges and words.

Nothing is evaluated, and no text gets into a config but as a listed value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashtune import values
from flashtune.codegen.families.registry import read_config
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput

from .limits import check, show, with_floats
from .measurement import Measurement

_FIELDS = dataclasses.fields(Measurement)
_KNOWN = frozenset({"family", *(field.name for field in _FIELDS)})
_NEEDED = frozenset({"family", *(field.name for field in _FIELDS if field.default is dataclasses.MISSING)})


REASONS = 100
"""Rows whose reason is kept; all of them may be unreadable."""


@dataclass(slots=True)
class Unreadable:
    """How many rows were passed over, and why the first `REASONS` of them were."""

    rows: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, row: str, error: InvalidInput) -> None:
        self.rows += 1
        if len(self.reasons) < REASONS:
            self.reasons.append(f"{row}: {error}")

    def __str__(self) -> str:
        return f"{self.rows} row{'' if self.rows == 1 else 's'} can't be read by this version"


def measurement_from_json(data: object) -> Measurement:
    """A measurement from untrusted JSON data; :class:`InvalidInput` says what is wrong with it."""
    if not isinstance(data, Mapping):
        raise InvalidInput(f"a measurement is a JSON object, not {show(data)}")
    unknown = sorted(show(name) for name in data if name not in _KNOWN)
    if unknown:
        raise InvalidInput(f"a measurement has no field {values.listed(unknown)}")
    missing = sorted(_NEEDED - data.keys())
    if missing:
        raise InvalidInput(f"a measurement needs {', '.join(missing)}")
    plain = {name: data[name] for name in data if name not in ("family", "problem", "config")}
    problem = read_problem(data["problem"])
    config = read_any_config(data["family"], data["config"])
    return with_floats(check(Measurement(problem=problem, config=config, **plain)))


def read_problem(data: object) -> Problem:
    """A problem from untrusted JSON data."""
    if not isinstance(data, Mapping):
        raise InvalidInput(f"problem must be a JSON object, not {show(data)}")
    return values.from_json(Problem, data)


def read_any_config(family: object, data: object) -> Config:
    """A config of the family named by untrusted data: known names and listed values, nothing is evaluated."""
    if not isinstance(family, str):
        raise InvalidInput(f"family must be text, not {show(family)}")
    if not isinstance(data, Mapping):
        raise InvalidInput(f"config must be a JSON object, not {show(data)}")
    return read_config(family, data)


@functools.lru_cache(maxsize=4096)
def problem_from_text(text: object) -> Problem:
    """:func:`read_problem` of canonical JSON text, as a database holds it."""
    return read_problem(_parsed("problem", text))


@functools.lru_cache(maxsize=16384)
def config_from_text(family: object, text: object) -> Config:
    """:func:`read_any_config` of canonical JSON text, as a database holds it."""
    return read_any_config(family, _parsed("config", text))


def _parsed(what: str, text: object) -> object:
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be JSON text, not {show(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{what}={show(text)} is not JSON") from error
