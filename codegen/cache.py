"""Compiled kernels on disk. An entry is whole or it is no entry; a cache that can't be used costs a compile, no more.

A file is one line with the SHA-256 of all that follows, one line of JSON with the facts, then the cubin: data only.
Truncation, a flipped byte and foreign content fail the checksum; such an entry is built again and replaced. Entries
are written under another name and renamed, so that processes that share a cache never see half of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from flashtune import settings
from flashtune.errors import CompileError, InvalidInput

from .compile import OPTIONS, Compiled, compile_source, nvrtc_version
from .files import write_whole
from .render import Source

logger = logging.getLogger("flashtune")

FORMAT = "flashtune cubin 1"
_FACTS: dict[str, type] = {
    "arch": str,
    "nvrtc": str,
    "registers": int,
    "spill_bytes": int,
    "stack_bytes": int,
    "static_shared_bytes": int,
    "seconds": float,
    "log": str,
}

_warned = False
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
    try:
        directory = cubin_dir()
    except InvalidInput as error:
        _warn("used", str(error))
        return compile_source(source, arch)
    key = cache_key(source, arch)
    path = directory / f"{key}.cubin"
    found = None if refresh else _read(path, key)
    if found is not None:
        return found
    built = compile_source(source, arch)
    _write(path, key, built)
    return built


def cubin_dir() -> Path:
    """Where the entries are; it need not exist."""
    return settings.cache_dir() / "cubins"


def cache_key(source: Source, arch: str) -> str:
    """SHA-256 over all that decides what the compiler makes: source text, options, architecture, NVRTC version."""
    parts = [FORMAT, source.text, list(OPTIONS), arch, nvrtc_version()]
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
    except ValueError:
        return None
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("key") != key:
        return None
    if not all(isinstance(header.get(name), kind) for name, kind in _FACTS.items()):
        return None
    return Compiled(cubin=cubin, **{name: header[name] for name in _FACTS})


def _read(path: Path, key: str) -> Compiled | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn("read", f"{path}: {error}")
        return None
    found = unpack(key, content)
    if found is None:
        logger.info("%s is damaged; compiling again", path)
    return found


def _write(path: Path, key: str, built: Compiled) -> None:
    try:
        write_whole(path, pack(key, built))
    except OSError as error:
        _warn("written", f"{path}: {error}")


def _warn(what: str, reason: str) -> None:
    """One warning per process: each kernel would say the same."""
    global _warned
    if not _warned:
        _warned = True
        logger.warning("The kernel cache can't be %s (%s); kernels are compiled anew", what, reason)
