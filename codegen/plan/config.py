"""What the tuner picks: one frozen dataclass per kernel family, whose fields are its parameters.

A family writes ``block_m: int = parameter(choices=(64, 128), help="...")``. That one list drives
enumeration, Optuna, validation of database rows, the command line and ``explain``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flashtune import values
from flashtune.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Parameter:
    """One dimension of a family's search space.

    ``choices`` are in a meaningful order. ``neutral`` is the value that older configs, written before the parameter
    existed, had without knowing; None where a config must state it. ``searched`` is False for a parameter that a
    caller may set and the tuner leaves alone; ``left_out`` are choices of which the same is true. ``by_problem`` is
    True for one that pays for some problems only: the family's `variants` says which values, for each problem.
    """

    choices: tuple[Any, ...]
    help: str
    neutral: Any = None
    searched: bool = True
    by_problem: bool = False
    left_out: tuple[Any, ...] = ()
    name: str = ""
    """Of the field that has it."""


def parameter(**said: Any) -> Any:
    """A dataclass field that is a tuning parameter, with what :class:`Parameter` takes."""
    described = Parameter(**said)
    default = dataclasses.MISSING if described.neutral is None else described.neutral
    return dataclasses.field(default=default, metadata={"parameter": described})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every family's config. Prints as it is stored."""

    family: ClassVar[str] = ""

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        found = _known_parameters.get(cls)
        if found is None:
            fields = dataclasses.fields(cls)
            found = tuple(dataclasses.replace(each.metadata["parameter"], name=each.name) for each in fields)
            _known_parameters[cls] = found
        return found

    def __post_init__(self) -> None:
        for name, choices in _choices(type(self)).items():
            got = getattr(self, name)
            if not _is_one(got, choices):
                allowed = ", ".join(str(choice) for _, choice in choices)
                raise InvalidInput(f"{self.family}: {name}={values.shown(got)} is not allowed. Allowed: {allowed}")

    @functools.cached_property
    def key(self) -> str:  # a look-up asks for it some hundred times
        return values.key(self)

    def to_json(self) -> dict[str, values.Scalar]:
        return values.to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """Reads untrusted data: known names, listed values, nothing else."""
        return values.from_json(cls, data)

    def __str__(self) -> str:
        return f"{self.family}({self.key})"


_known_parameters: dict[type[Config], tuple[Parameter, ...]] = {}
_Choices = dict[tuple[type, Any], None]
"""Values with their types, since True == 1; a dict keeps their order. A look-up makes some twenty configs."""


_known_choices: dict[type[Config], dict[str, _Choices]] = {}


def _choices(cls: type[Config]) -> dict[str, _Choices]:
    found = _known_choices.get(cls)
    if found is None:
        found = {each.name: {(type(choice), choice): None for choice in each.choices} for each in cls.parameters()}
        _known_choices[cls] = found
    return found


def _is_one(got: object, choices: _Choices) -> bool:
    try:
        return (type(got), got) in choices
    except TypeError:  # not hashable, as every choice is
        return False
