"""Where a kernel runs: a `Gpu` by alias such as ``h100`` with no GPU present, or from a device's attributes."""

from __future__ import annotations

from dataclasses import dataclass

from flashtune.errors import UnknownGpu


@dataclass(frozen=True, slots=True)
class Capability:
    """What a compute capability fixes, from the CUDA C++ programming guide's table of technical specifications."""

    suffix: str
    """Appended to sm_XX: 'a' where the arch-specific instructions are wanted."""
    shared_memory_block: int
    shared_memory_sm: int
    max_threads_sm: int
    max_blocks_sm: int
    tensor_fma_sm: int
    """Dense 16-bit multiply-adds with float32 accumulation per clock and SM; 0 without bf16 tensor cores."""
    fp32_fma_sm: int


# Shared memory per block is the opt-in maximum; per SM it is 1 KiB more (1 KiB per block is reserved).
CAPABILITIES: dict[tuple[int, int], Capability] = {
    (7, 5): Capability("", 65536, 65536, 1024, 16, 512, 64),
    (8, 0): Capability("", 166912, 167936, 2048, 32, 1024, 64),
    (8, 6): Capability("", 101376, 102400, 1536, 16, 512, 128),
    (8, 7): Capability("", 166912, 167936, 1536, 16, 1024, 128),
    (8, 9): Capability("", 101376, 102400, 1536, 24, 512, 128),
    (9, 0): Capability("a", 232448, 233472, 2048, 32, 2048, 128),
    (10, 0): Capability("a", 232448, 233472, 2048, 32, 4096, 128),
    (10, 3): Capability("a", 232448, 233472, 2048, 32, 4096, 128),
    (12, 0): Capability("", 101376, 102400, 1536, 24, 512, 128),
    (12, 1): Capability("", 101376, 102400, 1536, 24, 512, 128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device model. ``key`` identifies it in tuning databases.

    Bandwidth is in GB/s (10^9), clock in MHz (boost), memory in GB as sold. ``tensor_tflops`` is the dense 16-bit rate
    with float32 accumulation at boost clock; 0 where there is no such unit.
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
        return CAPABILITIES.get(self.capability) or CAPABILITIES[_nearest_known(self.capability)]

    @property
    def arch(self) -> str:
        """What NVRTC compiles for, e.g. ``sm_90a``."""
        major, minor = self.capability
        return f"sm_{major}{minor}{self._limits.suffix}"

    @property
    def shared_memory_sm(self) -> int:
        return self.shared_memory_block + 1024 if self.capability != (7, 5) else self.shared_memory_block

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
        parts = [
            f"{major}.{minor}{self._limits.suffix}",
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


def _nearest_known(capability: tuple[int, int]) -> tuple[int, int]:
    """The newest known capability that is not newer, else the oldest."""
    older = [known for known in CAPABILITIES if known <= capability]
    return max(older) if older else min(CAPABILITIES)


def gpu_by_alias(alias: str) -> Gpu:
    """The GPU called ``alias`` (any case; spaces and underscores count as dashes). Unknown names list the known."""
    from .gpu_table import ALIASES, GPUS

    wanted = alias.strip().lower().replace(" ", "-").replace("_", "-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted not in GPUS:
        raise UnknownGpu(f"GPU {alias[:60]!r} is not known. Known: {', '.join(sorted([*GPUS, *ALIASES]))}")
    return GPUS[wanted]
