"""Kernels in a process of their own, replaced when one is lost: after an illegal instruction no launch of it succeeds.

Worker processes import this file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashtune.codegen.compiler.nvrtc import compile_source
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.plan.tensor_map import TensorMap

Array = NDArray[Any]
Argument = np.generic | str | tuple[str, TensorMap]

LIMIT_S = 60.0
"""For a launch: compiling, the first use of the device and all repetitions."""


@dataclass(frozen=True)
class Launch:
    """A kernel and what it takes: numbers, arrays by name, or tensor maps of them (addresses there: offsets)."""

    source: Source
    entry: str
    arrays: Mapping[str, Array]
    arguments: tuple[Argument, ...]
    threads: int
    shared_memory: int
    grid: int = 1
    repeat: int = 1
    """Each time with fresh arrays."""


class LaunchFailed(Exception):
    """With CUDA's error, or that there was no end."""


class Launcher:
    """``run`` gives what the arrays hold after each repetition, or raises `LaunchFailed`."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def run(self, launch: Launch) -> list[dict[str, Array]]:
        if self._pipe is None:
            context = get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
        self._pipe.send(launch)
        try:
            if not self._pipe.poll(LIMIT_S):
                raise LaunchFailed(f"no end within {LIMIT_S:g} s")
            answer: list[dict[str, Array]] | LaunchFailed = self._pipe.recv()
            if isinstance(answer, LaunchFailed):
                raise answer
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.close()
            raise LaunchFailed(f"its process ended with {code}") from None
        except LaunchFailed:
            self.close()
            raise
        return answer

    def close(self) -> None:
        if self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._pipe = None


def _serve(pipe: Connection) -> None:
    while True:
        try:
            launch: Launch = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_results(launch))
        except Exception as error:
            pipe.send(LaunchFailed(f"{type(error).__name__}: {error}"))


def _results(launch: Launch) -> list[dict[str, Array]]:
    from flashtune.codegen.gpu.cuda import Module, cupy, driver

    cupy.cuda.Device().use()
    cubin = compile_source(launch.source, "sm_90a").cubin
    module = Module()
    module.load(cubin)
    function = module.get_function(launch.entry)
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_memory)
    results = []
    for _ in range(launch.repeat):
        arrays = {name: cupy.asarray(np.ascontiguousarray(each)) for name, each in launch.arrays.items()}
        buffers = [ctypes.create_string_buffer(each, len(each)) for each in map(_bytes(arrays), launch.arguments)]
        pointers = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(each) for each in buffers])
        stream = cupy.cuda.get_current_stream()
        driver.launchKernel(
            function.ptr, launch.grid, 1, 1, launch.threads, 1, 1, launch.shared_memory, stream.ptr,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip
        stream.synchronize()
        results.append({name: each.get() for name, each in arrays.items()})
    return results


def _bytes(arrays: Mapping[str, Any]) -> Any:
    def content(argument: Argument) -> bytes:
        if isinstance(argument, np.generic):
            return argument.tobytes()
        if isinstance(argument, str):
            return np.uint64(arrays[argument].data.ptr).tobytes()
        name, described = argument
        return replace(described, address=arrays[name].data.ptr + described.address).encode()

    return content
