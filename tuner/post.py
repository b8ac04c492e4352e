"""A device that always has a worker: deaths and hangs are noticed here, and the next worker is started."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from flashtune.codegen.problem import Problem

from .build import USUAL_CAUSES
from .trial import Evidence
from .worker import Answer, Lost, Prepare, Ready, Request, Unit, Worker

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
    """False where it was dead before it could hear of the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request."""

    request: Request
    answer: Answer | Died


class Post:
    """Keeps ``unit`` staffed. One request at a time; :meth:`poll` gives what came of it.

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
        self._request: Request | None = None
        self._deadline = 0.0
        self._polled = clock()
        self._last_words = ""
        self._ready = self._heard = self._answered = self._hung = self._dying = False
        self._idle_deaths = 0
        self._fruitless_deaths = 0
        self._start()

    @property
    def idle(self) -> bool:
        """Whether a request may be made."""
        return self._ready and self._request is None and not self._dying and not self.lost

    @property
    def connection(self) -> Connection | None:
        """What to wait on for :meth:`poll`; None where that would not help."""
        return self._worker.connection if self._worker is not None and not self._dying else None

    @property
    def dying(self) -> bool:
        """Whether the worker is on its way out: to be polled often, until another one can start."""
        return self._dying

    def ask(self, request: Request, seconds: float) -> None:
        """Hands ``request`` to the idle worker, which is killed after ``seconds``."""
        assert self.idle
        assert self._worker is not None
        self._request = request
        self._deadline = self._clock() + seconds
        try:
            self._worker.send(request)
            self._heard = True
        except OSError:  # poll() finds out what happened
            self._heard = False

    def poll(self) -> Reply | None:
        """What came of the request, if anything did since."""
        if self._worker is None:
            return None
        now, before = self._clock(), self._polled
        self._polled = now
        if now - before > STALL_SECONDS:
            self._deadline += now - before
        try:
            while not self._dying and self._worker.connection.poll():
                if (reply := self._hear(self._worker.receive())) is not None:
                    return reply
        except (EOFError, OSError):
            self._dying = True
            self._worker.kill()
            self._deadline = now + KILL_SECONDS
        if self._dying and (fate := self._worker.fate()):
            return self._bury(fate)
        return self._overdue(self._worker) if now >= self._deadline else None

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
        self._deadline = float("inf")
        if isinstance(answer, Ready):
            self._ready = True
            self.evidence = answer.evidence
            return None
        assert self._request is not None
        self._answered = True
        self._idle_deaths = 0
        request, self._request = self._request, None
        if not isinstance(request, Prepare):
            self._fruitless_deaths = 0
        return Reply(request, answer)

    def _overdue(self, worker: Worker) -> Reply | None:
        if not self._hung and not self._dying:
            self._hung = True
            self._deadline = self._clock() + KILL_SECONDS
            worker.kill()
            return None
        message = "its worker hangs and can't be killed"
        self._give_up(message)
        return self._dead(message)

    def _bury(self, fate: str) -> Reply | None:
        """After the death of the worker: starts another one, and tells of the request."""
        message = self._last_words or f"its worker {fate}"
        if self._hung:
            message = "its worker was killed at the time limit"
        reply = self._dead(message)
        self.end()
        self._count_death(message)
        self._start()
        return reply

    def _dead(self, message: str) -> Reply | None:
        request, self._request = self._request, None
        return Reply(request, Died(message, self._hung, self._heard)) if request is not None else None

    def _count_death(self, message: str) -> None:
        logger.info("%s: %s", self.unit.name, message)
        if not self._answered:
            self._idle_deaths += 1
        self._fruitless_deaths += 1
        if self._idle_deaths >= IDLE_DEATHS:
            cause = "" if self._last_words else f" ({USUAL_CAUSES})"
            self._give_up(f"{IDLE_DEATHS} workers in a row ended before they had done anything: {message}{cause}")
        elif self._fruitless_deaths >= FRUITLESS_DEATHS:
            self._give_up(f"{FRUITLESS_DEATHS} workers in a row ended before a candidate was finished: {message}")

    def _give_up(self, why: str) -> None:
        self.lost = f"{self.unit.name} was given up: {why}"
        self.end()


def wait_for_posts(posts: Iterable[Post], seconds: float) -> None:
    """Returns when there may be something to poll, after ``seconds`` at the latest."""
    posts = list(posts)
    if any(each.dying for each in posts):
        seconds = min(seconds, DYING_SECONDS)
    connections = [each.connection for each in posts if each.connection is not None]
    if connections:
        wait(connections, seconds)
    else:
        time.sleep(seconds)
