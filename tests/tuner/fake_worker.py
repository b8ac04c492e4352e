"""A device that is none, for worker processes: it logs what it is asked, takes its time, and dies where it is told to.

Worker processes import this file, so it needs neither CuPy nor Optuna.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.trial.outcome import DeviceLostError, Evidence, Outcome
from flashtune.tuner.trial.sensors import Readings
from flashtune.tuner.trial.timing import Timing

_prepared: set[tuple[str, Problem]] = set()
"""Units and problems, of this process."""


def seconds_of(config: Config) -> float:
    return 1e-3 * (1 + zlib.crc32(config.key.encode()) % 1000 / 1000)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the log: when which process did what on which unit."""

    time: float
    pid: int
    unit: str
    what: str
    problem: str = ""
    config: str = ""


@dataclass(frozen=True)
class FakeUnit:
    """``deeds`` are done instead of an answer: by config key, or under "open", "prepare" and "final".

    A deed that begins with "once " is done by the first worker that comes to it, and not again; "wait" lasts until
    :attr:`may_go` is there.
    """

    name: str
    log: Path
    deeds: dict[str, str] = field(default_factory=dict)
    attempt_seconds: float = 0.0
    beside: str = field(default="", kw_only=True)
    """Name of another unit with this log: an attempt here ends when as many have begun there."""

    @property
    def uuid(self) -> str:
        return f"GPU-{self.name}"

    @property
    def may_go(self) -> Path:
        return self.log.with_name("may_go")

    def open(self) -> FakeUnit:
        self.write("start")
        self.do("open")
        self.write("open")
        return self

    def sources(self, problem: Problem) -> list[Source]:
        return []

    @property
    def evidence(self) -> Evidence:
        return Evidence(unit=self.uuid)

    def prepare(self, problem: Problem) -> str | None:
        self.do("prepare")
        _prepared.add((self.name, problem))
        return None

    def attempt(
        self, problem: Problem, config: Config, built: Built, best: float | None, default: Config | None = None
    ) -> Outcome:
        assert (self.name, problem) in _prepared, "attempted before it was prepared"
        self.write("attempt", problem, config)
        while self.beside and self.begun(self.beside) < self.begun(self.name):
            time.sleep(0.01)
        time.sleep(self.attempt_seconds)
        self.do(config.key)
        seconds = seconds_of(config)
        self.write("done", problem, config)
        return Outcome(status="ok", stage="measure", timing=Timing(seconds, seconds, seconds, 20))

    def finals(
        self, problem: Problem, configs: Sequence[Config], seconds: float, margin: float | None = None
    ) -> dict[Config, list[float]]:
        assert (self.name, problem) in _prepared, "a final before it was prepared"
        self.write("final", problem)
        self.do("final")
        return {config: [seconds_of(config)] * 9 for config in configs}

    def alike(self, problem: Problem, config: Config, copies: int, seconds: float) -> list[list[float]]:
        return [[seconds_of(config)] * 9] * copies

    def readings(self) -> Readings:
        return Readings()

    def write(self, what: str, problem: Problem | None = None, config: Config | None = None) -> None:
        fields = [time.monotonic(), os.getpid(), self.name, what, problem.key if problem else "", config or ""]
        with self.log.open("a", encoding="utf-8") as file:
            file.write("\t".join(str(each) for each in fields) + "\n")

    def lines(self, *wanted: str) -> list[Line]:
        """What all units with this log did, of the kinds ``wanted``."""
        if not self.log.exists():
            return []
        whole = self.log.read_text(encoding="utf-8").rpartition("\n")[0]  # somebody may be writing the last line
        fields = [line.split("\t") for line in whole.splitlines()]
        lines = [Line(float(each[0]), int(each[1]), *each[2:]) for each in fields]
        return [each for each in lines if each.what in wanted or not wanted]

    def begun(self, name: str) -> int:
        """How many attempts the unit of that name has begun."""
        return sum(each.unit == name for each in self.lines("attempt"))

    def do(self, where: str) -> None:
        deed = self.deeds.get(where, "")
        if deed.startswith("once "):
            mark = self.log.with_name(f"{zlib.crc32(where.encode())}.done")
            if mark.exists():
                return
            mark.touch()
            deed = deed.removeprefix("once ")
        if deed == "exit":
            os._exit(7)
        elif deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif deed == "hang":
            time.sleep(600)
        elif deed == "wait":
            while not self.may_go.exists():
                time.sleep(0.02)
        elif deed == "lose":
            raise DeviceLostError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        elif deed == "raise":
            raise ZeroDivisionError("as the test wants it")
        elif deed:
            raise AssertionError(deed)


@dataclass(frozen=True)
class LaunchingUnit(FakeUnit):
    """Looks for the cubin of each candidate, as a device does that is to launch it."""

    arch: str = "sm_90a"

    def attempt(
        self, problem: Problem, config: Config, built: Built, best: float | None, default: Config | None = None
    ) -> Outcome:
        from flashtune.codegen.compiler.kernel_cache import compiled
        from flashtune.codegen.families.registry import source_for

        found = compiled(source_for(problem, config), self.arch)
        self.write("cubin", problem, config)
        assert (found.nvrtc, found.registers) == (built.nvrtc, built.registers)
        return super().attempt(problem, config, built, best, default)
