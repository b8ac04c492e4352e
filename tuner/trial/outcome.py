"""What came of trying one config: `Outcome`. Failures are data here; nothing in this file needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flashtune.codegen.families.registry import family
from flashtune.codegen.families.resources import Resources, blocks_per_sm
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import FlashtuneError
from flashtune.tuner.processes.compile_pool import Built

from .intervals import PairedRatio
from .sensors import Readings
from .timing import Timing

SPILL_LIMIT = 256
"""Bytes of spills per thread (stores and loads) beyond which a config is not timed, where its family does not promise
that there are none. A few outside the loop are harmless, and timing judges them; this many are never the best."""


NO_READINGS = Readings()


class DeviceLostError(FlashtuneError):
    """The CUDA context has become unusable; nothing more can be measured in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One config, tried once. ``status`` and ``stage`` are words of `tuned_db.records.measurement`."""

    status: str
    stage: str = "screen"
    timing: Timing | None = None
    baseline: float | None = None
    """Median of the default config, which was timed in turns with this one, in seconds; None where it was not."""
    ratio: PairedRatio | None = None
    """Time relative to that of the default, round by round."""
    max_error: float | None = None
    rms_error: float | None = None
    readings: Readings = NO_READINGS
    message: str = ""

    @property
    def seconds(self) -> float | None:
        """Median of a correct config."""
        return self.timing.median if self.timing and self.status == "ok" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is recorded with each measurement besides the config. Empty text where unknown."""

    unit: str = ""
    driver: str = ""
    cupy: str = ""
    note: str = ""
    """What can't be recorded on this device, and why; for the report, not stored."""


class Bench(Protocol):
    """A device that tries configs. Replaced by a fake in tests that need no GPU.

    :class:`DeviceLostError` of any method means that the process must be replaced.
    """

    evidence: Evidence

    def prepare(self, problem: Problem) -> str | None:
        """Makes inputs and reference of ``problem``, once. Returns why it can't be measured here, or None."""

    def attempt(
        self, problem: Problem, config: Config, built: Built, best: float | None, default: Config | None = None
    ) -> Outcome:
        """Checks and times ``config``, which compiled. ``best`` is the best median so far in seconds; ``default`` was
        correct before and is timed in turns with it."""

    def finals(
        self, problem: Problem, configs: Sequence[Config], seconds: float, margin: float | None = None
    ) -> dict[Config, list[float]]:
        """Seconds by round of each config, interleaved, for about ``seconds``. All have been correct before."""

    def alike(self, problem: Problem, config: Config, copies: int, seconds: float) -> list[list[float]]:
        """The same of ``copies`` of one config that has been correct, as if they were different."""

    def readings(self) -> Readings:
        """Of the card, around the last thing that was timed."""


def judge_resources(problem: Problem, config: Config, gpu: Gpu, built: Built) -> Outcome | None:
    """The outcome of a config that the compiler's facts rule out, or None if it may run."""
    if built.error:
        return Outcome(status="failed" if built.crashed else "compile_error", message=built.error)
    if built.complaint:
        return Outcome(status="compile_error", message=f"slow by the compiler's own word: {built.complaint}")
    needs = family(config.family).resources(config, problem.spec)
    limit = 0 if needs.spill_free else SPILL_LIMIT
    if built.spill_bytes > limit:
        return Outcome(
            status="spills", message=f"spills {built.spill_bytes} bytes per thread, {limit} are taken as harmless"
        )
    shared = needs.shared_memory + built.static_shared_bytes
    if shared > gpu.shared_memory_block:
        return Outcome(
            status="spills", message=f"needs {shared} B of shared memory, {gpu} has {gpu.shared_memory_block} B"
        )
    if blocks_per_sm(Resources(needs.threads, shared, built.registers), gpu) < 1:
        return Outcome(
            status="spills", message=f"{needs.threads} threads with {built.registers} registers do not fit an SM"
        )
    return None
