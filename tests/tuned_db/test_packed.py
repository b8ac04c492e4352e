"""Packed exports: the same bytes each time, read by content, and refused before they fill the memory."""

from __future__ import annotations

import dataclasses
import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange import packed
from flashtune.tuned_db.exchange.export_file import LINE_LIMIT, read_export, read_header, write_export
from flashtune.tuned_db.records.measurement import Measurement, new_id
from flashtune.tuned_db.sharing.merge import Added, add_file, export_database
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]


@pytest.fixture
def rows(measurement: Make, pair: Make) -> list[Measurement]:
    return [measurement(config=pair(block=block, stages=stages)) for block in (16, 32, 64) for stages in (1, 2)]


@pytest.fixture
def file(tmp_path: Path, rows: list[Measurement]) -> Path:
    write_export(rows, tmp_path / "rows.jsonl.gz", origin="here")
    return tmp_path / "rows.jsonl.gz"


def test_a_packed_export_is_the_plain_one_in_fewer_bytes(tmp_path: Path, file: Path, rows: list[Measurement]) -> None:
    plain = tmp_path / "rows.jsonl"
    header = write_export(rows, plain, origin="here")
    assert gzip.decompress(file.read_bytes()) == plain.read_bytes()
    assert file.stat().st_size < plain.stat().st_size / 2
    assert read_export(file) == read_export(plain)
    assert read_header(file) == header


def test_the_same_rows_give_the_same_bytes_under_any_name_at_any_time(
    tmp_path: Path, file: Path, rows: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 2e9)
    random.Random(1).shuffle(rows)
    write_export(rows, tmp_path / "other.GZ", origin="here")
    assert (tmp_path / "other.GZ").read_bytes() == file.read_bytes()
    assert file.read_bytes()[3:8] == bytes(5)  # no name and no date
    assert b"rows" not in file.read_bytes()[:30]


def test_what_is_packed_is_known_by_its_content(tmp_path: Path, file: Path, rows: list[Measurement]) -> None:
    renamed = file.rename(tmp_path / "rows.jsonl")
    assert len(read_export(renamed).measurements) == len(rows)
    plain = tmp_path / "plain.gz"
    plain.write_bytes(gzip.decompress(renamed.read_bytes()))
    assert read_export(plain) == read_export(renamed)


def test_one_that_gzip_made_is_read_too(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "by-gzip.gz"
    with gzip.open(other, "wb", compresslevel=1) as out:
        out.write(gzip.decompress(file.read_bytes()))
    assert b"by-gzip" in other.read_bytes()[:30]
    assert read_export(other) == read_export(file)


def test_it_travels_from_database_to_database(tmp_path: Path, store: Store, rows: list[Measurement]) -> None:
    store.record_all(rows)
    target = tmp_path / "out.jsonl.gz"
    assert export_database(store, target) == len(rows)
    before = target.read_bytes()
    assert export_database(store, target) == len(rows)  # an export that is there may be replaced
    assert target.read_bytes() == before
    with Store.open(tmp_path / "other.db") as other:
        assert add_file(other, target) == Added(new=len(rows), known=0)
        assert other.measurements() == store.measurements()


def test_a_packed_file_that_is_no_export_is_not_replaced(tmp_path: Path, store: Store, rows: list[Measurement]) -> None:
    store.record_all(rows)
    target = tmp_path / "photos.gz"
    target.write_bytes(gzip.compress(b"precious"))
    with pytest.raises(InvalidInput, match="no flashtune export"):
        export_database(store, target)
    assert gzip.decompress(target.read_bytes()) == b"precious"


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "one endless line": (lambda: gzip.compress(bytes(30 * 2**20)), rf"line 1: the line has more than {LINE_LIMIT}"),
    "short lines": (
        lambda: gzip.compress(b"\n" * (packed.ROWS_LIMIT + 10)),
        r"more than 2000000 lines, which no export has",
    ),
    "long lines": (lambda: gzip.compress((b"x" * 1000 + b"\n") * 20_000), r"more than 10485760 bytes when unpacked"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(packed, "UNPACKED_LIMIT", 10 * 2**20)
    make, reason = BOMBS[kind]
    file = tmp_path / "bomb.gz"
    file.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=rf"bomb\.gz.*{reason}"):
            read_export(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * packed.UNPACKED_LIMIT


def test_the_header_of_a_bomb_costs_one_line(tmp_path: Path) -> None:
    file = tmp_path / "bomb.gz"
    file.write_bytes(gzip.compress(bytes(30 * 2**20)))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=rf"more than {LINE_LIMIT} bytes"):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, rows: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "UNPACKED_LIMIT", 1000)
    with pytest.raises(InvalidInput, match=r"choose a name that ends in \.jsonl"):
        write_export(rows, tmp_path / "rows.gz", origin="here")
    assert list(tmp_path.iterdir()) == []
    write_export(rows, tmp_path / "rows.jsonl", origin="here")


def test_a_small_file_can_t_turn_out_to_be_hundreds_of_megabytes(tmp_path: Path) -> None:
    """Half a megabyte of gzip is that much of spaces, in lines that are not too long."""
    file = tmp_path / "bomb.gz"
    file.write_bytes(gzip.compress((b" " * 60_000 + b"\n") * 2000))
    assert file.stat().st_size < 2**18
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=r"bomb\.gz has more than 128 times its bytes when unpacked"):
            read_export(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * packed.UNPACKED_SMALL


def test_one_row_again_and_again_is_written_and_read_packed(
    tmp_path: Path, rows: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rows are more alike than these, which differ in their ids alone."""
    monkeypatch.setattr(packed, "UNPACKED_SMALL", 0)
    alike = [dataclasses.replace(rows[0], id=new_id()) for _ in range(2000)]
    file = tmp_path / "rows.jsonl.gz"
    write_export(alike, file, origin="here")
    assert len(read_export(file).measurements) == len(alike)
    monkeypatch.setattr(packed, "UNPACKED_TIMES", 2)
    with pytest.raises(InvalidInput, match="more than 2 times its bytes when unpacked"):
        read_export(file)
    with pytest.raises(InvalidInput, match=r"choose a name that ends in \.jsonl"):
        write_export(alike, tmp_path / "other.gz", origin="here")
    assert list(tmp_path.iterdir()) == [file]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in half": (lambda data: data[: len(data) // 2], "cut off"),
    "cut by one byte": (lambda data: data[:-1], "cut off"),
    "only the magic": (lambda data: data[:2], "cut off"),
    "garbage inside": (lambda data: data[:20] + b"\xff" * 40 + data[60:], "damaged"),
    "another checksum": (lambda data: data[:-8] + bytes(8), "damaged"),
    "two in one": (lambda data: data + data, "follows the end"),
    "something behind": (lambda data: data + b"x", "follows the end"),
    "a database inside": (lambda data: gzip.compress(b"SQLite format 3\0" + bytes(5000)), "holds a database"),
    "packed twice": (gzip.compress, "line 1: not JSON"),
    "another text": (lambda data: gzip.compress(gzip.decompress(data)[:-3]), r"cut off\?"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_whole_is_refused_and_left_alone(file: Path, how: str) -> None:
    change, reason = BROKEN[how]
    file.write_bytes(change(file.read_bytes()))
    before = file.read_bytes()
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl\.gz.*{reason}"):
        read_export(file)
    assert file.read_bytes() == before


def test_random_damage_never_gets_through(file: Path) -> None:
    whole, text = file.read_bytes(), read_export(file)
    refused = 0
    for seed in range(300):
        random_ = random.Random(seed)
        data = bytearray(whole)
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        file.write_bytes(data)
        try:
            assert read_export(file) == text  # the time, level and system of a gzip header say nothing of the rows
        except InvalidInput:
            refused += 1
    assert refused > 280


def test_every_piece_boundary_gives_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = read_export(file)
    for size in (1, 2, 7, 100, 4096):
        monkeypatch.setattr(packed, "_PIECE", size)
        assert read_export(file) == wanted


def test_a_flush_without_text_is_not_the_end(tmp_path: Path, file: Path) -> None:
    """Full flushes make empty blocks: input that gives no output yet."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    text = gzip.decompress(file.read_bytes())
    parts = [deflate.compress(text[:100]), *(deflate.flush(zlib.Z_FULL_FLUSH) for _ in range(50))]
    other = tmp_path / "flushed.gz"
    other.write_bytes(b"".join([*parts, deflate.compress(text[100:]), deflate.flush()]))
    assert read_export(other) == read_export(file)
