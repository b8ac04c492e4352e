"""Files of measurements: the same rows give the same bytes, and nothing that was tampered with gets in."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_files import refit

from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import read_export, read_header, write_bundled, write_export
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.records.measurement import Measurement

Make = Callable[..., Any]


@pytest.fixture
def rows(measurement: Make, pair: Make, problem: Make) -> list[Measurement]:
    return [
        measurement(
            config=pair(block=block, stages=stages), problem=problem(batch=batch), median_us=50.0 + block / stages
        )
        for block in (16, 32, 64)
        for stages in (1, 2)
        for batch in (1, 8)
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def rewrite(file: Path, change: Callable[[dict[str, Any]], object], line: int = 1) -> None:
    """Changes one row and makes the header fit, as someone would who wants it to get in."""
    header, *lines = file.read_bytes().splitlines()
    data = json.loads(lines[line - 1])
    change(data)
    lines[line - 1] = json.dumps(data).encode()
    refit(file, header, lines)


def test_writing_and_reading_is_the_identity(file: Path, rows: list[Measurement]) -> None:
    header = write_export(rows, file, origin="here")
    export = read_export(file)
    assert {each.id: each for each in export.measurements} == {each.id: each for each in rows}
    assert (header.origin, header.gpu_keys, header.rows) == ("here", (rows[0].gpu_key,), len(rows))
    assert export.header == read_header(file) == header


def test_the_same_rows_give_the_same_bytes(file: Path, rows: list[Measurement]) -> None:
    write_export(rows, file, origin="here")
    before = file.read_bytes()
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        write_export(rows + rows[:3], file, origin="here")
        assert file.read_bytes() == before
    write_export(read_export(file).measurements, file, origin="here")
    assert file.read_bytes() == before


def test_rows_are_ascii_lines_with_sorted_names(file: Path, measurement: Make) -> None:
    write_export([measurement(message="größer\nals", unit="GPU é")], file, origin="hier ü")
    header, row, *rest = file.read_text("ascii").split("\n")
    assert rest == [""]
    assert list(json.loads(row)) == sorted(json.loads(row))
    assert json.loads(header)["rows"] == 1


def test_nothing_is_a_file_too(file: Path) -> None:
    write_export([], file, origin="here")
    assert read_export(file).measurements == ()


def test_two_rows_under_one_id_are_refused(file: Path, measurement: Make) -> None:
    first = measurement()
    with pytest.raises(InvalidInput, match=first.id):
        write_export([first, measurement(id=first.id, median_us=1.0)], file, origin="here")
    assert not file.exists()


def test_no_time_is_not_written_as_ok(file: Path, measurement: Make) -> None:
    write_export([measurement(median_us=float("nan"))], file, origin="here")
    assert [each.status for each in read_export(file).measurements] == ["failed"]


TAMPERED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "code": (lambda row: row["config"].update(block="64\n__device__ int x=1;"), "block must be int"),
    "template": (lambda row: row["config"].update(block="{{ 7*7 }}"), "block must be int"),
    "template in a word": (lambda row: row["config"].update(order="{{ 7*7 }}"), "order=.* is not allowed"),
    "unlisted value": (lambda row: row["config"].update(block=48), "block=.*48.* is not allowed"),
    "pickle as text": (lambda row: row.update(config="gASVDAAAAAAAAACMBHBvc2l4lC4="), "config must be a JSON object"),
    "another config key": (lambda row: row["config"].update(evil=1), "no field '?evil"),
    "another row key": (lambda row: row.update(evil=1), "no field 'evil'"),
    "no status": (lambda row: row.pop("status"), "needs status"),
    "unlisted status": (lambda row: row.update(status="perfect"), "status='perfect' is not known"),
    "time of zero": (lambda row: row.update(median_us=0), "median_us=0 must be from"),
    "negative time": (lambda row: row.update(median_us=-5), "median_us=-5 must be from"),
    "no time": (lambda row: row.pop("median_us"), "needs median_us"),
    "text for a time": (lambda row: row.update(median_us="80"), "median_us must be a number"),
    "huge number": (lambda row: row.update(registers=10**30), "registers=.* must be from 0"),
    "path in a name": (lambda row: row.update(family="../../etc/passwd"), "is not known"),
    "wrong shape": (lambda row: row["problem"].update(num_heads=3, num_heads_kv=2), "num_heads=3 must be a multiple"),
    "control characters": (lambda row: row.update(gpu_name="h200\x1b[2J"), "printable"),
    "list for text": (lambda row: row.update(unit=["a"]), "unit must be text"),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tampered_row_is_refused_with_its_line(file: Path, rows: list[Measurement], how: str) -> None:
    """D82, in an export."""
    change, reason = TAMPERED[how]
    write_export(rows, file, origin="here")
    rewrite(file, change, line=3)
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl, line 4: .*{reason}"):
        read_export(file)
    export = read_export(file, skip_invalid=True)
    assert len(export.measurements) == len(rows) - 1
    assert export.refused.rows == len(export.refused.reasons) == 1


LINES: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{'id': 1}", "not JSON"),
    "NaN": (b'{"median_us": NaN}', "NaN is not a number"),
    "infinity": (b'{"median_us": -Infinity}', "-Infinity is not a number"),
    "a name twice": (b'{"id": "a", "id": "b"}', "a name stands twice"),
    "deep": (b"[" * 60_000, "not JSON"),
    "endless digits": (b'{"seed": ' + b"9" * 6000 + b"}", "not JSON"),
    "not UTF-8": (b'{"id": "\xff\xfe"}', "not JSON"),
    "pickle": (pickle.dumps({"id": 1}).replace(b"\n", b" "), "not JSON"),
    "a list": (b"[1, 2]", "a measurement is a JSON object"),
    "empty": (b"", "not JSON"),
    "too long": (b'"' + b"x" * 70_000 + b'"', "the line has more than 65536 bytes"),
}


@pytest.mark.parametrize("how", LINES)
def test_a_line_that_is_no_row_is_refused(file: Path, rows: list[Measurement], how: str) -> None:
    line, reason = LINES[how]
    write_export(rows, file, origin="here")
    header, *lines = file.read_bytes().splitlines()
    refit(file, header, [*lines, line])
    with pytest.raises(InvalidInput, match=rf"line {len(rows) + 2}: {reason}"):
        read_export(file)


def test_a_row_twice_is_refused(file: Path, rows: list[Measurement]) -> None:
    write_export(rows, file, origin="here")
    header, *lines = file.read_bytes().splitlines()
    refit(file, header, [*lines, lines[0]])
    with pytest.raises(InvalidInput, match="is there twice"):
        read_export(file)


HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "zero bytes": (lambda data: b"", "line 1: not JSON"),
    "a pickle": (lambda data: pickle.dumps(["rows"]), "line 1: not JSON"),
    "no header": (lambda data: data.partition(b"\n")[2], "line 1: it is not a header"),
    "another schema": (lambda data: data.replace(b"measurements/3", b"measurements/9"), "measurements/9' is not known"),
    "another header key": (lambda data: data.replace(b'{"digest"', b'{"x":1,"digest"', 1), "needs exactly"),
    "a count that is text": (lambda data: data.replace(b'"rows":12', b'"rows":"12"', 1), "rows must be a count"),
    "cut in half": (lambda data: data[: len(data) // 2], r"cut off\?"),
    "cut by one byte": (lambda data: data[:-1], r"cut off\?"),
    "a byte changed": (lambda data: data.replace(b"580.159", b"580.160", 1), "were changed since"),
    "a row removed": (lambda data: b"\n".join(data.split(b"\n")[:-2]) + b"\n", r"says 12 rows, there are 11"),
}


@pytest.mark.parametrize("how", HEADERS)
@pytest.mark.parametrize("skip_invalid", [False, True])
def test_a_file_that_is_not_whole_is_refused(file: Path, rows: list[Measurement], how: str, skip_invalid: bool) -> None:
    change, reason = HEADERS[how]
    write_export(rows, file, origin="here")
    file.write_bytes(change(file.read_bytes()))
    before = file.read_bytes()
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl.*{reason}"):
        read_export(file, skip_invalid=skip_invalid)
    assert file.read_bytes() == before


def test_files_of_the_first_schema_are_read(file: Path, rows: list[Measurement]) -> None:
    write_export(rows, file, origin="here")
    file.write_bytes(file.read_bytes().replace(b"measurements/3", b"measurements/1"))
    first = read_export(file)
    assert {each.id for each in first.measurements} == {each.id for each in rows}
    assert {each.ratio_low for each in first.measurements} == {None}


def test_intervals_and_readings_travel(file: Path, measurement: Make) -> None:
    row = measurement(
        paired_ratio=0.8, ratio_low=0.79, ratio_high=0.81, rounds=25,
        power_w=612.5, temperature_c=61.0, throttle="", contended=False,
    )  # fmt: skip
    write_export([row], file, origin="here")
    assert read_export(file).measurements == (row,)


def test_random_damage_never_gets_through(file: Path, rows: list[Measurement]) -> None:
    write_export(rows, file, origin="here")
    whole = file.read_bytes()
    body = whole.index(b"\n") + 1
    for seed in range(150):
        random_ = random.Random(seed)
        data = bytearray(whole)
        place = random_.randrange(body, len(data))
        data[place] ^= 1 << random_.randrange(8)
        file.write_bytes(data)
        with pytest.raises(InvalidInput, match=r"rows\.jsonl"):
            read_export(file)


def test_bundled_files_keep_winners_and_their_evidence(file: Path, measurement: Make, pair: Make) -> None:
    default = measurement(config=pair(block=64, stages=1), median_us=100.0)
    finals = [
        measurement(config=pair(block=block, stages=2), median_us=60.0 + block / 10) for block in (16, 32, 128, 256)
    ]
    again = measurement(config=finals[0].config, session="second", median_us=61.0)
    fast_but_wrong = measurement(config=pair(block=32, stages=3), median_us=1.0)
    verdict = measurement(config=fast_but_wrong.config, status="wrong", median_us=None)
    screens = [measurement(config=pair(block=block, stages=3), stage="screen", median_us=5.0) for block in (16, 64)]
    everything = [default, *finals, again, fast_but_wrong, verdict, *screens]
    write_bundled(everything, file)
    kept = read_export(file)
    assert kept.header.origin == "bundled"
    assert {each.id for each in kept.measurements} == {default.id, again.id, *(each.id for each in finals[:3])}
    assert rank(kept.measurements)[0] == rank(everything)[0]


def test_bundled_files_do_not_depend_on_order(file: Path, rows: list[Measurement]) -> None:
    first = write_bundled(rows, file)
    assert write_bundled(reversed(rows), file) == first
