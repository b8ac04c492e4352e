"""The part of ray that the tuner calls, as threads of this process, with nodes that have GPUs.

For what a real cluster on CPU (test_ray_cluster.py) can't show: what an actor is asked for with, GPUs in other hands,
errors of Ray's own, and a whole run in which flashtune asks for real devices.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace
from typing import Any

THREE = [("10.0.0.1", 1, "H100"), ("10.0.0.2", 1, "H100"), ("10.0.0.3", 1, "H100")]
"""Nodes with one GPU each."""


class ActorDiedError(Exception):
    pass


def travelled(value: Any) -> Any:
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(value))


class Actor:
    """Each method is an object with ``remote``, as Ray has it. Calls run one by one, once there is a node."""

    def __init__(self, ray: FakeRay, make: Callable[[], Any]) -> None:
        self._ray = ray
        self._make = make
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]] | None] = queue.SimpleQueue()
        self._open: list[Future[Any]] = []
        self.node: Node | None = None
        self.death: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        job: Future[Any] = Future()
        with self._ray.lock:
            if self.death:
                job.set_exception(ActorDiedError(*self.death.args))
            else:
                self._open.append(job)
                self._calls.put((name, travelled(arguments), job))
        return job

    def place(self, node: Node) -> None:
        self.node = node
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        try:
            host = self._make()
        except Exception as error:
            self.die(ActorDiedError(f"The actor died because of an error raised in its creation task\n{error}"))
            return
        while (call := self._calls.get()) is not None:
            name, arguments, job = call
            try:
                result, error = travelled(getattr(host, name)(*arguments)), None
            except Exception as raised:
                result, error = None, raised
            with self._ray.lock:
                if self.death:
                    return
                self._open.remove(job)
                job.set_exception(error) if error else job.set_result(result)

    def die(self, death: Exception) -> None:
        with self._ray.lock:
            if self.death is None:
                self.death = death
                self._calls.put(None)
                for job in self._open:
                    job.set_exception(death)
                if self.node is not None:
                    self.node.actors.remove(self)
                self._ray.place()


class Node:
    def __init__(self, name: str, gpus: int, accelerator: str) -> None:
        self.name, self.gpus, self.accelerator = name, gpus, accelerator
        self.actors: list[Actor] = []


class FakeRay:
    """Stands in for the module. ``asked`` are the options that actors were made with."""

    def __init__(self, nodes: Sequence[tuple[str, int, str]] = (), *, connected: bool = True) -> None:
        self.lock = threading.RLock()
        self.all = [Node(*each) for each in nodes]
        self.waiting: list[Actor] = []
        self.asked: list[dict[str, Any]] = []
        self.calls: list[Any] = []
        self.connected = connected
        self.failure: Exception | None = None
        """Of `init`."""
        self.others = 0
        """GPUs that somebody else uses."""
        self.exceptions = SimpleNamespace(ActorDiedError=ActorDiedError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, **options: Any) -> None:
        self.calls.append(options["address"])
        if self.failure:
            raise self.failure
        self.connected = True

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.connected = False

    def must_be_connected(self) -> None:
        assert self.connected, "ray would start a cluster of its own"

    def nodes(self) -> list[dict[str, Any]]:
        self.must_be_connected()
        return [
            {
                "Alive": True,
                "NodeManagerAddress": each.name,
                "Resources": {"CPU": 4.0, "GPU": float(each.gpus), f"accelerator_type:{each.accelerator}": 1.0}
                if each.gpus
                else {"CPU": 4.0},
            }
            for each in self.all
        ]

    def available_resources(self) -> dict[str, float]:
        self.must_be_connected()
        free = sum(each.gpus - len(each.actors) for each in self.all) - self.others
        return {"CPU": 4.0, "GPU": float(free)} if free else {"CPU": 4.0}

    def remote(self, **options: Any) -> Callable[[type], Any]:
        def kind(made: type) -> Any:
            def start(*arguments: Any) -> Actor:
                self.must_be_connected()
                actor = Actor(self, lambda: made(*arguments))
                with self.lock:
                    self.asked.append(options)
                    self.waiting.append(actor)
                    self.place()
                return actor

            return SimpleNamespace(remote=start)

        return kind

    def place(self) -> None:
        label = self.asked[-1]["accelerator_type"]
        for node in self.all:
            while self.waiting and node.accelerator == label and len(node.actors) < node.gpus:
                actor = self.waiting.pop(0)
                if actor.death is None:
                    node.actors.append(actor)
                    actor.place(node)

    def wait(
        self, references: Sequence[Future[Any]], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        if not 0 < num_returns <= len(references) or len(set(references)) < len(references):
            raise ValueError("as ray.wait has it: different references, and as many as are to be ready")
        wait(references, timeout, FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED")
        return [each for each in references if each.done()], [each for each in references if not each.done()]

    def get(self, reference: Future[Any], timeout: float | None = None) -> Any:
        return reference.result(timeout)

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        actor.die(ActorDiedError("The actor died.\nThe actor is dead because it was killed by `ray.kill`."))
