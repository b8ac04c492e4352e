"""Templates as Python code on disk: a process's first source takes a few milliseconds instead of some tens.

They are code, so only what this user alone can write is read. A file that is damaged or of another Python or Jinja
is none, and one that can't be written is not missed.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
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
            path = _path(bucket)
            if not (_ours(path.parent) and _ours(path)):
                return
            content = path.read_bytes()
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
    of = bucket.environment
    syntax = of.block_start_string, of.block_end_string, of.line_statement_prefix, of.line_comment_prefix
    options = hashlib.sha256(repr((*syntax, of.keep_trailing_newline)).encode()).hexdigest()[:8]
    return settings.cache_dir() / "templates" / f"{bucket.key}-{options}-{_MADE_BY}"


def _ours(path: Path) -> bool:
    """Whether nobody but this user can have written ``path``. Windows keeps a user's directories apart by itself."""
    if not hasattr(os, "geteuid"):
        return True
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
