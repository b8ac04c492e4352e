"""One device, one process: a worker that may die, what it can be asked, and what it answers.

Requests and answers are values that travel over a pipe between processes of this program (`process.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.processes.process import Child
from flashtune.tuner.trial.outcome import Bench, DeviceLostError, Evidence, Outcome
from flashtune.tuner.trial.sensors import Readings


class Unit(Protocol):
    """A device that a worker can be given. It travels to the worker's process, which opens it there, so its class is of
    a module that can be imported there: not of the main one."""

    @property
    def name(self) -> str:
        """As people know it, e.g. ``cuda:1``."""

    @property
    def uuid(self) -> str:
        """Of the card, as in :class:`Evidence`."""

    def open(self) -> Bench:
        """In the worker: takes the device."""

    def sources(self, problem: Problem) -> list[Source]:
        """In the session: what the bench itself launches for ``problem``, to be compiled ahead like candidates."""


# Requests


@dataclass(frozen=True, slots=True)
class Prepare:
    """Makes inputs and reference of ``problem``."""

    what: ClassVar[str] = "the reference"
    problem: Problem

    @property
    def key(self) -> tuple[object, ...]:
        return ("prepare", self.problem)

    def run(self, bench: Bench) -> Prepared:
        return Prepared(bench.prepare(self.problem) or "")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Checks and times ``config``. ``best`` is the best median so far in seconds. ``default``, which was correct, is
    timed in turns with it."""

    problem: Problem
    config: Config
    built: Built
    best: float | None
    default: Config | None = None

    @property
    def what(self) -> str:
        return str(self.config)

    @property
    def key(self) -> tuple[object, ...]:
        return ("attempt", self.problem, self.config)

    def run(self, bench: Bench) -> Outcome:
        return bench.attempt(self.problem, self.config, self.built, self.best, self.default)


@dataclass(frozen=True, slots=True)
class Final:
    """Times ``configs``, which have been correct, interleaved and for about ``seconds``.

    With a ``margin``, those that are slower than the fastest by more leave early; never the first, the default.
    """

    what: ClassVar[str] = "the final"
    problem: Problem
    configs: tuple[Config, ...]
    seconds: float
    margin: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return ("final", self.problem)

    def run(self, bench: Bench) -> Finished:
        rounds = bench.finals(self.problem, self.configs, self.seconds, self.margin)
        return Finished(rounds, bench.readings())


Request = Prepare | Attempt | Final
"""``key`` is the same for each repetition of a request; ``what`` names it for people."""


# Answers


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The device is open. The first answer of each worker, before it is asked anything."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Prepared:
    """``missing`` says why the problem can't be measured here; empty if it can."""

    missing: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Seconds by round of each finalist, and what the card said meanwhile."""

    rounds: Mapping[Config, list[float]]
    readings: Readings


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed in a way that nobody foresaw; the worker is sound."""

    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The last word of a worker whose device is of no more use to it."""

    message: str


Answer = WorkerReady | Prepared | Outcome | Finished | Failed | Lost


def answer(request: Request, bench: Bench) -> Answer:
    """Runs ``request``: whatever goes wrong is an answer too."""
    try:
        return request.run(bench)
    except DeviceLostError as error:
        return Lost(str(error))
    except Exception as error:
        return Failed(_described(error))


# The session's side


class Worker(Protocol):
    """A worker as its session sees it."""

    connection: Connection
    """Readable when there is an answer, and when there will be none any more."""

    def send(self, request: Request) -> None:
        """Raises :class:`OSError` if the worker is dying."""

    def receive(self) -> Any:
        """The next :data:`Answer`. Raises :class:`EOFError` or :class:`OSError` if the worker is dying."""

    def kill(self) -> None:
        """Ends the worker at once; :meth:`fate` tells when it is dead."""

    def end(self) -> None:
        """Ends the worker at once and forgets it."""

    def fate(self) -> str:
        """How the worker ended, for people; empty while it has not."""


class ProcessWorker(Child):
    """Starts a process that opens ``unit``; :class:`OSError` if there can be none."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(f"flashtune {unit.name}", _serve, unit)


def _serve(unit: Unit, connection: Connection) -> None:
    """A worker's life: opens the device, then answers until the session or the device is gone."""
    try:
        bench = unit.open()
        said: Answer = WorkerReady(bench.evidence)
    except Exception as error:
        said = Lost(_described(error))
    connection.send(said)
    while not isinstance(said, Lost):
        said = answer(connection.recv(), bench)
        connection.send(said)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
