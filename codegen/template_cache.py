"""Templates as Python code on disk: a process's first source takes a few milliseconds instead of some tens.

Files are of this user's cache directory alone, as cubins are. One that is damaged, foreign or of another Python or
Jinja is none, and one that can't be written is not missed.
"""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from flashtune import settings
from flashtune.errors import InvalidInput

from .files import write_whole

_MADE_BY = f"{sys.implementation.cache_tag}-{jinja2.__version__}"


class TemplateCache(jinja2.BytecodeCache):
    """Jinja compares the checksum of a template's text; a file adds one of its own content."""

    def load_bytecode(self, bucket: Bucket) -> None:
        try:
            content = _path(bucket).read_bytes()
        except (OSError, InvalidInput):
            return
        checksum, _, code = content.partition(b"\n")
        if checksum == hashlib.sha256(code).hexdigest().encode():
            bucket.load_bytecode(io.BytesIO(code))

    def dump_bytecode(self, bucket: Bucket) -> None:
        code = bucket.bytecode_to_string()
        try:
            write_whole(_path(bucket), hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
        except (OSError, InvalidInput):
            return


def _path(bucket: Bucket) -> Path:
    return settings.cache_dir() / "templates" / f"{bucket.key}-{_MADE_BY}"
