"""A tuning session that is to be killed, started again and again by one process that has all imported: a fork is quick.

Run as a script with a folder and ``process`` or ``inline``, which is where the fake device is: in a worker process as
usual, or in the session itself, which then has measured something within a fraction of a second. Two more arguments are
the trials of a session, and the trial of all sessions in which one kills itself. For each line on its input it starts a
session and tells its number; after another line, when nobody will kill that number any more, it tells how the session
ended.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from fake_worker import FakeUnit
from tuner_fakes import LocalWorker, means, problem, request

from flashtune.tuned_db.store.store import Store
from flashtune.tuner.results.report import Progress
from flashtune.tuner.tune.measured_run import measure_problems
from flashtune.tuner.workers.process_worker import ProcessWorker

TRIALS = 150
PROBLEMS = [problem(512), problem(1024)]


@dataclass(frozen=True)
class DeadlyUnit(FakeUnit):
    """Kills the process that makes trial number ``last`` while that is measured. 0: none."""

    last: int = field(default=0, kw_only=True)

    def do(self, where: str) -> None:
        attempts = self.lines("attempt")
        if self.last and len(attempts) == self.last and where in attempts[-1].config:
            os.kill(os.getpid(), signal.SIGKILL)


def tune(folder: Path, where: str, trials: int, last: int) -> int:
    """What is always the same command. Each trial that is told of is a line of the file ``told``."""
    unit = DeadlyUnit("one", folder / "log", {}, 0.002, last=last)
    hire: Any = LocalWorker if where == "inline" else ProcessWorker

    def told(progress: Progress) -> None:
        if progress.text.endswith(" ms"):
            with (folder / "told").open("a", encoding="utf-8") as file:
                file.write(progress.text.rsplit(" ", 2)[0] + "\n")

    with Store.open(folder / "tuned.db") as store:
        report = measure_problems(request(PROBLEMS, trials), means(store, unit, hire=hire, progress=told))
    return report.tried


def main(folder: Path, where: str, trials: int = TRIALS, last: int = 0) -> None:
    for _ in sys.stdin:
        reading, writing = Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            reading.close()
            writing.send(tune(folder, where, trials, last))
            os._exit(0)
        writing.close()
        print(pid, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        tried = reading.recv() if not status else 0
        print(os.waitstatus_to_exitcode(status), tried, flush=True)


if __name__ == "__main__":
    import killed_session  # what travels to a worker must be of a module, which this script is not for it

    killed_session.main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
