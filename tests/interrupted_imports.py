"""The command line, interrupted in the middle of its imports.

Run as a script with ``module`` or ``program``, a folder, and the arguments of a command. For each line on its input, a
number, it starts the command in a fork, which gets SIGINT at that import, counted from when flashtune's own first
module is there. It tells how that ended: the exit code, then whether there were so many imports. What the command wrote
is in the files ``out`` and ``err`` of the folder.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

OWN = ("flashtune", "flashtune.__main__")
"""What is imported before anything of flashtune can take care of an interrupt."""


class Interrupt:
    """Finds no module. It sends the signal at one of the imports, of those that are looked for at all."""

    def __init__(self, at: int, mark: Path) -> None:
        self.left = at
        self.mark = mark

    def find_spec(self, name: str, *_: object) -> None:
        self.left -= name not in OWN
        if not self.left:
            self.left = -1
            self.mark.touch()
            signal.raise_signal(signal.SIGINT)


def run(how: str, folder: Path, words: list[str], at: int) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.argv = ["flashtune", *words]
    sys.meta_path.insert(0, Interrupt(at, folder / "mark"))  # type: ignore[arg-type]
    if how == "module":
        runpy.run_module("flashtune", run_name="__main__", alter_sys=True)
    else:
        from flashtune.__main__ import main

        main()


def main(how: str, folder: Path, words: list[str]) -> None:
    for line in sys.stdin:
        (folder / "mark").unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            run(how, folder, words, int(line))  # its end is that of a process of its own: the last one of this script
            return
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), (folder / "mark").exists(), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
