"""Measurements as ``.jsonl`` text: one spelling per set of rows, so that files compare, diff and travel well.

The first line is a header, then comes one measurement a line, sorted. Reading trusts nothing: known names, types,
ranges and listed words only; nothing is evaluated, and no text of a file reaches a template but as a listed value.
Predictions are never written. A file whose name ends in ``.gz`` is written as gzip (`packed.py`), which is the same
text in fewer bytes; it is read whatever its name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashtune.codegen.problem.problem import Spec
from flashtune.errors import InvalidInput
from flashtune.files import SHARED, shown_path, write_whole
from flashtune.tuned_db.backends.sqlite.files import MAGIC
from flashtune.tuned_db.policy.blocklist import TELLING, Failure, barred
from flashtune.tuned_db.policy.toolchain import NEWEST
from flashtune.tuned_db.policy.winners import fastest, rank
from flashtune.tuned_db.records.limits import check, settled
from flashtune.tuned_db.records.measurement import STAGES, Measurement, canonical, to_json
from flashtune.tuned_db.records.parse import Unreadable, measurement_from_json
from flashtune.values import plain, shown

from . import packed

SCHEMA = "flashtune-measurements/3"
READABLE = ("flashtune-measurements/1", "flashtune-measurements/2", SCHEMA)
"""The first had no intervals and no readings of power, temperature, throttling and contention, the second no author:
rows of theirs lack them still."""
LINE_LIMIT = 65536
"""Bytes of one line. A row has about 700."""
RUNNERS_UP = 2
"""Variants behind the winner that :func:`write_bundled` keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportHeader:
    """The first line of a file."""

    digest: str
    """SHA-256 of the rows."""
    gpu_keys: tuple[str, ...]
    """Device models of the rows; none where they are too many for a line."""
    origin: str
    """UUID of the database it came from, or ``bundled``."""
    rows: int
    schema: str = SCHEMA

    def __str__(self) -> str:
        return canonical(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class Export:
    """What a file held. ``refused`` is empty unless invalid rows were asked to be passed over."""

    header: ExportHeader
    measurements: tuple[Measurement, ...]
    refused: Unreadable = field(default_factory=Unreadable)


def write_export(measurements: Iterable[Measurement], path: Path, *, origin: str, replace: bool = True) -> ExportHeader:
    """Writes a file (whole, see `files.write_whole`, as for ``replace``) and returns its header.

    Rows are sorted by device, problem, stage, variant, date and id; the same set gives the same bytes. A measurement
    twice is written once; two under one id raise `InvalidInput`.
    """
    rows: dict[str, Measurement] = {}
    for each in measurements:
        stored = check(settled(each))
        if rows.setdefault(each.id, stored) != stored:
            raise InvalidInput(f"two measurements have the id {each.id}")
    body = "".join(canonical(to_json(each)) + "\n" for each in sorted(rows.values(), key=_order)).encode()
    digest, keys = hashlib.sha256(body).hexdigest(), sorted({each.gpu_key for each in rows.values()})
    header = ExportHeader(digest=digest, gpu_keys=tuple(keys), origin=origin, rows=len(rows))
    if len(str(header)) > LINE_LIMIT:
        header = dataclasses.replace(header, gpu_keys=())
    write_whole(path, packed.file_content(path, f"{header}\n".encode() + body), mode=SHARED, replace=replace)
    return header


def write_bundled(measurements: Iterable[Measurement], path: Path) -> ExportHeader:
    """Writes what a look-up needs of ``measurements``: per problem and GPU the winner, the next best, the fastest that
    they are tied with, and the default that they were measured against. Returns the header."""
    groups: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    failures: dict[Spec, list[Failure]] = defaultdict(list)
    for each in measurements:
        stored = settled(each)
        groups[each.gpu_key, each.problem.key].append(stored)
        if stored.status in TELLING:
            failures[each.problem.spec].append(Failure.of(stored))
    kept: dict[str, Measurement] = {}
    for (gpu_key, _), rows in groups.items():
        out = barred(failures[rows[0].problem.spec], gpu_key)
        ranking = rank(rows, out, toolchain=NEWEST)
        wanted = [*ranking[: 1 + RUNNERS_UP], *([fastest(ranking)] if ranking else [])]
        for ranked in wanted:
            for row in ranked.rows:
                kept[row.id] = row
                kept.update({each.id: each for each in rows if each.variant not in out and _is_baseline(each, row)})
    return write_export(kept.values(), path, origin="bundled")


def _is_baseline(each: Measurement, of: Measurement) -> bool:
    same_final = (each.session, each.stage, each.status) == (of.session, of.stage, "ok")
    return same_final and of.baseline_us is not None and each.median_us == of.baseline_us


def read_header(path: Path) -> ExportHeader:
    """The header alone; see :func:`read_export`."""
    return _header(path, packed.first_line(path, LINE_LIMIT))


def read_lines(path: Path) -> tuple[ExportHeader, Iterator[bytes]]:
    """The header, and the lines that it counted and hashed, one for each row; what they hold is not checked yet."""
    text = packed.read(path, LINE_LIMIT)
    if text.startswith(MAGIC):
        raise InvalidInput(f"{shown_path(path)} holds a database, not an export: use flashtune db merge")
    first, newline, _ = text[: LINE_LIMIT + 2].partition(b"\n")
    header, start = _header(path, first), len(first + newline)
    rows = text.count(b"\n", start)
    if rows != header.rows or not text.endswith(b"\n"):
        raise InvalidInput(f"{shown_path(path)}: the header says {header.rows} rows, there are {rows} (cut off?)")
    digest = hashlib.sha256(memoryview(text)[start:]).hexdigest()
    if digest != header.digest:
        raise InvalidInput(f"{shown_path(path)}: the rows were changed since it was written (digest {digest})")
    return header, _lines(text, start)


def _lines(text: bytes, start: int) -> Iterator[bytes]:
    """Line by line, since all at once would take many times as much memory; of an overlong one only its beginning."""
    while start < len(text):
        end = text.index(b"\n", start)
        yield text[start : min(end, start + LINE_LIMIT + 1)]
        start = end + 1


def read_export(path: Path, *, skip_invalid: bool = False) -> Export:
    """Reads a file strictly: the first thing that is wrong raises `InvalidInput` with path, line and reason.

    With ``skip_invalid`` a row that this version can't take is counted in ``refused`` instead; a header that is wrong,
    or rows that are not those the header counted, still raise.
    """
    (header, lines), name = read_lines(path), shown_path(path)
    measurements: dict[str, Measurement] = {}
    refused = Unreadable()
    for number, line in enumerate(lines, start=2):
        try:
            row = measurement_from_json(parse_line(line))
            if row.id in measurements:
                raise InvalidInput(f"id {row.id} is there twice")
            measurements[row.id] = row
        except InvalidInput as error:
            if not skip_invalid:
                raise InvalidInput(f"{name}, line {number}: {error}") from error
            refused.add(f"{name}, line {number}", error)
    return Export(header, tuple(measurements.values()), refused)


def _header(path: Path, line: bytes) -> ExportHeader:
    try:
        data = parse_line(line)
        if not isinstance(data, dict) or "schema" not in data:
            raise InvalidInput("it is not a header")
        if data["schema"] not in READABLE:
            raise InvalidInput(f"schema={shown(data['schema'])} is not known. Known: {', '.join(READABLE)}")
        if set(data) != {"digest", "gpu_keys", "origin", "rows", "schema"}:
            raise InvalidInput("the header needs exactly digest, gpu_keys, origin, rows and schema")
        keys, rows = data["gpu_keys"], data["rows"]
        if not isinstance(keys, list) or not all(isinstance(each, str) for each in keys):
            raise InvalidInput("gpu_keys must be a list of text")
        if plain(data["origin"]) is not data["origin"]:  # it goes into the log of whoever imports it
            raise InvalidInput(f"origin={shown(data['origin'])} must be at most 200 printable characters")
        if type(rows) is not int or rows < 0 or not isinstance(data["digest"], str):
            raise InvalidInput("rows must be a count and digest text")
    except InvalidInput as error:
        raise InvalidInput(f"{shown_path(path)}, line 1: {error}") from error
    return ExportHeader(**{**data, "gpu_keys": tuple(keys)})


def _no_constant(name: str) -> None:
    raise InvalidInput(f"{name} is not a number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise InvalidInput("a name stands twice in one object")
    return data


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_twins)


def parse_line(line: bytes) -> Any:
    """One line of JSON in which every name stands once and every number is a number."""
    if len(line) > LINE_LIMIT:
        raise InvalidInput(f"the line has more than {LINE_LIMIT} bytes")
    try:
        return _DECODER.decode(line.decode())
    except InvalidInput:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {line[:40]!r}") from error


def _order(each: Measurement) -> tuple[object, ...]:
    stage = -STAGES.index(each.stage)
    return each.gpu_key, each.problem.key, stage, each.variant, each.created, each.id
