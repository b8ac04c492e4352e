"""What the folder of a database holds."""

from __future__ import annotations

from pathlib import Path


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() if each.is_file() else b"" for each in sorted(folder.rglob("*"))}


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())
