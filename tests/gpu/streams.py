"""What tests of attention beside other work share: streams, copies and configs that nobody has used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flashtune.codegen.families.sm80_fwd import Sm80Fwd
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Spec

MB = 1 << 20
SLEEP = """
extern "C" __global__ void sleep_cycles(long long cycles) {
  long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""


def unused_config(head_dim: int) -> Config:
    """A config that no other test launches: a first call with it loads a kernel."""
    gpu, spec, family = require_device(), Spec(dtype="float16", head_dim=head_dim), Sm80Fwd()
    if reason := family.unsupported(spec, gpu):
        pytest.skip(f"sm80_fwd: {reason}")
    legal, _ = family.enumerate(spec, gpu)
    return next(each for each in reversed(legal) if each != family.default(spec, gpu))


def current_state(library: Any) -> tuple[Any, ...]:
    from flashtune.codegen.gpu.cuda import cupy

    state: tuple[Any, ...] = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    if library.name == "torch":
        cuda = library.torch.cuda
        state += (cuda.current_device(), cuda.current_stream().cuda_stream)
    return state


class Stream:
    """A stream of the library that does not wait for the default stream."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.stream = library.torch.cuda.Stream() if library.name == "torch" else self._cupy().Stream(non_blocking=True)
        self.pointer = self.stream.cuda_stream if library.name == "torch" else self.stream.ptr

    @staticmethod
    def _cupy() -> Any:
        from flashtune.codegen.gpu.cuda import cupy

        return cupy.cuda

    def __enter__(self) -> Any:
        self.context = self.library.torch.cuda.stream(self.stream) if self.library.name == "torch" else self.stream
        return self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def synchronize(self) -> None:
        self.stream.synchronize()


MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
"""cudaStreamCaptureMode, by torch's names."""


@contextmanager
def capture(library: Any, stream: Stream, mode: str = "") -> Iterator[list[Callable[[], None]]]:
    """Captures the block on ``stream``, in ``mode`` or that of the library; the list then holds what replays it."""
    replay: list[Callable[[], None]] = []
    if library.name == "torch":
        graph: Any = library.torch.cuda.CUDAGraph()
        with library.torch.cuda.graph(graph, stream=stream.stream, capture_error_mode=mode or "global"):
            yield replay
        replay.append(graph.replay)
        return
    with stream:
        stream.stream.begin_capture(MODES[mode or "relaxed"])
        try:
            yield replay
        finally:
            graph = stream.stream.end_capture()
    replay.append(lambda: graph.launch(stream=stream.stream))


def address(library: Any, array: Any) -> int:
    return int(array.data_ptr() if library.name == "torch" else array.data.ptr)


def copy(library: Any, target: Any, source: Any, count: int, stream: Any) -> None:
    from flashtune.codegen.gpu.cuda import cupy

    cupy.cuda.runtime.memcpyAsync(address(library, target), address(library, source), count, 3, stream.pointer)
