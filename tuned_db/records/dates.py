"""Dates of rows: the one form in which they are stored, and how late one may be where it comes in or goes out.

Who sends a row fills in its date. One after now is a clock that is wrong, or a lie, and is refused on each way in
(`Store.add`), so it is left out on each way out. What is stored is never held against the clock again: no look-up reads
one, or a machine whose clock stands still would run other kernels than all others with the same rows.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from flashtune.errors import InvalidInput

from .measurement import stamp

FORM = "a UTC time such as 2026-11-29T17:40:12.123Z"
AHEAD = timedelta(days=1)
"""What clocks may differ by: as much as one does that was set to the time of another place."""

_FORM = re.compile(r"\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d\.\d{3}Z", re.ASCII)
_FIRST, _END = "1970", "9999"
"""Years: what uses a date needs room for a time zone on either side."""


def is_date(text: str) -> bool:
    """Whether ``text`` is the date of a day that there is, in the one form."""
    if not _FORM.fullmatch(text) or not _FIRST <= text < _END:
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:  # the 31st of a shorter month
        return False
    return True


def latest() -> str:
    """The latest date that may come in now."""
    return stamp(datetime.now(UTC) + AHEAD)


def check_ahead(created: str, last: str) -> None:
    """Raises `InvalidInput` for a date after ``last``, which is what :func:`latest` said."""
    if created > last:
        raise InvalidInput(
            f"created={created} is later than it is ({stamp(datetime.now(UTC))}): "
            "the clock is wrong where it was measured, or here"
        )
