"""A/A test of a machine: one config takes part in many finals as two candidates; what tells them apart is wrong.

It says how far winners can be trusted here: how often a final calls a difference where there is none, and how large a
difference has to be for finals to see it. Nothing is stored.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from flashtune.codegen.families.registry import source_for
from flashtune.codegen.gpu.devices import require_device, unit_uuid, visible_gpus
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import FlashtuneError, InvalidInput
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import SLOWDOWNS
from flashtune.tuner.processes.compile_pool import Builder, ProcessBuilder
from flashtune.tuner.results.report import Progress
from flashtune.tuner.trial.intervals import CONFIDENCE, PairedRatio, paired
from flashtune.tuner.trial.outcome import Bench
from flashtune.tuner.trial.timing import summarise
from flashtune.tuner.workers.cuda_device import CudaUnit

FINALS = 40
NOISE_SECONDS = 1.0
"""For two candidates. In a final of tuning, which takes longer, those that stay to its end get about as many rounds."""
ERROR = 1 - CONFIDENCE
TOLD = 0.95
"""Part of the finals in which a difference must be seen to count as one that can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What came of the finals of one config against itself."""

    problem: Problem
    config: Config
    ratios: tuple[PairedRatio, ...]
    """Of the second candidate to the first, one for each final."""
    seconds: float
    """Median time of a launch."""
    flagged: Counter[str] = field(default_factory=Counter)
    """Finals in which the card was slowed down or shared, by reason."""
    note: str = ""

    @property
    def false_wins(self) -> int:
        """Finals that called one of the two faster."""
        return sum(each.told_apart for each in self.ratios)

    @property
    def false_win_rate(self) -> float:
        """Part of the finals; an interval of 95 % allows 0.05."""
        return self.false_wins / len(self.ratios)

    @property
    def expected_most(self) -> int:
        """False wins that a sound machine exceeds with a probability below 1 %, given the 5 % of each final."""
        count, wins = len(self.ratios), 0
        below = (1 - ERROR) ** count
        while below < 0.99:
            wins += 1
            below += math.comb(count, wins) * ERROR**wins * (1 - ERROR) ** (count - wins)
        return wins

    @property
    def half_width(self) -> float:
        """Median over finals of half the interval, relative to the time."""
        return statistics.median((high - low) / 2 for low, high in self._intervals())

    @property
    def smallest_difference(self) -> float:
        """Relative difference in time that at least `TOLD` of these finals would have seen.

        A candidate that is faster by the part d has all its ratios times 1 - d: a final sees that if the upper end of
        its interval falls below 1. Each final counts twice, since either candidate may be the faster one.
        """
        needed = sorted(
            max(0.0, difference) for low, high in self._intervals() for difference in (1 - 1 / high, 1 - low)
        )
        return needed[math.ceil(TOLD * len(needed)) - 1]

    def _intervals(self) -> list[tuple[float, float]]:
        return [(each.low, each.high) for each in self.ratios if each.low is not None and each.high is not None]


def against_itself(
    bench: Bench,
    problem: Problem,
    config: Config,
    builder: Builder,
    finals: int = FINALS,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Noise:
    """Runs ``finals`` finals of ``config`` against itself. :class:`FlashtuneError` where it can't be measured."""
    progress(Progress(0.0, f"{problem}: compiling"))
    built = builder.submit(source_for(problem, config)).result()
    missing = bench.prepare(problem)
    if missing:
        raise FlashtuneError(f"{problem} can't be measured here: {missing}")
    outcome = bench.attempt(
        problem, config, built, None
    )  # a wrong kernel's times say nothing; and it warms the card up
    if outcome.status != "ok":
        raise FlashtuneError(f"{config} can't be measured on {problem}: {outcome.status}: {outcome.message}")
    ratios = []
    medians: list[float] = []
    flagged: Counter[str] = Counter()
    for number in range(finals):
        progress(Progress(number / finals, f"final {number + 1} of {finals}"))
        first, second = bench.alike(problem, config, 2, NOISE_SECONDS)
        ratios.append(paired(second, first))
        medians += [summarise(first).median, summarise(second).median]
        readings = bench.readings()
        flagged.update(each for each in readings.reasons if each in SLOWDOWNS)
        flagged["contended"] += bool(readings.contended)
    return Noise(
        problem=problem,
        config=config,
        ratios=tuple(ratios),
        seconds=summarise(medians).median,
        flagged=+flagged,
        note=bench.evidence.note,
    )


def noise(
    problem: Problem,
    device: int = 0,
    *,
    finals: int = FINALS,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Noise, Gpu]:
    """The test on CUDA device ``device``, with the config that attention() would use. `NoGpu` where there is none."""
    require_device()
    found = visible_gpus()
    if not 0 <= device < len(found):
        raise InvalidInput(f"device {device} does not exist. Devices here: 0 to {len(found) - 1}")
    gpu = found[device]
    config = find(problem, gpu).config
    builder = ProcessBuilder(gpu.arch, 1)
    try:
        unit = CudaUnit(device, gpu, unit_uuid(device))
        for source in unit.sources(problem):
            builder.submit(source)
        return against_itself(unit.open(), problem, config, builder, finals, progress), gpu
    finally:
        builder.close()
