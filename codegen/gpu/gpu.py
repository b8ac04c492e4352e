"""Where a kernel runs: a `Gpu` by alias such as ``h100`` with no GPU present, or from a device's attributes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """What a compute capability fixes, from the CUDA programming guide: technical specifications, throughput."""

    suffix: str
    """Appended to sm_XX: 'a' where the arch-specific instructions are wanted."""
    shared_memory_block: int
    """Opt-in maximum per block in bytes."""
    shared_memory_reserved: int
    """Bytes that each resident block takes beyond what it asks for."""
    max_threads_sm: int
    max_blocks_sm: int
    tensor_fma_sm: int
    """Dense 16-bit multiply-adds with float32 accumulation per clock and SM; GeForce cards have half of it."""
    fp32_fma_sm: int


CAPABILITIES: dict[tuple[int, int], Capability] = {
    (7, 5): Capability("", 65536, 0, 1024, 16, 512, 64),
    (8, 0): Capability("", 166912, 1024, 2048, 32, 1024, 64),
    (8, 6): Capability("", 101376, 1024, 1536, 16, 512, 128),
    (8, 7): Capability("", 166912, 1024, 1536, 16, 1024, 128),
    (8, 8): Capability("", 101376, 1024, 1536, 16, 512, 128),
    (8, 9): Capability("", 101376, 1024, 1536, 24, 512, 128),
    (9, 0): Capability("a", 232448, 1024, 2048, 32, 2048, 128),
    (10, 0): Capability("a", 232448, 1024, 2048, 32, 4096, 128),
    (10, 3): Capability("a", 232448, 1024, 2048, 32, 4096, 128),
    (11, 0): Capability("a", 232448, 1024, 1536, 24, 4096, 128),
    (12, 0): Capability("", 101376, 1024, 1536, 24, 512, 128),
    (12, 1): Capability("", 101376, 1024, 1536, 24, 512, 128),
}
OLDEST = min(CAPABILITIES)
"""The oldest compute capability that any kernel family serves."""


def nearest_known(capability: tuple[int, int]) -> tuple[int, int]:
    """The newest known capability that is not newer, else the oldest."""
    older = [known for known in CAPABILITIES if known <= capability]
    return max(older) if older else OLDEST


def arch_of(capability: tuple[int, int]) -> str:
    """What NVRTC compiles for, e.g. ``sm_90a``. A capability that is not known gets no suffix."""
    major, minor = capability
    known = CAPABILITIES.get(capability)
    return f"sm_{major}{minor}{known.suffix if known else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device model. ``key`` identifies it in tuning databases.

    ``name`` is normalised, e.g. ``h100-sxm``. Bandwidth is in GB/s (10^9), clock in MHz (maximum boost), memory in GB
    as sold. ``tensor_tflops`` is the dense 16-bit rate with float32 accumulation that the vendor states (some state it
    at a lower clock than the boost clock); 0 where there is no such unit. ``mig`` is the profile of a slice.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory_block: int
    l2_bytes: int
    memory_gb: int
    bandwidth_gb_s: float
    clock_mhz: int
    tensor_tflops: float
    mig: str = ""

    @property
    def _limits(self) -> Capability:
        return CAPABILITIES[nearest_known(self.capability)]

    @property
    def arch(self) -> str:
        """What NVRTC compiles for, e.g. ``sm_90a``."""
        return arch_of(self.capability)

    @property
    def shared_memory_reserved(self) -> int:
        """Bytes of shared memory that each resident block takes beyond what it asks for."""
        return self._limits.shared_memory_reserved

    @property
    def shared_memory_sm(self) -> int:
        """Bytes of shared memory of one SM: one block at its maximum fits, with what is reserved."""
        return self.shared_memory_block + self.shared_memory_reserved

    @property
    def max_threads_sm(self) -> int:
        return self._limits.max_threads_sm

    @property
    def max_blocks_sm(self) -> int:
        return self._limits.max_blocks_sm

    @property
    def fp32_tflops(self) -> float:
        return 2 * self._limits.fp32_fma_sm * self.num_sms * self.clock_mhz / 1e6

    @property
    def key(self) -> str:
        """Device-model key: capability with suffix, model, SMs, shared memory, L2, memory, MIG profile."""
        major, minor = self.capability
        suffix = self.arch.removeprefix(f"sm_{major}{minor}")
        parts = [
            f"{major}.{minor}{suffix}",
            self.name,
            f"{self.num_sms}sm",
            f"smem{self.shared_memory_block}",
            f"l2-{self.l2_bytes}",
            f"{self.memory_gb}gb",
        ]
        if self.mig:
            parts.append(f"mig-{self.mig}")
        return "/".join(parts)

    def __str__(self) -> str:
        return self.name
