"""Templates as Python code on disk: a process's first source takes a few milliseconds instead of some tens.

A file that is damaged or of another Python or Jinja is none, and one that can't be written is not missed.
"""

from __future__ import annotations

import hashlib
import io
import sys

import jinja2
from jinja2.bccache import Bucket

from flashtune.codegen.cache.cache_folder import TEMPLATES, read_entry, write_entry

_MADE_BY = f"{sys.implementation.cache_tag}-{jinja2.__version__}"


class TemplateCache(jinja2.BytecodeCache):
    """Jinja compares the checksum of a template's text; a file adds one of its own content."""

    def load_bytecode(self, bucket: Bucket) -> None:
        content = read_entry(TEMPLATES, _name(bucket))
        if content is None:
            return
        checksum, _, code = content.partition(b"\n")
        if checksum == hashlib.sha256(code).hexdigest().encode():
            bucket.load_bytecode(io.BytesIO(code))

    def dump_bytecode(self, bucket: Bucket) -> None:
        code = bucket.bytecode_to_string()
        write_entry(TEMPLATES, _name(bucket), hashlib.sha256(code).hexdigest().encode() + b"\n" + code)


def _name(bucket: Bucket) -> str:
    of = bucket.environment
    syntax = of.block_start_string, of.block_end_string, of.line_statement_prefix, of.line_comment_prefix
    options = hashlib.sha256(repr((*syntax, of.keep_trailing_newline)).encode()).hexdigest()[:8]
    return f"{bucket.key}-{options}-{_MADE_BY}"
