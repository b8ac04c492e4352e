"""What befalls the file of an export on its way: other line ends, and sizes that are meant to harm its reader."""

from __future__ import annotations

import codecs
import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_files import refit

from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange import packed
from flashtune.tuned_db.exchange.export_file import LINE_LIMIT, read_export, read_header, write_export
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.records.parse import REASONS

Make = Callable[..., Any]
WIDE = "\U00010380"
"""A letter that takes twelve bytes as JSON."""


@pytest.fixture
def rows(measurement: Make, problem: Make) -> list[Measurement]:
    return [measurement(problem=problem(batch=batch)) for batch in (1, 2, 4, 8)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


CONVERTED: dict[str, Callable[[bytes], bytes]] = {
    "line ends": lambda text: text.replace(b"\n", b"\r\n"),
    "byte order mark": lambda text: codecs.BOM_UTF8 + text,
    "both": lambda text: codecs.BOM_UTF8 + text.replace(b"\n", b"\r\n"),
    "some line ends": lambda text: text.replace(b"\n", b"\r\n", 3),
}


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("how", CONVERTED)
def test_what_git_and_editors_do_to_line_ends_changes_nothing(
    file: Path, rows: list[Measurement], how: str, zipped: bool
) -> None:
    """F12: as git with core.autocrlf; it was called tampered with."""
    write_export(rows, file, origin="here")
    wanted, text = read_export(file), CONVERTED[how](file.read_bytes())
    file.write_bytes(gzip.compress(text) if zipped else text)
    assert read_header(file) == wanted.header
    assert read_export(file) == wanted
    changed = text.replace(b"580.159", b"580.160", 1)
    file.write_bytes(gzip.compress(changed) if zipped else changed)
    with pytest.raises(InvalidInput, match="were changed since"):
        read_export(file)


def test_rows_hold_no_line_end_of_their_own(file: Path, measurement: Make) -> None:
    """F12: so that to undo what was done to the ends of lines is exact."""
    write_export([measurement(message="a\r\nb\rc\nd", unit="")], file, origin="here")
    assert b"\r" not in file.read_bytes()
    before = read_export(file)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert read_export(file) == before
    file.write_bytes(file.read_bytes()[:-3] + b"\r}\r\n")
    with pytest.raises(InvalidInput, match="were changed since"):
        read_export(file)


def test_of_rows_that_are_passed_over_only_a_count_and_the_first_reasons_are_kept(file: Path) -> None:
    """m7: a sentence for each took 80 times the memory of the file."""
    write_export([], file, origin="here")
    count = 100_000
    refit(file, file.read_bytes().splitlines()[0], [b"0"] * count)
    tracemalloc.start()
    try:
        export = read_export(file, skip_invalid=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (export.measurements, export.refused.rows, len(export.refused.reasons)) == ((), count, REASONS)
    assert export.refused.reasons[0] == f"{file}, line 2: a measurement is a JSON object, not 0"
    assert peak < 20 * file.stat().st_size


def test_more_lines_than_an_export_has_are_refused_before_they_are_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m7: 10 MB of them took 13 s and 811 MB."""
    write_export([], file, origin="here")
    refit(file, file.read_bytes().splitlines()[0], [b"0"] * 5_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="has more than 2000000 lines, which no export has"):
            read_export(file, skip_invalid=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * file.stat().st_size
    monkeypatch.setattr(packed, "PLAIN_LIMIT", 100_000)
    with pytest.raises(InvalidInput, match="has more than 100000 bytes"):
        read_export(file, skip_invalid=True)


def test_a_line_without_an_end_is_not_read_to_its_end(file: Path) -> None:
    """A file may say that it has gigabytes of zeros and take no room for them."""
    write_export([], file, origin="here")
    for start in (b"", file.read_bytes()):
        with file.open("wb") as out:
            out.write(start)
            out.truncate(2**40)
        tracemalloc.start()
        try:
            with pytest.raises(InvalidInput, match=f"line [12]: the line has more than {LINE_LIMIT} bytes"):
                read_export(file)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


def test_a_file_of_more_device_models_than_a_header_holds_is_read_too(file: Path, measurement: Make) -> None:
    """M5: made-up models would keep their database from being exported for ever."""
    rows = [measurement(gpu_key=f"9.0a/{number:03}{WIDE * 190}") for number in range(40)]
    write_export(rows[:2], file, origin="here")
    assert read_header(file).gpu_keys == tuple(each.gpu_key for each in rows[:2])
    header = write_export(rows, file, origin="here")
    assert (header.gpu_keys, header.rows) == ((), len(rows))
    assert read_header(file) == header
    assert {each.id for each in read_export(file).measurements} == {each.id for each in rows}
