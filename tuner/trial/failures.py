"""What most of the configs that failed have failed of, in a line: a count of failures alone helps nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashtune.codegen.compiler.nvrtc import KEPT
from flashtune.values import printable

LINE = 300
"""Characters of a compiler's line that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFailure:
    """The commonest failure of the configs of one problem. ``status`` is a word of `tuned_db.records.measurement`."""

    status: str
    count: int
    """Configs that failed of it."""
    message: str
    """The first line that says what was wrong."""
    source: str = ""
    """Path of one of the sources that the compiler refused, which is kept; empty where there is none."""

    def __str__(self) -> str:
        where = f" (source: {self.source})" if self.source else ""
        return f"{self.count} x {self.status}: {self.message or 'no reason was given'}{where}"


def commonest(failures: Iterable[tuple[str, str]]) -> CommonFailure | None:
    """Of the statuses and messages of ``failures``; None if there are none."""
    told = [(status, message.splitlines()) for status, message in failures]
    counts = Counter((status, _first(lines)) for status, lines in told)
    if not counts:
        return None
    ((status, message), count) = counts.most_common(1)[0]
    alike = (lines for each, lines in told if (each, _first(lines)) == (status, message))
    kept = (line.removeprefix(KEPT) for lines in alike for line in lines if line.startswith(KEPT))
    return CommonFailure(
        status=status,
        count=count,
        message=message,
        source=next((path for path in kept if path.isprintable() and Path(path).is_file()), ""),
    )


def _first(lines: list[str]) -> str:
    """The first of ``lines`` that is no heading, as text of any origin may be shown."""
    wanted = [line for line in lines if line.strip() and not line.endswith(":")]
    return printable(wanted[0] if wanted else " ".join(lines), LINE)
