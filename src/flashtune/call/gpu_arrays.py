"""What GPU array libraries share: the memo of ready calls, the cold path that fills it, and the uncommon launch.

A subclass writes the warm path out in full, with the reads of its own library: one dict hit on shapes, strides,
dtypes, devices, alignment bits and options leads to a `ReadyCall`, and nothing else is decided. The key holds all that
validation looked at, so a key that was once found valid is valid. `attention()` sees to it that options which are equal
as keys are of one type.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from flashtune.errors import InvalidInput, InvalidType

from .arrays import ArrayKind, Options, forget
from .check import Call, check_call, check_overlap, contiguous_strides
from .layer import Layer

MEMO_LIMIT = 4096
"""Ready calls remembered per array library; the oldest makes room."""

NO_CONTEXT = -1
"""Never a CUDA context: sends a call through :meth:`GpuArrays.launch_uncommon`."""

cold = threading.RLock()
"""Held while a call that was not seen before is made ready: one kernel is compiled once, whoever asks first."""


Launch = Callable[[int, int, int, int, int, int], None]
"""Takes the addresses of q, k, v, out and LSE (0 if not wanted), and the stream."""


def _launch_nothing(q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
    """For results without an element."""


def _after_fork() -> None:
    """A child starts anew: handles of its parent's CUDA contexts are dead, and the lock may be held for ever."""
    global cold
    cold = threading.RLock()
    forget()


os.register_at_fork(after_in_child=_after_fork)


class ReadyCall:
    """What a warm call needs. ``context`` is the CUDA context in which ``launch`` is legal. Strides count elements.

    ``recent`` is the library's own means to know the next call of this kind without its key.
    """

    __slots__ = (
        "call",
        "context",
        "device",
        "extents",
        "launch",
        "lse_shape",
        "lse_strides",
        "out_strides",
        "recent",
        "shape",
    )

    def __init__(self, call: Call, device: int, context: int, launch: Launch) -> None:
        self.call = call
        self.device = device
        self.launch = launch
        self.extents = call.extents
        self.lse_shape = call.lse_shape
        self.lse_strides = contiguous_strides(call.lse_shape)
        self.shape = call.shape
        self.recent: Any = None
        self.out_strides = contiguous_strides(call.shape)
        self.context = NO_CONTEXT if any(call.copies) else context


class GpuArrays(ArrayKind):
    """An array library whose arrays are in device memory."""

    graphs_own_memory: bool
    """Whether what the library allocates while it captures a CUDA graph stays reserved for that graph."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.memo: dict[tuple[Any, ...], ReadyCall] = {}
        self.captured: list[Any] = []
        """Memory that captured launches use and nobody else holds. A graph does not say when it ends, so it is kept."""

    # What a library must offer beside `call` and `facts`; none of it is on the warm path.

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """A new contiguous array on the device of ``like``, which is current."""

    @abstractmethod
    def workspace(self, size: int) -> tuple[Any, int]:
        """``size`` bytes on the current device and stream, as an object that owns them, and their address."""

    @abstractmethod
    def contiguous(self, array: Any) -> Any:
        """A contiguous copy."""

    @abstractmethod
    def address(self, array: Any) -> int: ...

    @abstractmethod
    def device(self, array: Any) -> int:
        """Index of the device that holds ``array``."""

    @abstractmethod
    def stream(self, device: int) -> int:
        """The library's current stream of ``device`` (a raw cudaStream_t)."""

    def forbid(self, arrays: Sequence[Any]) -> None:
        """Raises for arrays that the library would track in a way that attention() does not honour yet."""

    def prepare(self, key: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any, options: Options) -> ReadyCall:
        """The cold path: validates, chooses, compiles or loads, and remembers the result under ``key``."""
        call = self._check(q, k, v, out, options)
        with cold:
            ready = self.memo.get(key)
            if ready is None:
                ready = self._make_ready(call, q)
                while len(self.memo) >= MEMO_LIMIT:
                    self.memo.pop(next(iter(self.memo)))
                self.memo[key] = ready
        return ready

    def call_first(self, key: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any, options: Options) -> Any:
        """:meth:`call` for a kind of call that is not remembered under ``key``.

        The launch is made under the guard as well: what it allocates is as new as its kernel, and a library that has to
        ask the driver for memory would ruin a graph that another thread captures.
        """
        ready = self.prepare(key, q, k, v, out, options)
        with self.layer.guard(ready.device):
            return self.call(q, k, v, out, options)

    def forget(self) -> None:
        self.memo.clear()

    def refuse(self, q: Any, k: Any, v: Any, out: Any, options: Options, error: Exception) -> Exception:
        """The reason why no key could be made of the arguments; ``error`` where validation finds none."""
        self._check(q, k, v, out, options)
        return error

    def launch_uncommon(self, ready: ReadyCall, q: Any, k: Any, v: Any, out: Any) -> Any:
        """A launch that needs copies, or from another current device, or on a thread without a context, or none."""
        call = ready.call
        if out is not None:
            check_overlap(ready.extents, self.address(q), self.address(k), self.address(v), self.address(out))
        with self.layer.guard(ready.device):
            q_used, k_used, v_used = (
                self.contiguous(array) if copied else array
                for array, copied in zip((q, k, v), call.copies, strict=True)
            )
            if any(call.copies):
                self.keep(self.stream(ready.device), q_used, k_used, v_used)
            result = self.empty(call.shape, call.problem.dtype, q) if out is None else out
            lse = self.empty(call.lse_shape, "float32", q) if call.return_lse else None
            if not call.empty:
                ready.launch(
                    self.address(q_used),
                    self.address(k_used),
                    self.address(v_used),
                    self.address(result),
                    0 if lse is None else self.address(lse),
                    self.stream(ready.device),
                )
        return (result, lse) if call.return_lse else result

    def _check(self, q: Any, k: Any, v: Any, out: Any, options: Options) -> Call:
        arrays = [q, k, v] if out is None else [q, k, v, out]
        facts = [self.facts(name, array) for name, array in zip(("q", "k", "v", "out"), arrays, strict=False)]
        devices = ", ".join(f"{each.name} {each.device}" for each in facts)
        for each in facts:
            if not each.device.startswith("cuda:"):
                raise InvalidInput(
                    f"{each.name} is a {self.name} on {each.device} (devices: {devices}): "
                    "move it to a CUDA device, or pass NumPy arrays to run on the CPU"
                )
        self.forbid(arrays)
        return check_call(facts[0], facts[1], facts[2], facts[3] if out is not None else None, options)

    def _make_ready(self, call: Call, q: Any) -> ReadyCall:
        device = self.device(q)
        if call.empty:
            return ReadyCall(call, device, NO_CONTEXT, _launch_nothing)
        from .choose import plan_for

        layer = self.layer
        with layer.guard(device):
            gpu = layer.gpu(device)
            capturing = layer.capturing(self.stream(device))
            loaded = plan_for(call.problem, gpu, call.config, lambda plan: layer.load(plan, device, capturing))
            bound = loaded.bind(call.strides, call.scale)
            size = loaded.plan.workspace_bytes
            launch = self._launch_with_workspace(bound.launch, size) if size else bound.launch
            return ReadyCall(call, device, layer.context(), launch)

    def _launch_with_workspace(self, launch: Callable[..., None], size: int) -> Launch:
        """``launch`` with memory of its own for each call: it is given back at once, to be used behind this launch on
        the same stream, as the library's allocator sees to."""

        def with_workspace(q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
            owner, address = self.workspace(size)
            launch(q, k, v, out, lse, stream, address)
            self.keep(stream, owner)

        return with_workspace

    def keep(self, stream: int, *owners: Any) -> None:
        """Keeps ``owners`` where ``stream`` of the current device captures a graph that would outlive them."""
        if not self.graphs_own_memory and self.layer.capturing(stream):
            self.captured.extend(owners)


def foreign(name: str, array: Any, expected: str) -> InvalidType:
    """The error for an argument that belongs to another library than q."""
    kind = type(array)
    where = getattr(array, "device", None)
    on = f" on {where}" if where is not None else ""
    return InvalidType(f"{name} is a {kind.__module__}.{kind.__qualname__}{on}; with q, it must be a {expected}")
