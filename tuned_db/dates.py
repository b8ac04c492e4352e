"""Dates of rows: the one form in which they are stored, so that they compare as texts do."""

from __future__ import annotations

import re
from datetime import datetime

FORM = "a UTC time such as 2026-11-29T17:40:12.123Z"

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
