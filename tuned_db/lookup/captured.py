"""Problems that were asked for and had no tuned config: one line of JSON each, in a file of their own.

A line holds the key of the device model and the fields of `Problem`, nothing else of the caller. It is appended in one
write, so processes that share the file do not mix their lines, and each process writes a problem once: the number of
equal lines is the number of processes that asked for it. A part of a line, left by a disk that was full, spoils no
other. Nothing is ever changed or removed; delete the file to start anew.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput
from flashtune.files import PRIVATE, errors_name, read_regular, shown_path
from flashtune.settings import capture_path
from flashtune.tuned_db.exchange.export_file import parse_line
from flashtune.tuned_db.records.measurement import canonical
from flashtune.tuned_db.records.parse import read_problem
from flashtune.values import to_json

FILE_LIMIT = 4 * 1024 * 1024
"""Bytes beyond which nothing is added: some 25000 lines."""
_KEY_LIMIT = 200

_log = logging.getLogger("flashtune")
_written: set[tuple[Path, str, Problem]] = set()
_warned = threading.Lock()
"""Taken by the one warning of this process."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A problem that was asked for on a device model, by ``count`` processes."""

    gpu_key: str
    problem: Problem
    count: int


def capture(problem: Problem, gpu_key: str) -> None:
    """Adds a line where ``FLASHTUNE_CAPTURE`` asks for it. Never fails: what can't be written is warned of, once."""
    try:
        path = capture_path()
        if path is None or (path, gpu_key, problem) in _written:
            return
        _append(path, canonical({"gpu": gpu_key, "problem": to_json(problem)}) + "\n")
    except Exception as error:  # whatever it is: it must not reach the caller of attention()
        if _warned.acquire(blocking=False):
            _log.warning("problems are not captured: %s", error)
        return
    _written.add((path, gpu_key, problem))


def read_captured(path: Path) -> tuple[list[Captured], int]:
    """What was captured in the file at ``path``, most often asked for first, and how many lines were passed over.

    A line that holds anything else, or a problem that this version does not know, is passed over.
    """
    try:
        lines = read_regular(path, 2 * FILE_LIMIT, "file of captured problems").split(b"\n")
    except FileNotFoundError as error:
        raise InvalidInput(
            f"nothing was captured in {shown_path(path)} yet: set FLASHTUNE_CAPTURE=1 where attention() is called"
        ) from error
    counts: Counter[tuple[str, Problem]] = Counter()
    strange = 0
    for line in filter(bytes.strip, lines):
        try:
            counts[_read(line)] += 1
        except InvalidInput as error:
            _log.debug("passed over in %s: %s", shown_path(path), error)
            strange += 1
    found = [Captured(gpu_key, problem, count) for (gpu_key, problem), count in counts.items()]
    return sorted(found, key=lambda each: (each.gpu_key, -each.count, each.problem.key)), strange


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
    # A pipe that nobody reads must not hold the caller of attention() up, and a link may lead into somebody's file.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidInput(f"{shown_path(path)} is a symbolic link: name the file itself") from error
        raise
    with errors_name(path), os.fdopen(descriptor, "r+b", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInput(f"{shown_path(path)} is not a file")
        text = line.encode()
        if found.st_size:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else b"\n" + text
        if found.st_size + len(text) > FILE_LIMIT:
            raise InvalidInput(
                f"{shown_path(path)} is full ({FILE_LIMIT >> 20} MiB): run flashtune tune --captured, then delete it"
            )
        if file.write(text) != len(text):
            raise OSError(errno.ENOSPC, "only a part of a line could be written")


def _read(line: bytes) -> tuple[str, Problem]:
    data = parse_line(line)
    if not isinstance(data, Mapping) or data.keys() != {"gpu", "problem"}:
        raise InvalidInput("a line holds gpu and problem")
    gpu_key, problem = data["gpu"], read_problem(data["problem"])
    if not isinstance(gpu_key, str) or not gpu_key.isprintable() or not 0 < len(gpu_key) <= _KEY_LIMIT:
        raise InvalidInput("gpu is the key of a device model")
    if problem.out_dtype:
        raise InvalidInput("out_dtype is for references")
    return gpu_key, problem
