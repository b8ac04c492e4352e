"""Files that other processes may read at any moment."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes ``path`` under another name and renames it, making its directory first, for this user alone. Raises
    ``OSError``.

    Readers see the old file, the new one or none, never a part; what fails leaves nothing behind.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
