"""Which compiler's measurements count where a database has those of several.

NVRTC makes the machine code, and a new release now and then turns the order of two configs around, so what an older one
was measured with says less. Which of the stored versions is nearest to ours: the newest that is not newer than it, and
where all are newer, the oldest of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from flashtune.codegen.compiler.nvrtc import nvrtc_version
from flashtune.errors import MissingDependency
from flashtune.tuned_db.records.measurement import Measurement

NEWEST = ""
"""The toolchain of nobody: the newest stored version counts."""

_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}")


@functools.cache
def installed() -> str:
    """The NVRTC version here; empty where CuPy or NVRTC is missing."""
    try:
        return nvrtc_version()
    except MissingDependency:
        return ""


def compatible(rows: Sequence[Measurement], toolchain: str | None = None) -> Sequence[Measurement]:
    """Of ``rows`` of one variant those that were compiled by the version nearest to ``toolchain``; see above.

    None is the version here, which is asked for only where rows differ; where there is none, the newest counts, as it
    does for :data:`NEWEST`. A stored version that is not known counts only where there is no other.
    """
    if len({each.nvrtc for each in rows}) < 2:
        return rows
    ours = _parsed(installed() if toolchain is None else toolchain)
    stored = {_parsed(each.nvrtc) for each in rows}
    older = [each for each in stored if not ours or each <= ours]
    wanted = max(older) if any(older) else min(filter(None, stored), default=())
    return [each for each in rows if _parsed(each.nvrtc) == wanted]


def _parsed(version: str) -> tuple[int, ...]:
    """``12.9`` as (12, 9), and 13, 13.0 and 13.0.0 all as (13,); () for what is no version."""
    return tuple(map(int, re.sub(r"(\.0+)+$", "", version).split("."))) if _VERSION.fullmatch(version) else ()
