"""`attention()` beside other work: streams, devices, threads, processes, memory and launches that fail."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from streams import MB, SLEEP, Stream, copy, current_state, unused_config

from flashtune import attention
from flashtune.codegen.families.sm80_fwd import Sm80Fwd
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.problem.problem import Spec
from flashtune.errors import FlashtuneError, IllegalConfig, InvalidInput

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fails", [False, True])
def test_current_device_and_stream_are_left_alone(library: Any, fails: bool) -> None:
    q = library.put(np.ones((1, 4, 1, 64)), "float16").array
    for context in (nullcontext(), Stream(library)):
        with context:
            before = current_state(library)
            for _ in range(2):
                if fails:
                    with pytest.raises(FlashtuneError):
                        attention(q, q, q, scale=float("nan"))
                else:
                    attention(q, q, q)
                assert current_state(library) == before, f"{library.name} {fails=}"


class BorrowedStream:
    """A stream of another library, by the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def test_the_current_stream_is_used(library: Any) -> None:
    """A slow kernel, a write of v, the call and a read of the output, in order on a stream of their own."""
    from flashtune.codegen.gpu.cuda import cupy

    sleep = cupy.RawKernel(SLEEP, "sleep_cycles")
    shape = (1, 256, 2, 64)
    count = 2 * 256 * 2 * 64
    zeros = library.put(np.zeros(shape), "float16").array
    v = library.put(np.full(shape, -1.0), "float16").array
    sources = [library.put(np.full(shape, float(number)), "float16").array for number in range(100)]
    results = [library.put(np.full(shape, np.nan), "float16").array for _ in range(100)]
    attention(zeros, zeros, v)
    library.synchronize()
    stream = Stream(library)
    with stream:
        on_cupy = cupy.cuda.Stream.from_external(BorrowedStream(stream.pointer))
        for number in range(100):
            with on_cupy:
                sleep((1,), (1,), (np.int64(100_000),))
            copy(library, v, sources[number], count, stream)
            out = attention(zeros, zeros, v)
            copy(library, results[number], out, count, stream)
    stream.synchronize()
    wrong = [number for number in range(100) if not (library.read(results[number], "float16") == number).all()]
    assert not wrong, f"{library.name}: rounds {wrong} read v at another time than in stream order"


def test_threads_that_call_first_together(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 threads, each on a stream of its own: 8 right results from one load."""
    from flashtune.codegen import launch

    config = unused_config(48 if library.name == "torch" else 88)
    head_dim = 48 if library.name == "torch" else 88
    loads: list[Any] = []
    real = launch.load

    def counted(plan: Any, device: int) -> Any:
        loads.append(plan)
        return real(plan, device)

    monkeypatch.setattr(launch, "load", counted)
    barrier = threading.Barrier(8)
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            q = library.put(np.zeros((1, 50, 2, head_dim)), "float16").array
            v = library.put(np.full((1, 50, 2, head_dim), float(number)), "float16").array
            stream = Stream(library)
            barrier.wait(30)
            with stream:
                outs = [attention(q, q, v, config=config) for _ in range(20)]
            stream.synchronize()
            failures.extend(
                f"thread {number}: {np.unique(got)}"
                for got in (library.read(out, "float16") for out in outs)
                if not (got == number).all()
            )
        except Exception as error:  # a thread's error would be lost
            failures.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert not any(each.is_alive() for each in threads), "deadlock"
    assert not failures, f"{library.name}: {failures}"
    assert len(loads) == 1, f"{library.name}: loaded {len(loads)} times"


def test_a_warm_call_in_a_new_thread(library: Any) -> None:
    """A thread that has no CUDA context yet."""
    q = library.put(np.ones((1, 33, 1, 64)), "float16").array
    attention(q, q, q)
    library.synchronize()
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(attention(q, q, q))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    library.synchronize()
    assert not isinstance(found[0], Exception), repr(found[0])
    assert (library.read(found[0], "float16") == 1).all()


def test_shared_memory_up_to_the_limit(library: Any) -> None:
    """Configs just below and above 48 KB and the largest that fits launch and are right; beyond it they are refused."""
    gpu, spec, family = require_device(), Spec(dtype="float16", head_dim=128), Sm80Fwd()
    if reason := family.unsupported(spec, gpu):
        pytest.skip(f"sm80_fwd: {reason}")
    legal, _ = family.enumerate(spec, gpu)
    by_size = {family.resources(each, spec).shared_memory: each for each in legal}
    wanted = {
        max(size for size in by_size if size <= 49152),
        min(size for size in by_size if size > 49152),
        max(by_size),
    }
    draw = np.random.default_rng(4)
    values = [draw.standard_normal((1, 150, 2, 128)) for _ in range(3)]
    found = []
    for size in sorted(wanted):
        found += [f"{size} B: {each}" for each in library.problems_of(*values, "float16", config=by_size[size])]
    assert not found
    too_large = family.config_type(
        block_m=256, block_n=128, num_warps=8, num_stages=3, q_in_registers=False, blocks_per_sm=1
    )
    needed = family.resources(too_large, spec).shared_memory
    assert needed > gpu.shared_memory_block
    q = library.put(values[0], "float16").array
    with pytest.raises(IllegalConfig, match=f"{needed} B .* {gpu.shared_memory_block} B"):
        attention(q, q, q, config=too_large)


def test_a_failed_launch_raises(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config bound with more shared memory than was asked for at loading: the driver refuses, we raise."""
    from flashtune.codegen.launch import BoundPlan
    from flashtune.errors import LaunchError

    q = library.put(np.ones((1, 31, 1, 64)), "float16").array
    real = BoundPlan.__init__

    def too_much(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        self._launch = functools.partial(self._launch.func, *self._launch.args[:-1], 10**6)

    with monkeypatch.context() as patch:
        patch.setattr(BoundPlan, "__init__", too_much)
        for _ in range(2):
            with pytest.raises(LaunchError):
                attention(q, q, q, scale=0.123)
    library.synchronize()
    assert (library.read(attention(q, q, q, scale=0.321), "float16") == 1).all()


def test_another_device_than_the_current_one(library: Any) -> None:
    from flashtune.codegen.gpu.cuda import cupy

    runtime = cupy.cuda.runtime
    if runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    runtime.setDevice(1)
    values = np.full((1, 40, 2, 64), 3.0)
    other = library.put(values, "float16").array
    if library.name == "torch":
        other = other.to("cuda:1")
    runtime.setDevice(0)
    here = library.put(values, "float16").array
    for _ in range(2):
        out = attention(other, other, other)
        assert runtime.getDevice() == 0
        index = out.get_device() if library.name == "torch" else out.data.device_id
        assert index == 1, f"{library.name}: the output is on device {index}"
        with cupy.cuda.Device(1):
            library.synchronize()
            assert (library.read(out, "float16") == 3).all()
    for arrays in ((here, other, here), (other, here, here)):
        with pytest.raises(InvalidInput, match=r"cuda:[01].*cuda:[01]"):
            attention(*arrays)
    assert (library.read(attention(here, here, here), "float16") == 3).all()


@pytest.mark.usefixtures("memory")
def test_memory_that_torch_keeps(library: Any) -> None:
    """torch caches nearly all memory: its own output comes out of that cache."""
    if library.name != "torch":
        pytest.skip("about torch's allocator")
    torch = library.torch
    q = torch.zeros((1, 64, 2, 64), dtype=torch.float16, device="cuda")
    attention(q, q, q)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    try:
        hoard = torch.empty(max(free - 600 * MB, MB), dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("other processes use the device's memory")
    del hoard
    try:
        large = torch.zeros((1, 1 << 20, 8, 64), dtype=torch.float16, device="cuda")
        short = torch.zeros((1, 64, 8, 64), dtype=torch.float16, device="cuda")
        assert attention(large, short, short).shape == large.shape
        assert (attention(q, q, q) == 0).all().item()
    finally:
        torch.cuda.empty_cache()


FORKED = """
import os
import numpy
from flashtune.codegen.gpu.cuda import cupy
from flashtune import attention
from flashtune.errors import LaunchError
q = cupy.asarray(numpy.ones((1, 8, 1, 64), numpy.float16))
attention(q, q, q)
cupy.cuda.runtime.deviceSynchronize()
child = os.fork()
if child == 0:
    try:
        attention(q, q, q)
    except LaunchError as error:
        print(error, flush=True)
        os._exit(3)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(4)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_call_in_a_forked_child_is_a_clear_error() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "spawn" in done.stdout
