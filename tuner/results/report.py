"""What a tuning run has to say at its end: plain values; the command line prints them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.trial.failures import CommonFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result for one problem. ``config`` is None where nothing could be tried; ``why`` then says why."""

    problem: Problem
    config: Config | None = None
    seconds: float | None = None
    ratio: float | None = None
    """Time relative to the default config; below 1 is faster."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    """Interval that holds the true ratio with 95 %; None where there is none."""
    tied: int = 1
    """Configs that finals can't tell from each other, this one included."""
    reached: float | None = None
    """Part of what the card's rates allow."""
    limited_by: str = ""
    """Which rate that is: ``tensor rate``, ``float32 rate`` or ``bandwidth``."""
    why: str = ""
    next_best: Config | None = None
    next_ratio: float | None = None
    """Time of the next best relative to the chosen."""
    tried: int = 0
    """Configs tried in this run: measured, or compiled where nothing could be measured."""
    known: int = 0
    """Configs measured in earlier runs and not tried again."""
    failure: CommonFailure | None = None
    """What most of the configs that failed have failed of; None if none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. ``measured`` is False where the GPU was not at hand and times are predictions."""

    gpu: Gpu
    measured: bool
    rows: tuple[Row, ...]
    session: str
    seconds: float
    rejected: Counter[str] = field(default_factory=Counter)
    """Configs of the search spaces that are not legal, by reason. A spec counts once, however many problems have it."""
    failed: Counter[str] = field(default_factory=Counter)
    """Configs that were tried and failed, by status."""
    flagged: Counter[str] = field(default_factory=Counter)
    """Measurements that are worth less than others, by reason."""
    blocklisted: int = 0
    """Configs that are not tried, or not any more, because they have cost two workers."""
    interrupted: bool = False
    stopped: str = ""
    """Why the run ended early, other than by Ctrl-C; empty if it did not."""
    note: str = ""
    """What else is to be said: why nothing was measured, or which devices were given up."""

    distinct_tried: int | None = None
    """Configs tried, each once, where problems share them; None where each problem tries its own."""
    distinct_known: int | None = None
    """The same for those known from earlier runs."""

    @property
    def tried(self) -> int:
        """Configs tried in this run."""
        return sum(row.tried for row in self.rows) if self.distinct_tried is None else self.distinct_tried

    @property
    def known(self) -> int:
        """Configs known from earlier runs and not tried again."""
        return sum(row.known for row in self.rows) if self.distinct_known is None else self.distinct_known


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: part of the budget used, from 0 to 1, and a line about the last thing done."""

    done: float
    text: str
    gpu: str = ""
    problems: int = 0
    problems_done: int = 0
    problem: Problem | None = None
    """What ``text`` is about, if it is about one."""
    ratio: float | None = None
    """The best time so far of ``problem`` relative to the default config, by single measurements."""
    clock_mhz: float | None = None
