"""The policy by which winners are derived from measurements. Pure functions over records.

Winners are not stored, so databases merge without conflicts and a better policy needs no migration. The policy:

1. Only ``ok`` rows count. A variant (family, config, source) that was ever ``wrong`` or made an ``illegal_access`` for
   the spec is out, on every GPU.
2. A variant counts at its best stage only: finals, where candidates and default ran interleaved, before ``measure``
   before ``screen``. Variants with finals come before those without.
3. Within a stage, variants with a baseline are ordered by their time relative to the default config of the same
   session (ratios compare across sessions, units and days; microseconds don't) and come before those without, which
   are ordered by time. Several rows of one variant count by their median, so that one lucky run wins nothing.
4. A variant that is slower than the default in its finals is not a winner.
5. Equal scores are decided by family, config key and source digest: the same rows give the same winner everywhere.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from flashtune.codegen.config import Config

from .records import REJECTING, STAGES, Measurement, Variant

BEST_FIRST = tuple(reversed(STAGES))


@dataclass(frozen=True, slots=True)
class Ranked:
    """One variant of one problem and GPU at its best stage."""

    rows: tuple[Measurement, ...]
    """Its rows at that stage, oldest first."""
    ratio: float | None
    """Median time relative to the default config, or None where no final had one."""
    median_us: float

    @property
    def measurement(self) -> Measurement:
        """The newest row: what is shown as evidence."""
        return self.rows[-1]

    @property
    def variant(self) -> Variant:
        return self.rows[0].variant

    @property
    def config(self) -> Config:
        return self.rows[0].config

    @property
    def _order(self) -> tuple[int, bool, float, Variant]:
        stage = BEST_FIRST.index(self.rows[0].stage)
        score = self.median_us if self.ratio is None else self.ratio
        return stage, self.ratio is None, score, self.variant


def rank(measurements: Iterable[Measurement], barred: Collection[Variant] = ()) -> list[Ranked]:
    """Variants of one problem and one GPU, best first; see the policy above. ``barred`` adds to rule 1."""
    rows: dict[Variant, list[Measurement]] = defaultdict(list)
    out = set(barred)
    for each in measurements:
        if each.status in REJECTING:
            out.add(each.variant)
        elif each.status == "ok":
            rows[each.variant].append(each)
    ranked = [_ranked(found) for variant, found in rows.items() if variant not in out]
    return sorted((each for each in ranked if each.ratio is None or each.ratio <= 1), key=lambda each: each._order)


def best_first(by_stage: Callable[[str], Iterable[Measurement]], barred: Collection[Variant] = ()) -> Iterator[Ranked]:
    """:func:`rank` that asks for the rows of one stage at a time, since finals usually decide."""
    out = set(barred)
    for stage in BEST_FIRST:
        rows = list(by_stage(stage))
        yield from rank(rows, out)
        out.update(each.variant for each in rows if each.status == "ok")


def with_source(
    ranked: Iterable[Ranked], digest: Callable[[Config], str], most: int = 24
) -> tuple[Ranked | None, Ranked | None]:
    """The best whose source is what ``digest`` renders today, and the best of an older source that precedes it.

    Rendering costs a few milliseconds, so at most ``most`` configs are rendered; others that rank lower count as of an
    older source.
    """
    older: Ranked | None = None
    rendered: dict[Config, str] = {}
    for each in ranked:
        if each.config not in rendered and len(rendered) < most:
            rendered[each.config] = digest(each.config)
        if rendered.get(each.config) == each.variant[2]:
            return each, older
        older = older or each
    return None, older


def _ranked(rows: list[Measurement]) -> Ranked:
    best = min(rows, key=lambda each: BEST_FIRST.index(each.stage)).stage
    kept = sorted((each for each in rows if each.stage == best), key=lambda each: (each.created, each.id))
    ratios = [each.ratio for each in kept if each.ratio is not None]
    times = [each.median_us for each in kept if each.median_us is not None]
    return Ranked(tuple(kept), statistics.median(ratios) if ratios else None, statistics.median(times))
