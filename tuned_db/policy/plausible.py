"""What no GPU can have measured: such rows are passed over by `winners.py` and `trust.py`, and named by `db check`.

Who sends a row fills in its times. Most lies look like any other claim, and only another session tells (`trust.py`).
These don't, and one of them would win against all that was ever measured:

1. A time, of the config or of the default, below `SHARE` of the least that the card's rates allow (`roofline.py`): its
   arithmetic, or the part of its tensors that can't stay in L2 from one launch to the next. Of a card that is not in
   the table what its SMs can do at a clock that none has reached, and of a capability that is not known nothing but the
   time that any kernel takes.
2. A ratio that is not about what the times of the same row come to. The two can differ, as one is a median over rounds,
   but not by a factor of `APART`.
3. An interval of fewer rounds than it takes to have one; one without a width, where the clock could tell two rounds
   apart and it is not the default, whose ratio to itself is 1; and quantiles that are not around their median.

A pure function of a row and of tables, so it comes to the same on every machine with this version.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from flashtune.codegen.gpu.gpu import CAPABILITIES
from flashtune.codegen.gpu.roofline import least_seconds
from flashtune.codegen.gpu.table import GPUS
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.records.measurement import Measurement

from .distance import CHIP

SHARE = 0.5
"""Cards are sold with other clocks than the table has, and a vendor's rate may be below what the chip does. Of 19,000
times on an H200 (benchmarks/results/tune_h200*.jsonl.gz) none is below 1.06 of the limit itself."""
SHORTEST_US = 0.5
"""A kernel that only reads a value and writes it takes longer."""
FASTEST_CLOCK_MHZ = 4000
APART = 2.0
"""The factor was 1.08 at most in those rows."""
FEWEST_ROUNDS = 6
"""Of 5 ratios even the smallest and the largest hold the median with 93.75 % only (`tuner/trial/intervals.py`)."""
TICK_US = 0.032
"""What CUDA events tell apart. Where that is a thousandth of a time, or more, ratios may be equal by chance."""

_KEYS = {gpu.key: gpu for gpu in GPUS.values()}
_CAPABILITIES = {f"{major}.{minor}{each.suffix}": each for (major, minor), each in CAPABILITIES.items()}


def plausible(rows: Iterable[Measurement]) -> list[Measurement]:
    """``rows``, of one problem and device model, without those that can't be."""
    rows = list(rows)
    if not rows:
        return rows
    least = least_us(rows[0].problem, rows[0].gpu_key)
    return [each for each in rows if _impossible(each, least) is None]


def impossible(row: Measurement) -> str | None:
    """Why no card can have measured ``row``, or None. Failures claim no time."""
    return _impossible(row, least_us(row.problem, row.gpu_key))


def _impossible(row: Measurement, least: float) -> str | None:
    time, base, ratio = row.median_us, row.baseline_us, row.paired_ratio
    if row.status != "ok" or time is None:
        return None
    if time < least:
        return f"{time:.3g} us is below what the card can do ({least:.3g} us)"
    if base is not None:
        if base < least:
            return f"the default's {base:.3g} us are below what the card can do ({least:.3g} us)"
        if ratio is not None and not time / APART <= ratio * base <= time * APART:
            return f"the ratio {ratio:.3g} is not that of the times ({time / base:.3g})"
    if row.ratio_low is not None:
        if (row.rounds or 0) < FEWEST_ROUNDS:
            return f"an interval of fewer than {FEWEST_ROUNDS} rounds"
        if row.ratio_low == row.ratio_high != 1 and row.stage == "final" and time > 1000 * TICK_US:
            return "an interval without a width"
    if (row.q20_us is not None and row.q20_us > time) or (row.q80_us is not None and row.q80_us < time):
        return "quantiles that are not around the median"
    return None


@functools.lru_cache(maxsize=4096)
def least_us(problem: Problem, gpu_key: str) -> float:
    """The shortest time that is believed of ``problem`` on a device model."""
    gpu = _KEYS.get(gpu_key)
    seconds = _least_of_unknown(problem, gpu_key) if gpu is None else least_seconds(problem, gpu)
    return max(SHORTEST_US, SHARE * seconds * 1e6)


def _least_of_unknown(problem: Problem, gpu_key: str) -> float:
    capability, _, rest = gpu_key.partition("/")
    known, chip = _CAPABILITIES.get(capability), CHIP.fullmatch(rest)
    if known is None or chip is None:
        return 0.0
    fma = known.fp32_fma_sm if problem.dtype == "float32" else known.tensor_fma_sm
    return problem.flops / (2e6 * fma * max(1, int(chip["sms"])) * FASTEST_CLOCK_MHZ)
