"""Workers on a Ray cluster: the same protocol as a process of this machine (`worker`), spoken with an actor.

Ray places the actors, sees nodes and processes die and takes their GPUs back. Its own restarts and retries are off: a
candidate that kills its worker would kill the next ones unseen. The `Supervisor` must know of each death, because it
counts them and decides whether the request is to blame; it asks Ray for another actor, which Ray places on any GPU that
is free. An answer that was lost with its node was never stored, so the request is made again and stored once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from typing import Any

from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.families.registry import source_for
from flashtune.tuner.workers.process_worker import Answer, Attempt, Failed, Lost, Prepare, Request, Unit

from .ray_actor import Opened

logger = logging.getLogger("flashtune")

LOOK_SECONDS = 0.5
"""How often a thread that waits for Ray looks whether it is still wanted."""
PING_SECONDS = 0.05
"""How often a worker that was killed is asked whether it is gone."""


class RayWorker:
    """``actor``, a `Host` that was asked to open ``unit``; ``opening`` is the answer to come.

    A thread stands between it and the session, because a pipe is what the session waits on. It brings each request,
    with what that launches, to the actor, and its answer back, and at last the actor's death. One request at a time:
    Ray may lose the answer of an actor that dies right behind it, over the next one, and the wrong one would be blamed.
    ``crowded`` says, while there is no answer, why the actor will find no GPU; empty if it may.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        opening: Any,
        unit: Unit,
        cargo: Callable[[Request], Mapping[str, Compiled]],
        crowded: Callable[[RayWorker], str],
    ) -> None:
        self.connection, self._answers = Pipe(duplex=False)
        self._ray = ray
        self._actor = actor
        self._opening = opening
        self._cargo = cargo
        self._crowded = crowded
        self._fate = ""
        self._node = ""
        self._over = threading.Event()
        """The session wants nothing more."""
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        """None at the end."""
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"flashtune {unit.name}")
        self._thread.start()

    def send(self, request: Request) -> None:
        if self._fate:
            raise BrokenPipeError
        self._requests.put(request)

    def receive(self) -> Any:
        return self.connection.recv()

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # Ray is not to be reached: then neither is the actor
            self._ray.kill(self._actor, no_restart=True)
        self._requests.put(None)  # for the thread of an actor that is idle

    def end(self) -> None:
        self._over.set()
        self.kill()
        self.connection.close()

    def fate(self) -> str:
        return self._fate

    @property
    def gone(self) -> bool:
        """Whether it has died, or is not wanted any more."""
        return bool(self._fate) or self._over.is_set()

    def join(self, seconds: float) -> None:
        """Waits for the thread, after :meth:`end`: the connection to Ray must not be closed under it."""
        self._thread.join(seconds)

    # The thread

    def _serve(self) -> None:
        try:
            self._pass_on()
            self._see_off()
        except _OverError:
            pass
        except _UnplacedError as error:
            with contextlib.suppress(_OverError):
                self._say(Lost(str(error)))
                self._see_off()
        except Exception as error:  # of Ray's: the actor is dead, or out of reach, or failed at what it must not
            self._see_off(error)
        finally:
            self._answers.close()

    def _pass_on(self) -> None:
        """Brings answers to the session, until there are no more to be had or wanted."""
        opened: Opened = self._wait(self._opening, self._crowded)
        self._node = opened.node
        self._say(opened.said)
        said: Answer = opened.said
        while not isinstance(said, Lost) and (request := self._requests.get()) is not None:
            said = self._answer(request)
            self._say(said)

    def _answer(self, request: Request) -> Answer:
        try:
            cubins = dict(self._cargo(request))
        except Exception as error:  # as where the worker itself is the one to compile
            return Failed(f"{type(error).__name__}: {error}")
        answer: Answer = self._wait(self._actor.answer.remote(request, cubins))
        return answer

    def _say(self, answer: Answer) -> None:
        try:
            self._answers.send(answer)
        except OSError as error:
            raise _OverError from error

    def _wait(self, reference: Any, crowded: Callable[[RayWorker], str] | None = None) -> Any:
        """What ``reference`` stands for, as soon as it is there."""
        while not self._ray.wait([reference], timeout=LOOK_SECONDS)[0]:
            if self._over.is_set():
                raise _OverError
            if crowded and (why := crowded(self)):
                raise _UnplacedError(why)
        return self._ray.get(reference)

    def _see_off(self, error: Exception | None = None) -> None:
        """Makes sure that the actor is dead for Ray too before the session hears of it, and says why it died.

        One that is out of reach for a moment must not come back. Ray gives its GPU to nobody before its process ends.
        """
        died = self._ray.exceptions.ActorDiedError
        while not self._over.is_set():
            with contextlib.suppress(Exception):
                self._ray.kill(self._actor, no_restart=True)
            try:
                self._ray.get(self._actor.ping.remote(), timeout=LOOK_SECONDS)
            except died as death:
                why = ended(error or death)
                self._fate = f"on {self._node} {why}" if self._node else why
                return
            except Exception as unsure:
                logger.debug("%s", unsure)
            time.sleep(PING_SECONDS)


class _UnplacedError(Exception):
    """There is no GPU for the actor."""


class _OverError(Exception):
    """The session listens no more."""


def ended(error: Exception) -> str:
    """What Ray says of an actor's death, in a line: it says it in ten, with a page of possible causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    text = re.sub(r"^.*\bdead because |^The actor \w+ is ", "", text)
    text = re.split(r"\.? ?(?:Some common causes|There are some potential root causes)", text)[0]
    return f"ended: {text.strip().rstrip('.')[:300]}"


def cargo_of(unit: Unit, arch: str) -> Callable[[Request], Mapping[str, Compiled]]:
    """Says which cubins a request needs, by digest: from this machine's cache, where they were compiled ahead."""

    def cargo(request: Request) -> Mapping[str, Compiled]:
        return {each.digest: compiled(each, arch) for each in launched(request, unit)}

    return cargo


def launched(request: Request, unit: Unit) -> list[Source]:
    """Sources of the kernels that ``request`` launches."""
    if isinstance(request, Prepare):
        return unit.sources(request.problem)
    if isinstance(request, Attempt):
        return [] if request.built.error else [source_for(request.problem, request.config)]
    return [source_for(request.problem, each) for each in request.configs]
