"""`attention()` on a host with two GPUs: the tensors say where it runs, and what is current stays current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from flashtune import attention
from flashtune.errors import FlashtuneError

pytestmark = pytest.mark.gpu

SLEEP = """
extern "C" __global__ void sleep_cycles(long long cycles) {
  long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""
ROUNDS = 100


@pytest.fixture(autouse=True)
def _two_devices() -> Iterator[None]:
    from flashtune.codegen.gpu.cuda import cupy

    runtime = cupy.cuda.runtime
    count = runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two CUDA devices, found {count}")
    runtime.setDevice(0)
    yield
    runtime.setDevice(0)


def current(library: Any, device: int) -> AbstractContextManager[Any]:
    """Makes ``device`` current for the library, and so for CUDA."""
    from flashtune.codegen.gpu.cuda import cupy

    context: AbstractContextManager[Any]
    context = library.torch.cuda.device(device) if library.name == "torch" else cupy.cuda.Device(device)
    return context


def state(library: Any) -> tuple[Any, ...]:
    """The current device, and the current stream of both devices, for CUDA, CuPy and torch."""
    from flashtune.codegen.gpu.cuda import cupy

    found: tuple[Any, ...] = (
        cupy.cuda.runtime.getDevice(),
        cupy.cuda.get_current_stream(0).ptr,
        cupy.cuda.get_current_stream(1).ptr,
    )
    if library.name == "torch":
        cuda = library.torch.cuda
        found += (cuda.current_device(), cuda.current_stream(0).cuda_stream, cuda.current_stream(1).cuda_stream)
    return found


def device_of(library: Any, array: Any) -> int:
    return int(array.get_device() if library.name == "torch" else array.data.device_id)


def put(library: Any, values: Any, device: int, dtype: str = "float16") -> Any:
    with current(library, device):
        array = library.put(values, dtype).array
        library.synchronize()
    assert device_of(library, array) == device
    return array


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("here", "there"), [(0, 1), (1, 0)], ids=["0-current", "1-current"])
def test_tensors_on_the_other_device_give_the_right_answer_there(
    library: Any, dtype: str, here: int, there: int, causal: bool
) -> None:
    draw = np.random.default_rng(5)
    shapes = ((2, 67, 6, 64), (2, 129, 2, 64), (2, 129, 2, 64))
    values = [draw.standard_normal(shape) for shape in shapes]
    q, k, v = (put(library, each, there, dtype) for each in values)
    given = put(library, np.full(shapes[0], np.nan), there, dtype)
    with current(library, here):
        before = state(library)
        for out in (None, given, None):  # a first call and warm ones
            result, lse = attention(q, k, v, out=out, causal=causal, return_lse=True)
            assert state(library) == before
            assert (device_of(library, result), device_of(library, lse)) == (there, there)
            with current(library, there):
                library.synchronize()
                ours = library.read(result, dtype), library.read(lse, "float32")
            assert not library.judge(*ours, values, dtype, f"on cuda:{there}", causal=causal)
            assert state(library) == before


def test_the_devices_take_turns(library: Any) -> None:
    """Each call goes to its tensors' device, whatever the call before did."""
    arrays = [put(library, np.full((1, 40, 2, 64), 1.0 + device), device) for device in (0, 1)]
    for number in range(20):
        out = attention(arrays[number % 2], arrays[number % 2], arrays[number % 2])
        with current(library, number % 2):
            library.synchronize()
            assert (library.read(out, "float16") == 1 + number % 2).all()
    assert state(library)[0] == 0


@pytest.mark.parametrize("here", [0, 1])
def test_what_can_not_be_served_is_refused_and_changes_nothing(library: Any, here: int) -> None:
    zero, one = (put(library, np.ones((1, 31, 2, 64)), device) for device in (0, 1))
    host = zero.cpu() if library.name == "torch" else zero.get()
    values = np.ones((1, 31, 2, 64), np.float16)
    refusals = [
        ((zero, one, zero), {}, r"cuda:[01].*cuda:[01]"),
        ((one, one, zero), {}, r"cuda:[01].*cuda:[01]"),
        ((one, host, one), {}, r"cpu"),
        ((one, values, one), {}, r"numpy"),
        ((values, one, one), {}, r"NumPy|numpy"),
        ((one, one, one), {"out": zero}, r"cuda:[01].*cuda:[01]"),
        ((one, one, one), {"scale": float("nan")}, r"scale=nan"),
    ]
    with current(library, here):
        before = state(library)
        for arrays, options, message in refusals:
            with pytest.raises((ValueError, TypeError), match=message) as caught:
                attention(*arrays, **options)
            assert isinstance(caught.value, FlashtuneError)
            assert state(library) == before
        for device, array in enumerate((zero, one)):
            out = attention(array, array, array)
            assert state(library) == before
            with current(library, device):
                library.synchronize()
                assert (library.read(out, "float16") == 1).all()


@pytest.fixture
def side_stream(library: Any) -> Iterator[int]:
    """A stream that is current on device 1 while device 0 is the current device; its address."""
    from flashtune.codegen.gpu.cuda import cupy

    if library.name == "torch":
        cuda = library.torch.cuda
        with cuda.device(1):
            stream = cuda.Stream()
        cuda.set_stream(stream)
        cuda.set_device(0)
        yield stream.cuda_stream
        cuda.set_stream(cuda.default_stream(1))
        cuda.set_device(0)
    else:
        with cupy.cuda.Device(1):
            stream = cupy.cuda.Stream(non_blocking=True)
            stream.use()
        yield stream.ptr
        with cupy.cuda.Device(1):
            cupy.cuda.Stream.null.use()


class BorrowedStream:
    """A stream of another library, by the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def borrowed(library: Any, pointer: int) -> AbstractContextManager[Any]:
    """Makes a stream of torch CuPy's current one; CuPy's own is current already."""
    from flashtune.codegen.gpu.cuda import cupy

    if library.name == "cupy":
        return nullcontext()
    stream: AbstractContextManager[Any] = cupy.cuda.Stream.from_external(BorrowedStream(pointer))
    return stream


def test_the_current_stream_of_the_tensors_device_is_used(library: Any, side_stream: int) -> None:
    """A slow kernel, a write of v, the call and a read of the output, in order on that stream of device 1."""
    from flashtune.codegen.gpu.cuda import cupy

    def address(array: Any) -> int:
        return int(array.data_ptr() if library.name == "torch" else array.data.ptr)

    def copy(target: Any, source: Any) -> None:
        with cupy.cuda.Device(1):
            cupy.cuda.runtime.memcpyAsync(address(target), address(source), count, 3, side_stream)

    sleep = cupy.RawKernel(SLEEP, "sleep_cycles")
    shape = (1, 256, 2, 64)
    count = 2 * 256 * 2 * 64
    zeros, v = (put(library, np.full(shape, value), 1) for value in (0.0, -1.0))
    sources = [put(library, np.full(shape, float(number)), 1) for number in range(ROUNDS)]
    results = [put(library, np.full(shape, np.nan), 1) for _ in range(ROUNDS)]
    attention(zeros, zeros, v)
    before = state(library)
    assert before[0] == 0
    assert side_stream in before
    for source, result in zip(sources, results, strict=True):
        with cupy.cuda.Device(1), borrowed(library, side_stream):
            sleep((1,), (1,), (np.int64(100_000),))
        copy(v, source)
        copy(result, attention(zeros, zeros, v))
        assert state(library) == before
    with current(library, 1):
        library.synchronize()
        read = [library.read(result, "float16") for result in results]
    wrong = [number for number, values in enumerate(read) if not (values == number).all()]
    assert not wrong, f"{library.name}: rounds {wrong} read v at another time than in stream order"
