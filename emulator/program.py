"""A built program as an open file: what is run is what was opened and checked, wherever its name leads by then."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

EXECUTABLE = 0o700
BUSY_TRIES = 1000
BUSY_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Program:
    """``path`` leads to the program in processes that have its ``descriptor``."""

    path: str
    descriptor: int

    def run(self, command: Sequence[str], timeout: int) -> subprocess.CompletedProcess[str]:
        """Runs ``command``, in which :attr:`path` stands for the program. Raises as :func:`subprocess.run`."""
        left = BUSY_TRIES
        while True:
            try:
                return subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=timeout,
                    pass_fds=[self.descriptor],
                )
            except OSError as error:
                # Another thread may start a process that has, for a moment, the descriptor which wrote this file.
                left -= 1
                if error.errno != errno.ETXTBSY or not left:
                    raise
                time.sleep(BUSY_SECONDS)


@contextmanager
def runnable(file: BinaryIO) -> Iterator[Program]:
    """``file``, which is closed afterwards. On systems without /proc a private copy of it is run."""
    with file:
        path = f"/proc/self/fd/{file.fileno()}"
        if os.path.exists(path):
            yield Program(path, file.fileno())
            return
        with tempfile.TemporaryDirectory(prefix="flashtune-emulator-") as folder:
            copy = Path(folder, "program")
            copy.write_bytes(file.read())
            copy.chmod(EXECUTABLE)
            yield Program(str(copy), file.fileno())
