"""The devices of this machine: which `Gpu` each is, and facts of the single card that go with measurements."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import re
import statistics
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtune.errors import FlashtuneError, InvalidInput, MissingDependency, NoGpu

from .gpu import CAPABILITIES, Gpu, nearest_known

_MIG = re.compile(r"^(.*?) MIG (\S+)$")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAttributes:
    """What a driver says of a device, in the driver's units. Clocks and bus width are 0 where it says nothing."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory_block: int
    l2_bytes: int
    memory_bytes: int
    clock_khz: int = 0
    memory_clock_khz: int = 0
    memory_bus_bits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One card and its software: recorded with measurements, never part of a key.

    Versions are text such as '13.0' and '580.95.05'. Empty text and 0 mean not known.
    """

    name: str
    uuid: str
    pci_bus: str
    driver: str
    cuda_driver: str
    cuda_runtime: str
    power_limit_w: float


def gpu_from_attributes(attributes: DeviceAttributes) -> Gpu:
    """The `Gpu` of a device, from what its driver says; needs no device.

    A known name with the SMs, shared memory and capability of the table is that row. A known name with others (a MIG
    slice, another SKU) is the row with the device's own figures, its tensor rate scaled by the SMs. An unknown name is
    built from attributes alone: bandwidth from memory clock and bus width, tensor rate from SMs, clock and capability;
    what the driver leaves out is the median of the table's cards of that capability.
    """
    from .table import REPORTED

    name, mig = attributes.name.strip(), ""
    if match := _MIG.match(name):
        name, mig = match[1], match[2]
    row = REPORTED.get(name.removeprefix("NVIDIA "))
    if row is not None and row.capability != attributes.capability:
        row = None
    if (
        row is not None
        and not mig
        and (row.num_sms, row.shared_memory_block) == (attributes.num_sms, attributes.shared_memory_block)
    ):
        return row
    clock = round(attributes.clock_khz / 1000) or (row.clock_mhz if row else round(_typical(attributes, _clock)))
    own = Gpu(
        name=row.name if row else _normalised(name),
        capability=attributes.capability,
        num_sms=attributes.num_sms,
        shared_memory_block=attributes.shared_memory_block,
        l2_bytes=attributes.l2_bytes,
        memory_gb=_memory_gb(attributes.memory_bytes),
        bandwidth_gb_s=_bandwidth(attributes, row),
        clock_mhz=clock,
        tensor_tflops=_tensor_tflops(name, attributes, clock),
        mig=mig,
    )
    if row is None:
        return own
    return dataclasses.replace(own, tensor_tflops=round(row.tensor_tflops * own.num_sms / row.num_sms, 1))


@functools.cache
def gpu_of_device(index: int) -> Gpu:
    """The `Gpu` of CUDA device ``index``. :class:`NoGpu` without a device, :class:`InvalidInput` for a wrong index."""
    return gpu_from_attributes(device_attributes(index))


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA sees, by device index; empty without a driver, a device or CuPy."""
    if missing_device() is not None:
        return []
    return [gpu_of_device(index) for index in range(_runtime().getDeviceCount())]


def require_device(index: int = 0) -> Gpu:
    """The `Gpu` of device ``index``, or one error that says what is missing."""
    return gpu_of_device(index)


def missing_device() -> FlashtuneError | None:
    """Why no CUDA device can be used, as the error that :func:`require_device` raises, or None if one can."""
    try:
        runtime = _runtime()
    except MissingDependency as error:
        return error
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return NoGpu(_why_no_device(runtime, error))
    return None if count else NoGpu("CUDA sees no device")


def device_attributes(index: int) -> DeviceAttributes:
    """What the driver says of CUDA device ``index``; raises as :func:`gpu_of_device`."""
    runtime = _checked_runtime(index)
    properties = runtime.getDeviceProperties(index)

    def attribute(name: str) -> int:
        value: int = runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), index)
        return value

    return DeviceAttributes(
        name=properties["name"].decode(),
        capability=(properties["major"], properties["minor"]),
        num_sms=attribute("MultiProcessorCount"),
        shared_memory_block=attribute("MaxSharedMemoryPerBlockOptin"),
        l2_bytes=attribute("L2CacheSize"),
        memory_bytes=properties["totalGlobalMem"],
        clock_khz=attribute("ClockRate"),
        memory_clock_khz=attribute("MemoryClockRate"),
        memory_bus_bits=attribute("GlobalMemoryBusWidth"),
    )


def device_facts(index: int) -> DeviceFacts:
    """Facts of the card at CUDA device ``index``. With nvidia-ml-py installed the power limit is among them."""
    runtime = _checked_runtime(index)
    name = runtime.getDeviceProperties(index)["name"].decode()
    unit = unit_uuid(index)
    return DeviceFacts(
        name=name,
        uuid=unit,
        pci_bus=runtime.deviceGetPCIBusId(index),
        driver=driver_version(),
        cuda_driver=_version(runtime.driverGetVersion()),
        cuda_runtime=_version(runtime.runtimeGetVersion()),
        power_limit_w=_power_limit(unit),
    )


def unit_uuid(index: int) -> str:
    """UUID of the card (or MIG slice) at CUDA device ``index``, as nvidia-smi prints it; empty if not known."""
    runtime = _checked_runtime(index)
    mig = _MIG.match(runtime.getDeviceProperties(index)["name"].decode()) is not None
    raw = _driver_uuid(index)
    return f"{'MIG' if mig else 'GPU'}-{uuid.UUID(bytes=raw)}" if raw else ""


def driver_version() -> str:
    """Version of the kernel driver, e.g. '580.95.05'; empty if not known."""
    from_nvml = _ask_nvml(lambda nvml: nvml.nvmlSystemGetDriverVersion())
    if from_nvml:
        return from_nvml.decode() if isinstance(from_nvml, bytes) else str(from_nvml)
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def _runtime() -> Any:
    from .cuda import runtime

    return runtime


def _checked_runtime(index: int) -> Any:
    missing = missing_device()
    if missing is not None:
        raise missing
    runtime = _runtime()
    count = runtime.getDeviceCount()
    if not 0 <= index < count:
        raise InvalidInput(f"CUDA device {index} does not exist. Devices: 0 to {count - 1}")
    return runtime


def _why_no_device(runtime: Any, error: Exception) -> str:
    driver = runtime.driverGetVersion()
    if driver == 0:
        return "No CUDA device can be used: no NVIDIA driver is installed"
    if "InsufficientDriver" in str(error):
        return (
            f"No CUDA device can be used: the NVIDIA driver supports CUDA {_version(driver)}, and the CuPy installed "
            f"needs CUDA {_version(runtime.runtimeGetVersion())}. Update the driver, or use flashtune[cuda12]"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible[:80]!r})"
    return f"No CUDA device can be used: {error}{setting}"


def _version(number: int) -> str:
    """CUDA counts 13000 for 13.0 and 12080 for 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _normalised(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    for maker in ("nvidia-", "geforce-", "tesla-"):
        words = words.removeprefix(maker)
    return words or "unnamed"


def _memory_gb(memory_bytes: int) -> int:
    """Drivers keep a part, more or less of it by version and settings: rounded up to an even number."""
    return 2 * -(-memory_bytes // 2**31)


def _bandwidth(attributes: DeviceAttributes, row: Gpu | None) -> float:
    if attributes.memory_clock_khz and attributes.memory_bus_bits:  # two transfers a clock
        return round(2 * attributes.memory_clock_khz * attributes.memory_bus_bits / 8 / 1e6)
    per_sm = row.bandwidth_gb_s / row.num_sms if row else _typical(attributes, _bandwidth_sm)
    return round(per_sm * attributes.num_sms)


def _tensor_tflops(name: str, attributes: DeviceAttributes, clock_mhz: int) -> float:
    if "GTX" in name:  # Turing without tensor cores
        return 0.0
    limits = CAPABILITIES[nearest_known(attributes.capability)]
    rate = 2 * limits.tensor_fma_sm * attributes.num_sms * clock_mhz / 1e6
    return round(rate / 2 if "GeForce" in name else rate, 1)


def _clock(gpu: Gpu) -> float:
    return gpu.clock_mhz


def _bandwidth_sm(gpu: Gpu) -> float:
    return gpu.bandwidth_gb_s / gpu.num_sms


def _typical(attributes: DeviceAttributes, figure: Callable[[Gpu], float]) -> float:
    """The median of ``figure`` over the table's cards of the newest capability that is not newer, else the oldest."""
    from .table import GPUS

    present = {gpu.capability for gpu in GPUS.values()}
    nearest = max((each for each in present if each <= attributes.capability), default=min(present))
    return statistics.median(figure(gpu) for gpu in GPUS.values() if gpu.capability == nearest)


def _driver_uuid(index: int) -> bytes:
    """The 16 bytes from the driver itself: CuPy's copy of them ends at the first zero byte. Empty if not known."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        get_uuid = cuda.cuDeviceGetUuid_v2
    except (OSError, AttributeError):
        return b""
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index) or get_uuid(ctypes.byref(raw), device)
    return b"" if failed else bytes(raw)


def _power_limit(unit: str) -> float:
    def ask(nvml: Any) -> float:
        handle = nvml.nvmlDeviceGetHandleByUUID(unit)
        milliwatts: float = nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        return milliwatts / 1000

    return _ask_nvml(ask) or 0.0


def _ask_nvml(question: Callable[[Any], Any]) -> Any:
    """The answer of nvidia-ml-py, or None where it is not installed or may not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
