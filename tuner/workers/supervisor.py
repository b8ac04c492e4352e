"""A device that always has a worker: deaths and hangs are noticed here, and the next worker is started.

A worker may be handed a second candidate while it tries the first, so that a device never waits for its session.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.processes.compile_pool import USUAL_CAUSE
from flashtune.tuner.trial.outcome import Evidence

from .process_worker import Answer, Attempt, Lost, Prepare, Request, Unit, Worker, WorkerReady

logger = logging.getLogger("flashtune")

START_SECONDS = 180.0
"""For a process to import what it needs and to open its device."""
STALL_SECONDS = 5.0
"""A session that did not look for so long was stopped itself (Ctrl-Z, say), and most likely its workers with it."""
KILL_SECONDS = 60.0
"""For a killed process to be gone: the driver ends its kernels first."""
DYING_SECONDS = 0.01
"""How often a dying process is looked at: its pipe closes before the driver has taken everything back."""
IDLE_DEATHS = 3
"""Workers in a row that ended before they had answered anything: the device, or the machine, is no good."""
FRUITLESS_DEATHS = 12
"""Workers in a row that ended before a candidate was finished: more than bad candidates account for."""


@dataclass(frozen=True, slots=True)
class Died:
    """The worker ended over the request, by itself or because it was past its limit."""

    message: str
    hung: bool = False
    heard: bool = True
    """False where it had not come to the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request."""

    request: Request
    answer: Answer | Died


class _Pending:
    """A request with its limit in seconds, from when the worker comes to it."""

    def __init__(self, request: Request, seconds: float) -> None:
        self.request = request
        self.seconds = seconds
        self.heard = True


class Supervisor:
    """Keeps ``unit`` staffed. :meth:`poll` gives what came of each request, in their order.

    ``lost`` says why there is no worker any more, and stays empty until then.
    """

    def __init__(self, unit: Unit, hire: Callable[[Unit], Worker], clock: Callable[[], float] = time.monotonic) -> None:
        self.unit = unit
        self.evidence = Evidence(unit=unit.uuid)
        self.lost = ""
        self.prepared: set[Problem] = set()
        """Problems whose inputs and reference the present worker has."""
        self._hire = hire
        self._clock = clock
        self._worker: Worker | None = None
        self._asked: deque[_Pending] = deque()
        """What the worker is at, then what comes next."""
        self._replies: deque[Reply] = deque()
        self._deadline = 0.0
        self._polled = clock()
        self._last_words = ""
        self._ready = self._answered = self._hung = self._dying = False
        self._idle_deaths = 0
        self._fruitless_deaths = 0
        self._start()

    @property
    def idle(self) -> bool:
        """Whether the worker waits for a request."""
        return self._ready and not (self._asked or self._replies or self._dying or self.lost)

    @property
    def room(self) -> bool:
        """Whether a candidate may be handed out: to an idle worker, or behind a single other candidate."""
        if len(self._asked) == 1 and not self._replies and not self._dying:
            return isinstance(self._asked[0].request, Attempt)
        return self.idle

    @property
    def connection(self) -> Connection | None:
        """What to wait on for :meth:`poll`; None where that would not help."""
        return self._worker.connection if self._worker is not None and not self._dying else None

    @property
    def dying(self) -> bool:
        """Whether the worker is on its way out: to be polled often, until another one can start."""
        return self._dying

    def ask(self, request: Request, seconds: float) -> None:
        """Hands ``request`` to the worker, which is killed if it spends more than ``seconds`` on it."""
        assert self.room
        assert self._worker is not None
        self._asked.append(_Pending(request, seconds))
        if len(self._asked) == 1:
            self._deadline = self._clock() + seconds
        try:
            self._worker.send(request)
        except OSError:  # poll() finds out what happened
            self._asked[-1].heard = False

    def poll(self) -> Reply | None:
        """What came of the oldest request, if anything did since."""
        if self._replies:
            return self._replies.popleft()
        if self._worker is None:
            return None
        now, before = self._clock(), self._polled
        self._polled = now
        if now - before > STALL_SECONDS:
            self._deadline += now - before
        try:
            while not self._dying and self._worker.connection.poll():
                if reply := self._hear(self._worker.receive()):
                    return reply
        except (EOFError, OSError):
            self._dying = True
            self._worker.kill()
            self._deadline = now + KILL_SECONDS
        if self._dying and (fate := self._worker.fate()):
            self._bury(fate)
        elif now >= self._deadline:
            self._overdue(self._worker)
        return self._replies.popleft() if self._replies else None

    def end(self) -> None:
        """Ends the worker at once, for good."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _start(self) -> None:
        self._ready = self._answered = self._hung = self._dying = False
        self._last_words = ""
        self.prepared.clear()
        while not self.lost:
            self._deadline = self._clock() + START_SECONDS
            try:
                self._worker = self._hire(self.unit)
                return
            except OSError as error:
                self._count_death(f"no process could be started: {error}")

    def _hear(self, answer: Answer) -> Reply | None:
        if isinstance(answer, Lost):
            self._last_words = answer.message  # its end follows
            return None
        if isinstance(answer, WorkerReady):
            self._ready = True
            self.evidence = answer.evidence
            self._deadline = math.inf
            return None
        self._answered = True
        self._idle_deaths = 0
        request = self._asked.popleft().request
        self._deadline = self._clock() + self._asked[0].seconds if self._asked else math.inf
        if not isinstance(request, Prepare):
            self._fruitless_deaths = 0
        return Reply(request, answer)

    def _overdue(self, worker: Worker) -> None:
        if not self._hung and not self._dying:
            self._hung = True
            self._deadline = self._clock() + KILL_SECONDS
            worker.kill()
        else:
            message = "its worker hangs and can't be killed"
            self._give_up(message)
            self._take_back(message)

    def _bury(self, fate: str) -> None:
        """After the death of the worker: starts another one."""
        message = self._last_words or f"its worker {fate}"
        if self._hung:
            message = "its worker was killed at the time limit"
        self._take_back(message)
        self.end()
        self._count_death(message)
        self._start()

    def _take_back(self, message: str) -> None:
        """Makes replies of what the dead worker was asked: it was at the first, if it heard of it."""
        for number, asked in enumerate(self._asked):
            died = Died(message, self._hung, asked.heard) if number == 0 else Died(message, heard=False)
            self._replies.append(Reply(asked.request, died))
        self._asked.clear()

    def _count_death(self, message: str) -> None:
        logger.info("%s: %s", self.unit.name, message)
        if not self._answered:
            self._idle_deaths += 1
        self._fruitless_deaths += 1
        if self._idle_deaths >= IDLE_DEATHS:
            cause = "" if self._last_words else f" ({USUAL_CAUSE})"
            self._give_up(f"{IDLE_DEATHS} workers in a row ended before they had done anything: {message}{cause}")
        elif self._fruitless_deaths >= FRUITLESS_DEATHS:
            self._give_up(f"{FRUITLESS_DEATHS} workers in a row ended before a candidate was finished: {message}")

    def _give_up(self, why: str) -> None:
        self.lost = f"{self.unit.name} was given up: {why}"
        self.end()


def wait_for_answers(supervisors: Iterable[Supervisor], seconds: float) -> None:
    """Returns when there may be something to poll, after ``seconds`` at the latest."""
    supervisors = list(supervisors)
    if any(each.dying for each in supervisors):
        seconds = min(seconds, DYING_SECONDS)
    connections = [each.connection for each in supervisors if each.connection is not None]
    if connections:
        wait(connections, seconds)
    else:
        time.sleep(seconds)
