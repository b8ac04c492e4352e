"""Commands in children of a process that has imported all they need: each has its own memory, time and terminal.

A command takes a few milliseconds so, where a new process takes half a second. `Warm` is for tests; as a script this is
the process.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from terminal import SOURCES, Shown

SECONDS = 60
"""Of a core, after which a command that goes on is killed."""
PATIENCE = 300
"""Seconds after which one is killed that waits for ever."""
ROOM = 1500
"""MB that a command may get, at the very most."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of a command."""

    shown: Shown
    seconds: float
    """Of a core."""
    megabytes: float
    """Memory at its peak, beyond what had been imported."""


class Warm:
    """Such a process; ``functions`` is a module of more that it can do than commands."""

    def __init__(self, functions: Path, folder: Path, environment: dict[str, str]) -> None:
        path = os.pathsep.join([str(SOURCES), str(functions.parent)])
        given = {**os.environ, **environment, "PYTHONPATH": path, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            given.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, __file__, functions.stem], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=given, cwd=folder, text=True,
        )  # fmt: skip

    def warm(self, *words: str | Path) -> None:
        """Runs a command in the process itself, which then has what that imports."""
        assert self._ask({"words": list(map(str, words))})["code"] == 0

    def run(self, *words: str | Path, folder: Path) -> Ended:
        """``flashtune`` with ``words`` in ``folder``; or, if the first begins with @, that function with the others."""
        got = self._ask({"words": list(map(str, words)), "folder": str(folder)})
        shown = Shown(base64.b64decode(got["raw"]), got["code"])
        return Ended(shown, got["seconds"], got["megabytes"])

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        got: dict[str, Any] = json.loads(line)
        return got


def _execute(words: Sequence[str], functions: Any) -> int:
    from flashtune.cli.main import main
    from flashtune.errors import FlashtuneError

    try:
        if words[0].startswith("@"):
            getattr(functions, words[0][1:])(*words[1:])
            return 0
        main.main(args=list(words), prog_name="flashtune")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except FlashtuneError as error:  # of a function
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 99
    return 0


def _child(words: Sequence[str], functions: Any, terminal: int) -> None:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    most = _memory("VmSize") + ROOM * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    code = _execute(words, functions)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _memory(what: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def _untouched() -> int:
    """kB of memory of a child that does nothing. What it reads of libraries later counts as its own."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    return os.wait4(pid, 0)[2].ru_maxrss


def _fork(words: Sequence[str], folder: str, functions: Any) -> dict[str, Any]:
    ours, theirs = os.openpty()
    pid = os.fork()
    if not pid:
        os.close(ours)
        os.chdir(folder)
        _child(words, functions, theirs)
    os.close(theirs)
    raw, deadline = bytearray(), time.monotonic() + PATIENCE
    while True:
        ready, _, _ = select.select([ours], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
        try:
            more = os.read(ours, 65536)
        except OSError:
            more = b""
        if not more:
            break
        raw += more
    os.close(ours)
    _, status, used = os.wait4(pid, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "raw": base64.b64encode(raw).decode(),
        "seconds": used.ru_utime + used.ru_stime,
        "megabytes": (used.ru_maxrss - _untouched()) / 1024,
    }


def _serve(functions: Any, answer: Callable[[str], object]) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "folder" in asked:
            got = _fork(asked["words"], asked["folder"], functions)
        else:
            got = {"code": _execute(asked["words"], functions)}
        answer(json.dumps(got) + "\n")


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what commands print here is for people
    _serve(__import__(sys.argv[1]), answers.write)
