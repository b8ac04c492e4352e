"""Databases that somebody made to do harm, by their bytes and by what lies beside them; see `hostile_databases.py`."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from hostile_databases import ENDLESS, ESCAPES, hostile, run

MAGIC = bytes.fromhex("d9d505f920a163d7")
PAGE = 4096


def beside(path: Path, suffix: str) -> Path:
    return Path(f"{path}{suffix}")


def victim(path: Path) -> Path:
    return path.parent.parent / "victims" / "thesis.tex"


def journal(path: Path, name: bytes, head: bool = True) -> None:
    """One that names a file for SQLite to delete."""
    pages = path.stat().st_size // PAGE
    start = (MAGIC + struct.pack(">IIIII", 0, 1, pages, 512, PAGE)).ljust(512, b"\0") if head else bytes(512)
    end = struct.pack(">I", 0x40000000 // PAGE + 1) + name + struct.pack(">II", len(name), sum(name)) + MAGIC
    beside(path, "-journal").write_bytes(start + end)


@hostile("journals")
def journal_that_names_a_file(path: Path, draw: random.Random) -> None:
    journal(path, os.fsencode(victim(path)))


@hostile("journals")
def journal_that_names_a_relative_file(path: Path, draw: random.Random) -> None:
    journal(path, b"../victims/thesis.tex")


@hostile("journals")
def journal_that_has_ended(path: Path, draw: random.Random) -> None:
    journal(path, os.fsencode(victim(path)), head=False)


@hostile("journals")
def journal_of_other_pages(path: Path, draw: random.Random) -> None:
    """A transaction that was not ended: with it goes another first page."""
    pages = path.stat().st_size // PAGE
    page = bytearray(draw.randbytes(PAGE))
    total = (7 + sum(page[at] for at in range(PAGE - 200, 0, -200))) % 2**32
    head = (MAGIC + struct.pack(">IIIII", 1, 7, pages, 512, PAGE)).ljust(512, b"\0")
    beside(path, "-journal").write_bytes(head + struct.pack(">I", 1) + page + struct.pack(">I", total))


@hostile("journals")
def journal_of_junk(path: Path, draw: random.Random) -> None:
    beside(path, "-journal").write_bytes(draw.randbytes(100_000))


@hostile("logs")
def log_of_junk(path: Path, draw: random.Random) -> None:
    beside(path, "-wal").write_bytes(draw.randbytes(100_000))


@hostile("logs")
def log_that_is_torn(path: Path, draw: random.Random) -> None:
    logged(path, "UPDATE measurement SET message = hex(randomblob(500))")
    log = beside(path, "-wal")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2 + 11])


@hostile("logs")
def log_with_a_view(path: Path, draw: random.Random) -> None:
    """The file itself is sound."""
    select = f"{ENDLESS} SELECT i AS id, '' AS uuid, '' AS created FROM n WHERE i < 0"
    logged(path, "ALTER TABLE origin RENAME TO old", f"CREATE VIEW origin AS {select}")


@hostile("logs")
def log_of_another_database(path: Path, draw: random.Random) -> None:
    other = path.with_name("other.db")
    with closing(sqlite3.connect(other)) as plain:
        plain.execute("PRAGMA journal_mode = WAL")
        plain.execute(f'CREATE TABLE "{ESCAPES}" (x)')
        plain.commit()
        shutil.copy(beside(other, "-wal"), beside(path, "-wal"))
    other.unlink()


@hostile("logs")
def log_of_terabytes(path: Path, draw: random.Random) -> None:
    logged(path, "UPDATE measurement SET message = 'x'")
    os.truncate(beside(path, "-wal"), 2**41)


@hostile("logs")
def log_of_a_newer_schema(path: Path, draw: random.Random) -> None:
    logged(path, "PRAGMA user_version = 2147483647")


@hostile("logs")
def shared_memory_of_junk(path: Path, draw: random.Random) -> None:
    logged(path, "UPDATE measurement SET message = 'x'")
    beside(path, "-shm").write_bytes(draw.randbytes(32768))


def logged(path: Path, *statements: str) -> None:
    """Statements that are in the log alone."""
    plain = sqlite3.connect(path, isolation_level=None)
    plain.execute("PRAGMA journal_mode = WAL")
    plain.execute("PRAGMA legacy_alter_table = ON")
    for each in statements:
        plain.execute(each)
    kept = beside(path, "-wal").read_bytes(), path.read_bytes()
    plain.close()
    beside(path, "-wal").write_bytes(kept[0])
    path.write_bytes(kept[1])


def side_file(what: str, suffix: str) -> None:
    def make(path: Path, draw: random.Random) -> None:
        place = beside(path, f"-{suffix}")
        if what == "link":
            place.symlink_to(victim(path))
        elif what == "dangling":
            place.symlink_to(victim(path).with_name("new.tex"))
        elif what == "pipe":
            os.mkfifo(place)
        else:
            place.mkdir()

    make.__name__ = f"{suffix}_that_is_a_{what}"
    hostile("side files that are none")(make)


for _suffix in ("journal", "wal", "shm"):
    for _what in ("link", "dangling", "pipe", "folder"):
        side_file(_what, _suffix)


@hostile("cut off")
def cut_in_a_page(path: Path, draw: random.Random) -> None:
    os.truncate(path, path.stat().st_size - PAGE // 2)


@hostile("cut off")
def cut_in_half(path: Path, draw: random.Random) -> None:
    os.truncate(path, path.stat().st_size // 2)


@hostile("cut off")
def first_page_alone(path: Path, draw: random.Random) -> None:
    os.truncate(path, PAGE)


@hostile("headers")
def a_header_and_nothing_else(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:100] + bytes(PAGE - 100))


def header(name: str, at: int, value: bytes) -> None:
    def make(path: Path, draw: random.Random) -> None:
        data = bytearray(path.read_bytes())
        data[at : at + len(value)] = value
        path.write_bytes(data)

    make.__name__ = name
    hostile("headers")(make)


header("pages_without_end", 28, b"\xff\xff\xff\xfe")
header("no_pages", 28, bytes(4))
header("pages_of_another_size", 16, b"\x02\x00")
header("page_size_of_nothing", 16, b"\0\0")
header("reserved_bytes", 20, b"\xff")
header("no_encoding", 56, b"\0\0\0\x07")
header("schema_format_of_later", 44, b"\0\0\0\x09")
header("write_version_of_later", 18, b"\x09\x01")
header("free_pages_that_are_in_use", 32, b"\0\0\0\x03\0\0\xff\xff")


@hostile("headers")
def terabytes(path: Path, draw: random.Random) -> None:
    os.truncate(path, 2**41)


def root_of(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as plain:
        (page,) = plain.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [table]).fetchone()
    return int(page)


def fan(child: int, cells: int = 300) -> bytes:
    """A page of a table's tree of which all children are one page."""
    page = bytearray(PAGE)
    page[0] = 5
    struct.pack_into(">HHHBI", page, 1, 0, cells, PAGE - 7 * cells, 0, child)
    for cell in range(cells):
        place = PAGE - 7 * (cell + 1)
        struct.pack_into(">H", page, 12 + 2 * cell, place)
        struct.pack_into(">IBBB", page, place, child, 0x81, 0x80 | cell >> 7, cell & 0x7F)
    return bytes(page)


def tree(name: str, table: str, levels: int) -> None:
    """A table of some thousand bytes with 300 to the power of ``levels`` as many rows."""

    def make(path: Path, draw: random.Random) -> None:
        root = root_of(path, table)
        data = bytearray(path.read_bytes())
        leaf = len(data) // PAGE + 1
        data += data[PAGE * (root - 1) : PAGE * root]  # what it was
        below = leaf
        for _ in range(levels - 1):
            data += fan(below)
            below = len(data) // PAGE
        data[PAGE * (root - 1) : PAGE * root] = fan(below)
        struct.pack_into(">I", data, 28, len(data) // PAGE)
        path.write_bytes(data)

    make.__name__ = name
    hostile("trees")(make)


tree("endless_measurements", "measurement", 9)
tree("endless_devices", "device", 9)
tree("endless_origins", "origin", 9)
tree("many_variants", "variant", 2)


@hostile("trees")
def tree_that_is_its_own_child(path: Path, draw: random.Random) -> None:
    root = root_of(path, "measurement")
    data = bytearray(path.read_bytes())
    data[PAGE * (root - 1) : PAGE * root] = fan(root)
    path.write_bytes(data)


@hostile("trees")
def overflow_that_is_a_ring(path: Path, draw: random.Random) -> None:
    mark = "overflow" * 2000
    run(path, "UPDATE measurement SET message = ? WHERE rowid = 1", values=(mark,))
    data = bytearray(path.read_bytes())
    pages = [at for at in range(0, len(data), PAGE) if data[at + 4 : at + PAGE].count(b"overflow") > 400]
    assert pages
    for at in pages:
        struct.pack_into(">I", data, at, pages[0] // PAGE + 1)
    path.write_bytes(data)


@hostile("trees")
def free_pages_that_are_a_ring(path: Path, draw: random.Random) -> None:
    run(path, "DELETE FROM measurement WHERE rowid % 2")
    data = bytearray(path.read_bytes())
    last = len(data) // PAGE
    data += struct.pack(">II", last + 1, 0).ljust(PAGE, b"\0")
    struct.pack_into(">II", data, 32, last + 1, 10)
    struct.pack_into(">I", data, 28, last + 1)
    path.write_bytes(data)


def flipped(number: int) -> None:
    """Wrong bytes, of which ``number`` is the seed."""

    def make(path: Path, draw: random.Random) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice((3, 30, 300))):
            data[draw.randrange(100 if number % 3 == 0 else len(data))] = draw.randrange(256)
        path.write_bytes(data)

    make.__name__ = f"flipped_{number}"
    hostile("wrong bytes")(make)


for _number in range(8):
    flipped(_number)
