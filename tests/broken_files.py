"""What may have happened to the file of a database."""

from __future__ import annotations

import random
from pathlib import Path


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(20_000))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
