"""Exports as gzip: the same text gives the same bytes, and what is unpacked has a limit.

A packed file is known by its first bytes, not by its name. It comes from strangers and a thousandth of it may be all
that travels, so it is unpacked piece by piece and refused as soon as it is more than an export can be.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import BinaryIO

from flashtune.errors import InvalidInput

SUFFIX = ".gz"
UNPACKED_LIMIT = 512 * 2**20
"""Bytes of a packed export when unpacked: about 700 000 rows."""
ROWS_LIMIT = 2_000_000
"""Lines of a packed export: many short ones would take much more memory than their bytes."""

_MAGIC = b"\x1f\x8b"
# Deflate, no name, no date, of an unknown system: nothing of where and when it was made.
_HEAD = _MAGIC + b"\x08\x00" + bytes(4) + b"\x00\xff"
_PIECE = 2**16


def is_packed_name(path: Path) -> bool:
    """Whether a file of this name is to be written packed."""
    return path.suffix.lower() == SUFFIX


def pack(path: Path, data: bytes) -> bytes:
    """``data`` as gzip, with neither date nor name in it. Raises `InvalidInput` if `read` would refuse it later."""
    if len(data) > UNPACKED_LIMIT or data.count(b"\n") > ROWS_LIMIT:
        raise InvalidInput(
            f"{path} would be {len(data)} bytes when unpacked, and a packed export may have {UNPACKED_LIMIT} and "
            f"{ROWS_LIMIT} lines: choose a name that ends in .jsonl"
        )
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(data) + deflate.flush()
    return _HEAD + body + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def first_line(path: Path, line_limit: int) -> bytes:
    """The first line of a file, packed or not, or its first ``line_limit + 1`` bytes."""
    with path.open("rb") as file:
        if not _is_packed(file):
            return file.readline(line_limit + 1)
        inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            text = inflate.decompress(file.read(2 * line_limit), line_limit + 1)
        except zlib.error as error:
            raise _damaged(path, error) from error
    line, newline, _ = text.partition(b"\n")
    return line + newline


def read(path: Path, line_limit: int) -> bytes:
    """All of a file, unpacked where it is packed.

    Raises `InvalidInput` for a packed one that is damaged, cut off or continued, or that holds more than
    `UNPACKED_LIMIT` bytes, `ROWS_LIMIT` lines or ``line_limit`` bytes in one line.
    """
    with path.open("rb") as file:
        if not _is_packed(file):
            return file.read()
        try:
            return _unpacked(path, file, line_limit)
        except zlib.error as error:
            raise _damaged(path, error) from error


def _is_packed(file: BinaryIO) -> bool:
    start = file.read(len(_MAGIC))
    file.seek(0)
    return start == _MAGIC


def _unpacked(path: Path, file: BinaryIO, line_limit: int) -> bytes:
    inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    text = bytearray()
    lines = 0
    while not inflate.eof:
        packed = inflate.unconsumed_tail or file.read(_PIECE)
        piece = inflate.decompress(packed, _PIECE)
        if not packed and not piece:
            raise InvalidInput(f"{path}: the gzip file is cut off")
        text += piece
        lines += piece.count(b"\n")
        if len(text) > UNPACKED_LIMIT:
            raise _too_much(path, f"{UNPACKED_LIMIT} bytes")
        if lines > ROWS_LIMIT:
            raise _too_much(path, f"{ROWS_LIMIT} lines")
        if len(text) - (text.rfind(b"\n") + 1) > line_limit:
            raise InvalidInput(f"{path}, line {lines + 1}: the line has more than {line_limit} bytes")
    if inflate.unused_data or file.read(1):
        raise InvalidInput(f"{path}: something follows the end of the gzip file; it must be one export alone")
    return bytes(text)


def _too_much(path: Path, limit: str) -> InvalidInput:
    return InvalidInput(
        f"{path}: it is more than {limit} when unpacked, which no packed export is. If you trust it, gunzip it first"
    )


def _damaged(path: Path, error: zlib.error) -> InvalidInput:
    return InvalidInput(f"{path}: the gzip file is damaged: {error}")
