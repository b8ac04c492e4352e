"""The attributes that a driver reports of an H200, and a runtime in CuPy's place that reports those of any cards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flashtune.codegen.gpu.devices import DeviceAttributes

H200 = DeviceAttributes(
    name="NVIDIA H200",
    capability=(9, 0),
    num_sms=132,
    shared_memory_block=232448,
    l2_bytes=62914560,
    memory_bytes=150_110_011_392,
    clock_khz=1_980_000,
    memory_clock_khz=3_201_000,
    memory_bus_bits=6144,
)


class FakeCudaError(RuntimeError):
    pass


def fake_runtime(cards: list[DeviceAttributes], *, driver: int = 13000, error: str = "") -> Any:
    """Stands in for ``cupy.cuda.runtime`` with the attributes of ``cards``."""

    def count() -> int:
        if error:
            raise FakeCudaError(error)
        return len(cards)

    def card_of(index: int) -> DeviceAttributes:
        if not 0 <= index < count():
            raise FakeCudaError("cudaErrorInvalidDevice: invalid device ordinal")
        return cards[index]

    def properties(index: int) -> dict[str, object]:
        card = card_of(index)
        major, minor = card.capability
        return {"name": card.name.encode(), "major": major, "minor": minor, "totalGlobalMem": card.memory_bytes}

    def pci_bus(index: int) -> str:
        card_of(index)
        return f"0000:{index:02X}:00.0"

    fields = {
        "MultiProcessorCount": "num_sms",
        "MaxSharedMemoryPerBlockOptin": "shared_memory_block",
        "L2CacheSize": "l2_bytes",
        "ClockRate": "clock_khz",
        "MemoryClockRate": "memory_clock_khz",
        "GlobalMemoryBusWidth": "memory_bus_bits",
    }
    return SimpleNamespace(
        CUDARuntimeError=FakeCudaError,
        getDeviceCount=count,
        getDeviceProperties=properties,
        deviceGetAttribute=lambda field, index: getattr(card_of(index), field),
        deviceGetPCIBusId=pci_bus,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13020,
        **{f"cudaDevAttr{name}": field for name, field in fields.items()},
    )
