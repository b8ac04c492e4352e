"""The door for arrays: what every array library must offer, and which class serves an array.

One small class per library (in `cupy_arrays`, `torch_arrays` and `numpy_arrays`) is found by the module that defines
the array's type, so no library is imported before the caller has made an array with it. Another library joins with one
class and :func:`register`.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from flashtune.errors import InvalidType

Options = tuple[Any, Any, Any, Any, Any]
"""(causal, scale, return_lse, layout, config) as the caller gave them: part of the key of a warm call."""


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """What validation needs to know of one array. Strides count elements; ``address`` is that of element 0."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    device: str
    """As messages show it: ``cuda:0`` or ``cpu``."""
    address: int
    writable: bool = True


class ArrayKind(ABC):
    """One array library."""

    name: str
    """As messages show it."""
    types: tuple[type, ...]
    """Array types that need no further look; subclasses are judged by :meth:`refusal`."""

    @abstractmethod
    def call(self, q: Any, k: Any, v: Any, out: Any, options: Options) -> Any:
        """The whole of ``attention()`` for this library: the output, or (output, LSE)."""

    @abstractmethod
    def facts(self, name: str, array: Any) -> ArrayFacts:
        """Describes argument ``name``; a foreign or unusable array raises :class:`InvalidType`."""

    def owns(self, array: Any) -> bool:
        return isinstance(array, self.types)

    def forget(self) -> None:  # noqa: B027
        """Drops what is remembered of earlier calls: the next one looks its kernel up again."""

    def refusal(self, kind: type) -> str | None:
        """Why arrays of type ``kind`` can't be used, or None."""
        return None if issubclass(kind, self.types) else f"{kind.__module__}.{kind.__qualname__} is not an array"


_ROOTS = {name: f"flashtune.call.{name}_arrays" for name in ("cupy", "torch", "numpy")}
ACCEPTED = "CuPy arrays, torch CUDA tensors and NumPy arrays"

kinds: dict[type, ArrayKind] = {}
"""The kind that serves each array type seen so far."""


def register(kind: ArrayKind) -> None:
    """Serves arrays of ``kind.types`` by ``kind`` from now on."""
    for each in kind.types:
        kinds[each] = kind


def unregister(kind: ArrayKind) -> None:
    """Forgets ``kind`` and every type that it serves."""
    for each in [known for known, serving in kinds.items() if serving is kind]:
        del kinds[each]


@functools.cache
def _library(module: str) -> ArrayKind:
    """The one kind of a library: objects of its package that are no arrays must not make it anew, with no memory."""
    kind: ArrayKind = importlib.import_module(module).make_kind()
    return kind


def kind_of(array: Any) -> ArrayKind:
    """The kind that serves ``array``; :class:`InvalidType` names what is accepted."""
    wanted = type(array)
    if wanted in kinds:
        return kinds[wanted]
    for base in wanted.__mro__:
        if base not in kinds and (module := _ROOTS.get(base.__module__.partition(".")[0])):
            register(_library(module))
        if base in kinds:
            kind = kinds[base]
            if reason := kind.refusal(wanted):
                raise InvalidType(f"q: {reason}. Accepted: {ACCEPTED}")
            kinds[wanted] = kind
            return kind
    raise InvalidType(f"q is a {wanted.__module__}.{wanted.__qualname__}. Accepted: {ACCEPTED}")


def forget() -> None:
    """Makes every library look kernels up again: for when tuning data has changed."""
    for kind in list(kinds.values()):
        kind.forget()
