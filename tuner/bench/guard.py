"""Memory for results, poisoned and between guard bands: what a kernel leaves out or writes beside them shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from flashtune.codegen.gpu.cuda import runtime
from flashtune.codegen.launch import BoundPlan

from .memory import POISON, Arena, download

GUARD_BYTES = 4096
"""Of each guard band. A multiple of any alignment that kernels ask for."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """``size`` bytes for one result, ``offset`` bytes off an aligned address; its guard band begins at ``begin``."""

    begin: int
    size: int
    offset: int = 0

    @classmethod
    def of(cls, arena: Arena, name: str, size: int, offset: int = 0) -> Self:
        """In the buffer ``name`` of ``arena``. Valid until that has to grow."""
        return cls(arena.address(name, 2 * GUARD_BYTES + offset + size), size, offset)

    @property
    def address(self) -> int:
        """Of the result."""
        return self.begin + GUARD_BYTES + self.offset

    @property
    def total(self) -> int:
        """Bytes from ``begin``, guard bands included."""
        return 2 * GUARD_BYTES + self.offset + self.size

    def poison(self, stream: int) -> None:
        """Result and guard bands."""
        runtime.memsetAsync(self.begin, POISON, self.total, stream)

    def intact(self) -> bool:
        """Whether both guard bands are as :meth:`poison` left them. What is on a stream must have ended."""
        before = np.empty(GUARD_BYTES + self.offset, np.uint8)
        behind = np.empty(GUARD_BYTES, np.uint8)
        download(self.begin, before)
        download(self.address + self.size, behind)
        return bool((before == POISON).all() and (behind == POISON).all())


def workspace(arena: Arena, bound: BoundPlan) -> Guarded | None:
    """That of ``bound``, None where it needs none. All launches of a run share it: they follow each other."""
    size = bound.loaded.plan.workspace_bytes
    return Guarded.of(arena, "workspace", size) if size else None
