"""The node's side of a worker on a Ray cluster: an actor that holds one GPU and answers. Needs no ray itself.

Nothing is compiled here. What a request launches comes with it, as the session's machine compiled and recorded it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from flashtune.codegen.compiler.kernel_cache import serve_only
from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import FlashtuneError, InvalidInput
from flashtune.tuner.results.rows import own_version
from flashtune.tuner.trial.outcome import Bench
from flashtune.tuner.workers.cuda_device import CudaUnit
from flashtune.tuner.workers.process_worker import Answer, Lost, Prepare, Request, Unit, WorkerReady, answer

logger = logging.getLogger("flashtune")


@dataclass(frozen=True, slots=True)
class Opened:
    """What a worker says first, and the node that it is on."""

    node: str
    said: WorkerReady | Lost


class Host:
    """Holds the bench of ``unit`` for a session whose flashtune is ``version``."""

    def __init__(self, unit: Unit, version: str) -> None:
        self._unit = unit
        self._version = version
        self._kept: dict[str, Compiled] = {}

    def open(self) -> Opened:
        """Takes the GPU."""
        node = socket.gethostname()
        try:
            if own_version() != self._version:
                raise InvalidInput(
                    f"flashtune is {own_version() or 'a checkout'} there and {self._version or 'a checkout'} here"
                )
            self._bench: Bench = self._unit.open()
            return Opened(node, WorkerReady(self._bench.evidence))
        except FlashtuneError as error:
            return Opened(node, Lost(str(error)))
        except Exception as error:
            return Opened(node, Lost(f"{type(error).__name__}: {error}"))

    def answer(self, request: Request, cubins: Mapping[str, Compiled]) -> Answer:
        """What comes of ``request``, which launches ``cubins``; those of a preparation are for all that follows."""
        if isinstance(request, Prepare):
            self._kept.update(cubins)
        serve_only({**self._kept, **cubins})
        return answer(request, self._bench)

    def ping(self) -> None:
        """Fails where there is nobody any more."""


@dataclass(frozen=True, slots=True)
class RayUnit:
    """GPU ``number`` of a run, a ``gpu`` that Ray calls ``accelerator``. Which card that is turns out in the worker."""

    number: int
    gpu: Gpu
    accelerator: str

    @property
    def name(self) -> str:
        return f"ray:{self.number}"

    @property
    def uuid(self) -> str:
        return ""

    def open(self) -> Bench:
        from flashtune.codegen.gpu.devices import require_device

        found = require_device(0)  # Ray shows an actor its own GPU alone
        if found.key != self.gpu.key:
            raise InvalidInput(
                f"its GPU is {found} ({found.key}), and this run is for {self.gpu} ({self.gpu.key}): models are never "
                f"mixed, and Ray calls both {self.accelerator}"
            )
        return CudaUnit(0, self.gpu, "").open()

    def sources(self, problem: Problem) -> list[Source]:
        return CudaUnit(0, self.gpu, "").sources(problem)
