"""Damage and malice for rows that travel: mutations that know what a row looks like, each from its seed."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

MARK = "EVIL"
"""Part of each text that must not get into a source."""
TEXTS = (
    f"{{{{ 7*7 }}}}{MARK}",
    f"{{% raw %}}{MARK}",
    f"64\n__device__ int {MARK}=1;",
    f"../../{MARK}",
    f"\x1b[2J{MARK}",
    f"'; DROP TABLE measurement; --{MARK}",
    f"{MARK}\0",
    f"{MARK}\ud800",
    MARK * 700,
    "",
)
NUMBERS: tuple[Any, ...] = (
    0, -0.0, -1, 1, 16, 48, 2**31, 2**63, -(2**63) - 1, 10**300, 10**400, -(10**25), 1e308, 1e-320, 5e-324, 0.5,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": {"b": []}}, {"__reduce__": MARK}, [1, 2], "7", "nan")


def odd(draw: random.Random) -> Any:
    """A value that few fields want."""
    return draw.choice(draw.choice((TEXTS, NUMBERS, OTHERS)))


def places(data: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Each field of a row, and of its problem and config."""
    inner = [each for each in data.values() if isinstance(each, dict)]
    return [(each, name) for each in (data, *inner) for name in each]


def change(draw: random.Random, data: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """One mutation of a row that is still JSON. ``others`` are rows from which values may come."""
    holder, name = draw.choice(places(data))
    match draw.randrange(6):
        case 0:
            del holder[name]
        case 1:
            holder[draw.choice((*TEXTS, "id", "family", "unknown", "__class__", "block_m"))] = odd(draw)
        case 2:  # the value of another row
            holder[name] = draw.choice([at[each] for at, each in places(draw.choice(others))])
        case 3 if isinstance(holder[name], int | float):
            holder[name] = draw.choice((-holder[name], holder[name] + 1, holder[name] * 2, str(holder[name])))
        case 4 if isinstance(holder[name], str) and holder[name]:
            at = draw.randrange(len(holder[name]))
            holder[name] = holder[name][:at] + draw.choice(TEXTS) + holder[name][at + draw.randrange(2) :]
        case _:
            holder[name] = odd(draw)


def spoil(draw: random.Random, line: bytes) -> bytes:
    """One mutation of a line as bytes: mostly no JSON any more."""
    at = draw.randrange(len(line))
    match draw.randrange(9):
        case 0:
            return line[:at]
        case 1:
            return line[:at] + bytes([draw.randrange(256)]) + line[at + 1 :]
        case 2:
            return line[:at] + draw.choice((b"\xff", b"\0", b"\xed\xa0\x80", b"\r", b"\x85")) + line[at:]
        case 3:  # the first name twice
            return b'{"id":' + json.dumps(odd(draw)).encode() + b"," + line[1:]
        case 4:
            return pickle.dumps({"config": MARK})
        case 5:
            deep = draw.choice((b"[", b'{"a":')) * draw.choice((100, 9000, 30000))
            return line[:-1] + b',"message":' + deep
        case 6:
            return line.replace(b":", b": " + b"9" * draw.choice((20, 400, 5000)), draw.randrange(1, 4))
        case 7:
            return line[:-1] + b',"message":"' + b"x" * draw.choice((3000, 70000)) + b'"}'
        case _:
            return draw.choice((b"", b"null", b"[]", b"{}", b"1", b'"' + MARK.encode() + b'"', b"NaN"))


def stored(draw: random.Random) -> Any:
    """A value as someone may put it into a column of a database."""
    match draw.randrange(6):
        case 0:
            return pickle.dumps({"config": MARK})
        case 1:
            deep = draw.choice(("[", '{"block_m":')) * draw.choice((10, 5000, 10_000))
            return draw.choice((deep, json.dumps({"block_m": draw.choice(TEXTS)}), json.dumps(odd(draw)), "{}", "null"))
        case _:
            value = odd(draw)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(2**63), min(value, 2**63 - 1))
    return value if value is None or isinstance(value, bool | float) else json.dumps(value)
