"""The policy by which winners are derived from measurements. Pure functions over records.

Winners are not stored, so databases merge without conflicts and a better policy needs no migration. The policy:

1. Only ``ok`` rows count, of times that there can be (`plausible.py`). A variant (family, config, source) that was
   ``wrong``, made an ``illegal_access`` or cost two workers for the spec is out, as far as that counts on this device
   model (`blocklist.py`).
2. A variant counts at its best stage only: finals, where candidates and default ran interleaved, before ``measure``
   before ``screen``. Variants with finals come before those without. Rows that were made while the card was slowed
   down or shared (`Measurement.flagged`) count only where a variant has no other at that stage. Of several compilers
   the nearest to ours counts (`toolchain.py`): what was faster with one may be slower with the next.
3. Within a stage, variants with a ratio to the default config of the same session come before those without: ratios
   compare across sessions, units and days, microseconds don't, not even by way of the clock, which memory does not
   follow. So those without are ordered by time within a session. The session that has most of them comes first, of
   equals the first by its id; then what others have besides. The ratio is the median over paired rounds; rows of the
   first schema have that of medians. Several rows of one variant count by their median, and so do the ends of their
   intervals: one lucky run wins nothing.
4. A winner is never slower than the default: its interval must not reach above 1, where there is none its ratio.
   The default's own is 1 without an interval around it, so it wins where nothing is clearly faster.
5. What can't be told apart is a tie set: all whose interval overlaps that of the fastest. Two 95 % intervals come apart
   by chance less often than a test at 95 % errs (Schenker and Gentleman, The American Statistician 55, 2001), which is
   wanted: another tuning is to agree. An interval that is wider than the fastest's counts as no wider: to be measured
   badly must not help. Rows without an interval are as narrow as their ratio. Those within `ALIKE` of the fastest are
   tied with it too: they may be told apart one day and change places the next. Who left a final early, with fewer
   rounds than the default, was slower than the fastest there by more than that, round by round: it is not tied with
   those who stayed, unless in as many finals it did so too, and its ratio counts as no less than that of the fastest of
   them and `ALIKE`, whatever its few rounds say.
6. In a tie set the one wins that needs least: spilled bytes, then registers, then shared memory, each the least that
   was recorded; then family, config key and source digest, which are the same everywhere and always. What is left is
   ordered likewise, set by set.
7. What is disputed (`trust.py`: its sessions don't say the same) comes behind all else that is faster
   than the default. Where there is nothing else, it wins only if rule 4 holds for each of its witnesses: a median of
   sessions that differ says little. Ratios decide this too, so that sessions of other cards count.

The same rows in any order give the same winner, on every machine with the same compiler.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.records.measurement import Measurement, Variant

from . import blocklist
from .blocklist import Failure
from .plausible import plausible
from .ranked import BEST_FIRST, Ranked, races_of, ranked
from .trust import defaults, judged

RENDERED = 64
"""Configs that are rendered to find one whose source is as stored: two finals of an older source, and more."""
MOST_TIED = 32
"""Variants in a tie set: more than a final has. Where the set ends among equals, noise would say who is in it."""


def rank(
    measurements: Iterable[Measurement], barred: Collection[Variant] = (), *, toolchain: str | None = None
) -> list[Ranked]:
    """Variants of one problem and one GPU, best first; see the policy above.

    ``barred`` adds to rule 1. ``toolchain`` is the NVRTC version of rule 2, None for the one here.
    """
    return list(_ranking(measurements, barred, toolchain))


def _ranking(
    measurements: Iterable[Measurement], barred: Collection[Variant], toolchain: str | None = None
) -> Iterator[Ranked]:
    """:func:`rank`, of which a look-up needs only the first."""
    rows = plausible(measurements)
    stages: dict[str, list[Ranked]] = {stage: [] for stage in BEST_FIRST}
    for each in _trusted(_variants(rows, barred, toolchain), rows):
        stages[each.rows[0].stage].append(each)
    for stage in stages.values():
        yield from _ordered(stage)


def variants(
    measurements: Iterable[Measurement], barred: Collection[Variant] = (), *, toolchain: str | None = None
) -> list[Ranked]:
    """Rules 1 and 2 alone: what may be used, in no order, those slower than the default included."""
    return _variants(plausible(measurements), barred, toolchain)


def _variants(measurements: Iterable[Measurement], barred: Collection[Variant], toolchain: str | None) -> list[Ranked]:
    rows: dict[Variant, list[Measurement]] = defaultdict(list)
    failed = []
    for each in measurements:
        if each.status == "ok":
            rows[each.variant].append(each)
        else:
            failed.append(Failure.of(each))
    out = blocklist.barred(failed, failed[0].gpu_key).union(barred) if failed else barred
    races = races_of(each for found in rows.values() for each in found)
    return [ranked(found, races, toolchain) for variant, found in rows.items() if variant not in out]


def fastest(ranked: Sequence[Ranked]) -> Ranked:
    """The one that leads the first tie set of a ranking: with it left out, another might win."""
    first = ranked[0]
    alike = [each for each in ranked if (each.rows[0].stage, each.disputed) == (first.rows[0].stage, first.disputed)]
    return min(alike, key=lambda each: each.speed)


def best_first(by_stage: Callable[[str], Iterable[Measurement]], barred: Collection[Variant] = ()) -> Iterator[Ranked]:
    """:func:`rank` that asks for the rows of one stage at a time, since finals usually decide."""
    out = frozenset(barred)
    for stage in BEST_FIRST:
        rows = plausible(by_stage(stage))
        yield from _ranking(rows, out)
        out = out.union(each.variant for each in rows if each.status == "ok")


def with_source(
    ranked: Iterable[Ranked], digest: Callable[[Config], str], most: int = RENDERED
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


def _trusted(found: Iterable[Ranked], rows: Iterable[Measurement]) -> Iterator[Ranked]:
    """``found`` with the trust in what several sessions have measured of all ``rows``."""
    against: dict[str, Variant] | None = None
    for each in found:
        first = each.rows[0]
        alone = len(each.rows) == 1
        if not alone and first.stage == "final" and any(row.session != first.session for row in each.rows):
            against = defaults(rows) if against is None else against
            each = each._replace(judged=judged(each.rows, against))
        yield each


def _ordered(stage: Iterable[Ranked]) -> Iterator[Ranked]:
    """Variants of one stage in the order of rules 3 to 7, without those that may not win: they only count as tied."""
    found = list(stage)
    compared = [each for each in found if each.ratio is not None]
    disputed = [each for each in compared if each.disputed]
    sound: Iterable[Ranked] = _tie_sets([each for each in compared if not each.disputed])
    if disputed:
        sound = list(sound)
        claiming = [number for number, each in enumerate(sound) if each.trust is not None]
        ahead = sound[: claiming[-1] + 1] if claiming else []
        placed = {each.variant for each in ahead}
        sound = [*ahead, *_tie_sets(each for each in compared if each.variant not in placed)]
    yield from sound
    yield from _by_session([each for each in found if each.ratio is None])


def _by_session(found: Sequence[Ranked]) -> list[Ranked]:
    """Rule 3 for variants without a ratio."""
    times: dict[str, dict[Variant, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        for row in each.rows:
            times[row.session][each.variant].append(row.median_us or math.inf)
    sessions = sorted(times, key=lambda session: (-len(times[session]), session))
    ordered: dict[Variant, Ranked] = {}
    named = {each.variant: each for each in found}
    for session in sessions:
        own = {variant: statistics.median(several) for variant, several in times[session].items()}
        ordered |= {
            each: named[each] for each in sorted(own, key=lambda each: (own[each], each)) if each not in ordered
        }
    return list(ordered.values())


def _tie_sets(compared: Iterable[Ranked]) -> Iterator[Ranked]:
    """Rules 4 to 6. Databases of others may have very many variants, so each set looks only at those it can have."""
    waiting = sorted(compared, key=lambda each: each.speed)
    able = {each.variant: each for each in waiting if each.may_win}
    others = {each.variant: each for each in waiting if each.variant not in able}
    while leader := next(iter(able.values()), None):
        tied = _tied(able, leader, MOST_TIED)
        more = _tied(others, leader, MOST_TIED - len(tied))
        count = len(tied) + len(more)
        yield from (each._replace(tied=count) for each in sorted(tied, key=lambda each: (each.needs, each.variant)))
        for each in tied:
            del able[each.variant]
        for each in more:
            del others[each.variant]


def _tied(waiting: Mapping[Variant, Ranked], leader: Ranked, most: int) -> list[Ranked]:
    """The fastest that are tied with ``leader``, of those that wait in the order of their speed."""
    within = itertools.takewhile(lambda each: each.speed[1] <= leader.farthest, waiting.values())
    return list(itertools.islice((each for each in within if each.tied_with(leader)), most))
