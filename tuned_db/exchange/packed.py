"""The text of an export's file, plain or as gzip: the same text gives the same bytes, and all of it has a limit.

A packed file is known by its first bytes, not by its name. It comes from strangers and a thousandth of it may be all
that travels, so it is unpacked piece by piece and refused as soon as it is more than an export can be. Git and editors
may have put ``\\r\\n`` for each end of a line, or a byte order mark before the first: rows hold no raw ``\\r``, so the
text is what it was once both are taken away.
"""

from __future__ import annotations

import codecs
import io
import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from flashtune.errors import InvalidInput
from flashtune.files import errors_name, open_given, open_regular, shown_path

SUFFIX = ".gz"
PLAIN_LIMIT = 2 * 2**30
"""Bytes of an export."""
UNPACKED_LIMIT = 512 * 2**20
"""Bytes of a packed export when unpacked: about 700 000 rows."""
UNPACKED_SMALL, UNPACKED_TIMES = 2**25, 128
"""Bytes that any packed export may have when unpacked, and how many for each of its own: measurements have 8 to 10, and
one row again and again, under other ids, 37. Gzip can have 1032, so half a megabyte would fill `UNPACKED_LIMIT`."""
ROWS_LIMIT = 2_000_000
"""Lines of an export: many short ones would take much more memory than their bytes."""

_MAGIC = b"\x1f\x8b"
# Deflate, no name, no date, of an unknown system: nothing of where and when it was made.
_HEAD = _MAGIC + b"\x08\x00" + bytes(4) + b"\x00\xff"
_PIECE = 2**16
_NO_EXPORT = "when unpacked, which no packed export has. If you trust it, gunzip it first"


def is_packed_name(path: Path) -> bool:
    """Whether a file of this name is to be written packed."""
    return path.suffix.lower() == SUFFIX


def file_content(path: Path, text: bytes) -> bytes:
    """What a file of that name holds for ``text``. Raises `InvalidInput` if `read` would refuse it later."""
    packed = is_packed_name(path)
    limit, lines = UNPACKED_LIMIT if packed else PLAIN_LIMIT, text.count(b"\n")
    if len(text) <= limit and lines <= ROWS_LIMIT:
        content = pack(text) if packed else text
        if packed and len(text) > _most(len(content)):
            raise InvalidInput(
                f"{shown_path(path)} would have more than {UNPACKED_TIMES} times its bytes when unpacked, which is "
                "refused where it is read: choose a name that ends in .jsonl"
            )
        return content
    way_out = "choose a name that ends in .jsonl" if packed and lines <= ROWS_LIMIT else "export one --gpu at a time"
    raise InvalidInput(
        f"{shown_path(path)} would have {len(text)} bytes and {lines} lines{' when unpacked' if packed else ''}, and "
        f"at most {limit} and {ROWS_LIMIT} are allowed: {way_out}, or merge the database itself"
    )


def pack(data: bytes) -> bytes:
    """``data`` as gzip, with neither date nor name in it."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(data) + deflate.flush()
    return _HEAD + body + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def first_line(path: Path, line_limit: int) -> bytes:
    """The first line of a file, packed or not, or its first ``line_limit + 1`` bytes."""
    with errors_name(path), open_regular(path, "export") as file:
        text = file.read(2 * line_limit)
    if text.startswith(_MAGIC):
        try:
            text = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(text, 2 * line_limit)
        except zlib.error as error:
            raise _damaged(path, error) from error
    return _as_written(text).partition(b"\n")[0][: line_limit + 1]


def read(path: Path, line_limit: int) -> bytes:
    """All of a file as it was written, unpacked where it is packed.

    Raises `InvalidInput` for one that holds more than `PLAIN_LIMIT` bytes, when unpacked `UNPACKED_LIMIT`, `ROWS_LIMIT`
    lines or a line far beyond ``line_limit`` bytes, and for a packed one that is damaged, cut off or continued.
    """
    with open_given(path, "export") as file:
        start = file.read(len(_MAGIC))
        if start != _MAGIC:
            pieces = itertools.chain([start], iter(lambda: file.read(_PIECE), b""))
            return _as_written(_bounded(path, pieces, PLAIN_LIMIT, "", line_limit))
        try:
            return _as_written(_bounded(path, _inflated(path, start, file), UNPACKED_LIMIT, _NO_EXPORT, line_limit))
        except zlib.error as error:
            raise _damaged(path, error) from error


def _bounded(path: Path, pieces: Iterable[bytes], limit: int, remark: str, line_limit: int) -> bytes:
    """All of the text; refused as soon as it is too much, so that it does not fill the memory first."""
    text = io.BytesIO()
    lines = line_start = 0
    for piece in pieces:
        line_start = text.tell() + piece.rfind(b"\n") + 1 if b"\n" in piece else line_start
        text.write(piece)
        lines += piece.count(b"\n")
        if text.tell() > limit:
            raise InvalidInput(f"{shown_path(path)} has more than {limit} bytes {remark}".rstrip())
        if lines > ROWS_LIMIT:
            raise InvalidInput(f"{shown_path(path)} has more than {ROWS_LIMIT} lines, which no export has")
        if text.tell() - line_start > line_limit:
            raise InvalidInput(f"{shown_path(path)}, line {lines + 1}: the line has more than {line_limit} bytes")
    return text.getvalue()


def _inflated(path: Path, start: bytes, file: IO[bytes]) -> Iterator[bytes]:
    inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    packed = start
    taken, made = len(start), 0
    while not inflate.eof:
        piece = inflate.decompress(packed, _PIECE)
        made += len(piece)
        if made > _most(taken):
            raise InvalidInput(f"{shown_path(path)} has more than {UNPACKED_TIMES} times its bytes {_NO_EXPORT}")
        yield piece
        packed = inflate.unconsumed_tail
        if not packed:
            packed = file.read(_PIECE)
            taken += len(packed)
        if not packed and not piece and not inflate.eof:
            raise InvalidInput(f"{shown_path(path)}: the gzip file is cut off")
    if inflate.unused_data or packed:
        raise InvalidInput(
            f"{shown_path(path)}: something follows the end of the gzip file; it must be one export alone"
        )


def _most(packed: int) -> int:
    """Bytes that so many packed ones may have when unpacked."""
    return max(UNPACKED_SMALL, UNPACKED_TIMES * packed)


def _as_written(text: bytes) -> bytes:
    return text.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")


def _damaged(path: Path, error: zlib.error) -> InvalidInput:
    return InvalidInput(f"{shown_path(path)}: the gzip file is damaged: {error}")
