"""A program on a terminal of its own, and each byte that it writes there.

Click takes escape codes out of what goes to a pipe or a file, so captured output proves nothing about a terminal.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import flashtune

SOURCES = Path(flashtune.__file__).parents[1]
_TAKE = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""Makes the terminal that of the session, so that Ctrl-C reaches the program, and becomes the program."""
_OWN = re.compile(r"\x1b\[[01]m|\r\n")
"""What flashtune itself writes besides text, where nothing moves: bold, the end of bold, and the end of a line."""
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.?|[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Shown:
    """What a program wrote to its terminal, and how it ended: the exit code, negative for a signal."""

    raw: bytes
    code: int

    @property
    def text(self) -> str:
        """The text without what bold is made of, in lines that end as in a file."""
        return re.sub(r"\x1b\[[01]m", "", self.raw.decode("utf-8", "replace")).replace("\r\n", "\n")

    @property
    def controls(self) -> list[str]:
        """Control characters and sequences, and marks that turn the direction of text, that are not flashtune's own.

        The live view of `flashtune tune` has more of its own, as it moves the cursor and has colours.
        """
        return _CONTROL.findall(_OWN.sub("", self.raw.decode("utf-8", "replace")))


def flashtune_on_terminal(*words: str | Path, **options: object) -> Shown:
    """`flashtune` with ``words``; ``options`` as for `on_terminal`."""
    return on_terminal([sys.executable, "-m", "flashtune", *map(str, words)], **options)  # type: ignore[arg-type]


def on_terminal(
    program: Sequence[str],
    *,
    columns: int = 100,
    lines: int = 40,
    environment: Mapping[str, str] | None = None,
    keys: Sequence[tuple[bytes, bytes]] = (),
    seconds: float = 300.0,
    folder: Path | None = None,
) -> Shown:
    """Runs ``program``, whose first word is a path, until it ends. One that goes on for ``seconds`` fails the test.

    Each of ``keys`` is a text to wait for and what is typed then, such as ``(b"compiled 2 of", CTRL_C)``.
    ``environment`` adds to that of the test.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH", "")]))
    given = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": path, **(environment or {})}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        if environment is None or name not in environment:
            given.pop(name, None)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _TAKE, *program],
        stdin=theirs, stdout=theirs, stderr=theirs, env=given, cwd=folder, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        try:
            raw = _written(ours, keys, time.monotonic() + seconds)
            return Shown(raw, process.wait())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            os.close(ours)


CTRL_C = b"\x03"


def _written(terminal: int, keys: Sequence[tuple[bytes, bytes]], deadline: float) -> bytes:
    """All that is written until nobody has the terminal open any more."""
    written, heard, waiting = bytearray(), 0, list(keys)
    while True:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"it has not ended. Written so far: {bytes(written)!r}")
        try:
            more = os.read(terminal, 65536)
        except OSError:  # Linux has this where others have the end of a file
            more = b""
        if not more:
            assert not waiting, f"{waiting[0][0]!r} was not written: {bytes(written)!r}"
            return bytes(written)
        written += more
        while waiting and (at := written.find(waiting[0][0], heard)) >= 0:
            heard = at + len(waiting[0][0])
            os.write(terminal, waiting.pop(0)[1])
