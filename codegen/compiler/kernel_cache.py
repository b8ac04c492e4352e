"""Compiled kernels on disk. An entry is whole or it is no entry; a cache that can't be used costs a compile, no more.

A file is one line with the SHA-256 of all that follows, one line of JSON with the facts, then the cubin: data only.
Truncation, a flipped byte and foreign content fail the checksum; such an entry is built again and replaced. Entries
are written under another name and renamed, so that processes that share a cache never see half of one. Whose entries
are taken is said in cache_folder.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping

from flashtune.codegen.cache.cache_folder import CUBINS, read_entry, write_entry
from flashtune.errors import CompileError

from .nvrtc import OPTIONS, Compiled, compile_source, nvrtc_version
from .render import Source

logger = logging.getLogger("flashtune")

FORMAT = "flashtune cubin 1"
_ARCH = re.compile(r"sm_\d{2,4}[af]?")
_VERSION = re.compile(r"\d{1,6}\.\d{1,6}")
_LARGEST = 2**31


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


_FACTS: dict[str, Callable[[object], bool]] = {
    "arch": lambda value: isinstance(value, str) and _ARCH.fullmatch(value) is not None,
    "nvrtc": lambda value: isinstance(value, str) and _VERSION.fullmatch(value) is not None,
    "registers": _is_count,
    "spill_bytes": _is_count,
    "stack_bytes": _is_count,
    "static_shared_bytes": _is_count,
    "seconds": lambda value: isinstance(value, float) and math.isfinite(value) and value >= 0,
    "log": lambda value: isinstance(value, str),
}
"""What an entry says of its cubin, and what each may be."""

_sent: Mapping[str, Compiled] | None = None


def serve_only(cubins: Mapping[str, Compiled] | None) -> None:
    """From here on this process has ``cubins``, by digest of their source, and no other: it neither compiles nor reads.

    For a worker on another machine than its session, whose disk has none of the cubins and whose NVRTC may be another
    one: it launches what was compiled, and recorded, where the session is. None ends that.
    """
    global _sent
    _sent = cubins


def compiled(source: Source, arch: str, *, refresh: bool = False) -> Compiled:
    """``source`` built for ``arch``, from the disk cache or by compiling; raises as :func:`compile_source`.

    ``refresh`` compiles in any case and replaces the entry: for a cubin that the driver refused to load.
    """
    if _sent is not None:
        found = _sent.get(source.digest)
        if found is None:
            raise CompileError(
                f"{source.name} was not sent: flashtune here makes another source of the same config than flashtune "
                "where the run was started. Install the same on all machines"
            )
        return found
    key = cache_key(source, arch)
    found = None if refresh else _read(key)
    if found is None:
        found = compile_source(source, arch)
        write_entry(CUBINS, _name(key), pack(key, found))
    return found


def cache_key(source: Source, arch: str) -> str:
    """SHA-256 over all that decides what the compiler makes: kernel, headers, options, architecture, NVRTC version."""
    parts = [FORMAT, source.text, source.headers, list(OPTIONS), arch, nvrtc_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def pack(key: str, built: Compiled) -> bytes:
    """The content of a cache file."""
    header = {"format": FORMAT, "key": key} | {name: getattr(built, name) for name in _FACTS}
    body = json.dumps(header).encode() + b"\n" + built.cubin
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unpack(key: str, content: bytes) -> Compiled | None:
    """What :func:`pack` made for ``key``, or None if ``content`` is anything else."""
    checksum, _, body = content.partition(b"\n")
    if checksum != hashlib.sha256(body).hexdigest().encode():
        return None
    line, _, cubin = body.partition(b"\n")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("key") != key:
        return None
    if not all(may_be(header.get(name)) for name, may_be in _FACTS.items()):
        return None
    return Compiled(cubin=cubin, **{name: header[name] for name in _FACTS})


def _read(key: str) -> Compiled | None:
    content = read_entry(CUBINS, _name(key))
    found = None if content is None else unpack(key, content)
    if content is not None and found is None:
        logger.info("The cached kernel %s is damaged; compiling again", key)
    return found


def _name(key: str) -> str:
    return f"{key}.cubin"
