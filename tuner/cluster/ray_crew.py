"""The workers of a run on a Ray cluster: asked for at once, looked at before anything is measured, replaced later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.errors import NoGpu
from flashtune.tuner.results.rows import own_version
from flashtune.tuner.workers.process_worker import Lost, Request, Unit
from flashtune.tuner.workers.supervisor import START_SECONDS

from .ray_actor import Host, Opened, RayUnit
from .ray_cluster import ACCELERATORS, connect, free_gpus, import_ray, live_nodes
from .ray_worker import RayWorker, cargo_of, ended

logger = logging.getLogger("flashtune")

LEAVE_SECONDS = 5.0
"""For threads to see that the run is over, before the connection to Ray is closed under them."""
INSTALL_ALIKE = 'Each node needs the same Python and pip install "flashtune[cuda13,ray]", as this machine has it'


class Crew:
    """Workers on up to ``most`` GPUs of the cluster, each of which is a ``gpu``. ``units`` are those with a place."""

    def __init__(
        self,
        ray: Any,
        gpu: Gpu,
        most: int,
        *,
        unit: Callable[[int, Gpu, str], Unit] = RayUnit,
        cargo: Callable[[Unit, str], Callable[[Request], Mapping[str, Compiled]]] = cargo_of,
    ) -> None:
        self.units: list[Unit] = []
        self.here = 0
        """How many of the workers may be on this machine."""
        self._ray = ray
        self._gpu = gpu
        self._label = ACCELERATORS[gpu.name]
        self._most = most
        self._kind = ray.remote(
            num_gpus=1, num_cpus=1, accelerator_type=self._label, max_restarts=0, max_task_retries=0, max_concurrency=1
        )(Host)
        self._make_unit = unit
        self._cargo = cargo
        self._ready: dict[str, tuple[Any, Any]] = {}
        """Actors that have opened their GPU and have no worker in this process yet, by unit."""
        self._workers: list[RayWorker] = []
        self._others = 0
        """GPUs that were in use by others at the start."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Asks for the workers and waits for them. :class:`NoGpu` where there is none, or one is no ``gpu``."""
        free = free_gpus(self._ray, self._gpu, self._most)
        if free < self._most:  # else there may be others beside these
            self._others = self._alive() - free
        asked = [self._make_unit(number, self._gpu, self._label) for number in range(free)]
        for unit in asked:
            self._ready[unit.name] = self._actor(unit)
        openings = [opening for _, opening in self._ready.values()]
        placed, _ = self._ray.wait(openings, num_returns=len(openings), timeout=START_SECONDS)
        for unit in asked:
            opening = self._ready[unit.name][1]
            if opening in placed:
                self._check(opening)
                self.units.append(unit)
            else:
                self._dismiss(unit.name)
        if not self.units:
            raise NoGpu(
                f"Ray found no place for a worker within {START_SECONDS:.0f} s. Each needs a free {self._label} and a "
                "free CPU beside it: `ray status` shows what is in use"
            )
        if len(self.units) < len(asked):
            logger.warning("Ray gave %d of %d %s; the run goes on with these", len(self.units), len(asked), self._label)
        own = self._ray.util.get_node_ip_address()
        self.here = min(len(self.units), sum(count for _, count, node in live_nodes(self._ray) if node == own))

    def hire(self, unit: Unit) -> RayWorker:
        """A worker for ``unit``: the one that waits since :meth:`start`, or another one, wherever Ray places it."""
        try:
            actor, opening = self._ready.pop(unit.name) if unit.name in self._ready else self._actor(unit)
        except Exception as error:  # of Ray's, of whatever kind: the supervisor counts it as a death
            raise OSError(str(error)) from error
        cargo = self._cargo(unit, self._gpu.arch)
        with self._lock:
            worker = RayWorker(self._ray, actor, opening, unit, cargo, self._crowded)
            self._workers.append(worker)
        return worker

    def close(self) -> None:
        """Ends what is left of the workers."""
        for name in list(self._ready):
            self._dismiss(name)
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.join(LEAVE_SECONDS)

    def _actor(self, unit: Unit) -> tuple[Any, Any]:
        """An actor, and the reference to what it says first. Each has a CPU core, for its launches."""
        actor = self._kind.remote(unit, own_version())
        return actor, actor.open.remote()

    def _check(self, opening: Any) -> None:
        try:
            opened: Opened = self._ray.get(opening)
        except Exception as error:  # it could not even be made there
            raise NoGpu(f"a worker on the Ray cluster {ended(error)}. {INSTALL_ALIKE}") from error
        if isinstance(opened.said, Lost):
            raise NoGpu(f"the worker on {opened.node} can't measure for {self._gpu}: {opened.said.message}")

    def _dismiss(self, name: str) -> None:
        actor, _ = self._ready.pop(name)
        self._ray.kill(actor, no_restart=True)

    def _alive(self) -> int:
        """GPUs of the cluster that go by the name, in use or not."""
        return sum(count for labels, count, _ in live_nodes(self._ray) if self._label in labels)

    def _crowded(self, worker: RayWorker) -> str:
        """Why ``worker`` will not be placed: after the loss of a node there may be fewer GPUs than workers.

        Ray would let it wait for ever, for a node that may join. Without it the others take its problems over.
        """
        left = self._alive() - self._others
        with self._lock:
            staff = [each for each in self._workers if not each.gone]
        if worker not in staff or staff.index(worker) < left:
            return ""
        return f"Ray has no {self._label} for it: of those that the run began with {max(0, left)} are left, and at work"


@contextmanager
def crew(address: str, gpu: Gpu, most: int) -> Iterator[Crew]:
    """Workers of the cluster at ``address``, started; they end with the block, and so does the connection."""
    ray = import_ray()
    connected = connect(ray, address)
    found = Crew(ray, gpu, most)
    try:
        found.start()
        yield found
    finally:
        found.close()
        if connected:
            ray.shutdown()
