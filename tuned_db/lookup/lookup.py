"""Which config to run for a problem on a GPU, and why: :func:`find`.

Levels, best first; at each level the user's own rows win over those that ship:

1. ``exact``: measured for this problem on this device model, with the source that is rendered today.
2. ``older_source``: the same, but the kernel's source has changed since.
3. ``neighbour``: of the winners of near problems on this device model the one that is expected to gain most over the
   default. Near ones have the same `Spec`, but for float16 and bfloat16, which take as long. What is expected is what
   it gained there, times what the model says of the difference, and less the farther off it is; it must be worth it,
   and unless that problem is very near the model alone must predict no loss.
4. ``borrowed``: the winner of this problem, else (with the same guards) of a near one, on another chip of the same
   compute capability, nearest chip first.
5. ``predicted``: ranked by model and compiler, not timed.
6. ``default``: of the families' own defaults, the one that is predicted to be fastest.

Each config is checked again for this problem and GPU; a row that no longer fits is passed over, and so is one whose
config, as it is rendered today, is barred for the spec, on this device model or the one that lends it (`blocklist.py`).
Rows that can't be used never make a look-up fail.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flashtune.codegen.families.registry import default_config, family, predict, supporting, unusable
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import FlashtuneError
from flashtune.settings import database_path
from flashtune.tuned_db.policy.distance import chip_distance
from flashtune.tuned_db.policy.plausible import plausible
from flashtune.tuned_db.policy.ranked import Ranked
from flashtune.tuned_db.policy.winners import best_first, with_source
from flashtune.tuned_db.records.measurement import Choice, Level, Measurement, Prediction, Trust, Variant, capability
from flashtune.values import printable

from .neighbours import near_problems
from .sources import RowSource, bundled

__all__ = ["Choice", "find", "find_in", "source_digest"]

DOUBT = 0.02
"""Of the default's time for each octave: what a winner gained elsewhere it gains less surely here."""
WORTH = 0.99
"""Most of the default's time that a neighbour's winner may be expected to take, doubt included."""
CLOSE = 0.5
"""Octaves within which a measured gain counts though the model predicts a loss: its predictions of good configs differ
by less than it errs."""
# With these and the limits of `neighbours.py` each of 112 problems tuned on an H200 was served by the others. The 105
# whose time is known there reach 0.979 of their own best, and one loses to the default, by 3 %. The default alone has
# 0.952, of all 112 (benchmarks/neighbours.py).
LOCK_TIMEOUT = 2.0
"""Seconds that a call of ``attention()`` may wait for the user's database; without it the rest still answers."""

_log = logging.getLogger("flashtune")


def find(problem: Problem, gpu: Gpu, *, store_path: str | Path | None = None) -> Choice:
    """The config for ``problem`` on ``gpu`` from the best level that has one; see above.

    ``store_path`` is the user's database, else the one of the settings; it is read only where it exists. One that
    can't be used is passed over with one warning per process, whatever the reason is, and so is what ships: a call
    never fails for want of tuning data. Raises `UnsupportedProblem` where no family serves the problem.
    """
    supporting(problem.spec, gpu)
    shipped = _shipped(gpu)
    try:
        path = database_path() if store_path is None else Path(store_path)
        if os.path.exists(path):
            from .kept_connection import look_up

            return look_up(path, LOCK_TIMEOUT, lambda own: _Search(problem, gpu, [own, *shipped]).choice())
    except Exception as error:
        _warn_once("tuned configs of your own", error)
    try:
        return _Search(problem, gpu, shipped).choice()
    except Exception as error:
        _warn_once("configs that ship with flashtune", error)
    return _Search(problem, gpu, []).choice()


def find_in(problem: Problem, gpu: Gpu, sources: Sequence[RowSource]) -> Choice:
    """:func:`find` in sources that are open, the preferred first. A database among them that fails is not passed over:
    raises `StoreError`."""
    supporting(problem.spec, gpu)
    return _Search(problem, gpu, list(sources)).choice()


@functools.lru_cache(maxsize=8192)
def source_digest(spec: Spec, config: Config) -> str:
    """Digest of the source that ``config`` renders to today."""
    return family(config.family).source(config, spec).digest


class _Barred(NamedTuple):
    variants: frozenset[Variant]
    names: frozenset[tuple[str, str]]
    """Families and configs, by which it is seen whether one has to be rendered."""


class _Search:
    """One look-up: what is asked, by whom it is supported, and where to look, preferred source first."""

    def __init__(self, problem: Problem, gpu: Gpu, sources: list[RowSource]) -> None:
        self.problem = problem
        self.gpu = gpu
        self.sources = sources
        self._out: dict[tuple[Spec, str], _Barred] = {}
        self._has_near = False
        """Whether there are near problems."""

    def choice(self) -> Choice:
        return (
            self.here() or self.near("neighbour", self.gpu.key) or self.borrowed() or self.predicted() or self.default()
        )

    def here(self) -> Choice | None:
        """Levels 1 and 2. What won a final comes first: a run that ended before its own must not hide another's."""
        exact: list[tuple[RowSource, Ranked]] = []
        fallen_back: Choice | None = None
        for source in self.sources:
            current, older = self._best(source, self.problem, self.gpu.key)
            if current and current.measurement.stage == "final":
                return self._choice("exact", source, current)
            if current:
                exact.append((source, current))
            if older and not fallen_back:
                fallen_back = self._choice("older_source", source, older)
        return self._choice("exact", *exact[0]) if exact else fallen_back

    def near(self, level: Level, gpu_key: str) -> Choice | None:
        """The best winner of a near problem on a device model, as ``level`` (3, or 4 for another chip); None where none
        is worth it."""
        found: list[tuple[float, float, int, RowSource, Ranked, str, Config]] = []
        for distance, neighbour in near_problems(self.problem, gpu_key, self.sources):
            self._has_near = True
            best_of = ((source, self._lent(source, neighbour, gpu_key)) for source in self.sources)
            source, best = next(((source, best) for source, best in best_of if best), (None, None))
            if source is None or best is None:
                continue
            config = self._fitted(best.config)
            if not self._usable(config, gpu_key):
                continue
            expected = self._expected(neighbour, best, config, distance)
            doubted = expected + DOUBT * distance
            if doubted <= WORTH:
                gain = f"{expected:.3f} of the default's time is expected here"
                note = f"tuned for {neighbour}, {distance:.2g} octaves away; {gain}"
                found.append((doubted, distance, len(found), source, best, note, config))
        if not found:
            return None
        *_, source, best, note, config = min(found)
        return self._choice(level, source, best, note, config)

    def borrowed(self) -> Choice | None:
        """Level 4."""
        chips = self._chips()
        for key in chips:
            for source in self.sources:
                if best := self._lent(source, self.problem, key):
                    return self._choice("borrowed", source, best)
        return next(filter(None, (self.near("borrowed", key) for key in chips)), None)

    def predicted(self) -> Choice | None:
        """Level 5."""
        for source in self.sources:
            for each in source.predictions(problem=self.problem, gpu_key=self.gpu.key):
                if self._usable(each.config, self.gpu.key):
                    return Choice(
                        config=each.config,
                        level="predicted",
                        evidence=_describe_prediction(each),
                        origin=source.label,
                        prediction=each,
                    )
        return None

    def default(self) -> Choice:
        """Level 6."""
        evidence = (
            "no winner of a near problem can be used and is expected to be faster"
            if self._has_near
            else f"nothing is measured or predicted for it on {self.gpu.name} or a chip of the same capability"
        )
        return Choice(config=self.fallback, level="default", evidence=evidence)

    def _best(self, source: RowSource, problem: Problem, gpu_key: str) -> tuple[Ranked | None, Ranked | None]:
        """Of ``source``, the best usable variant with today's source, and the best with an older one."""

        def rows(stage: str) -> list[Measurement]:
            return source.measurements(problem=problem, gpu_key=gpu_key, status="ok", stage=stage)

        barred = self._barred(problem.spec, gpu_key).variants
        ranked = (each for each in best_first(rows, barred) if self._usable(each.config, gpu_key))
        return with_source(ranked, lambda config: source_digest(problem.spec, config))

    def _barred(self, spec: Spec, gpu_key: str) -> _Barred:
        """What is barred for ``spec`` here, or on the device model that lends its winners."""
        if (spec, gpu_key) not in self._out:
            places = {gpu_key, self.gpu.key}
            out = frozenset().union(*(each.rejected(spec, place) for each in self.sources for place in places))
            self._out[spec, gpu_key] = _Barred(out, frozenset(each[:2] for each in out))
        return self._out[spec, gpu_key]

    def _lent(self, source: RowSource, problem: Problem, gpu_key: str) -> Ranked | None:
        """What another problem or chip lends. Where it had a final that alone says what won: the times by which its
        finalists were found are no winners, though they may be all that is usable here."""
        current, older = self._best(source, problem, gpu_key)
        best = current or older
        if best is None or best.measurement.stage == "final":
            return best
        finals = source.measurements(problem=problem, gpu_key=gpu_key, status="ok", stage="final")
        return None if plausible(finals) else best

    def _fitted(self, config: Config) -> Config:
        """The winner of another problem, changed where the family knows that it must be."""
        return family(config.family).fitted(config, self.problem, self.gpu)

    def _expected(self, neighbour: Problem, best: Ranked, config: Config, distance: float) -> float:
        """Time of ``config`` relative to the default here, by what ``best`` is for ``neighbour`` so many octaves away;
        infinite where the model predicts a loss that no measurement near enough contradicts."""
        here = self._predicted_ratio(self.problem, config, self.fallback)
        if here > 1 and (best.ratio is None or distance > CLOSE):
            return math.inf
        if best.ratio is None:
            return here
        there = self._predicted_ratio(neighbour, best.config, default_config(neighbour, self.gpu))
        return here * best.ratio / there

    def _predicted_ratio(self, problem: Problem, config: Config, default: Config) -> float:
        return predict(problem, config, self.gpu).seconds / predict(problem, default, self.gpu).seconds

    def _chips(self) -> list[str]:
        """Other device models of the same capability, nearest first."""
        wanted = capability(self.gpu.key)
        keys = {key for source in self.sources for key in source.gpu_keys(capability=wanted)} - {self.gpu.key}
        return sorted(keys, key=lambda key: (chip_distance(self.gpu.key, key), key))

    def _usable(self, config: Config, gpu_key: str) -> bool:
        """Whether ``config``, of rows of a device model, can serve here."""
        return unusable(config, self.problem, self.gpu) is None and not self._is_barred(config, gpu_key)

    def _is_barred(self, config: Config, gpu_key: str) -> bool:
        """Whether ``config`` is barred as it is rendered today, whatever the source of the row that names it."""
        name, out = (config.family, config.key), self._barred(self.problem.spec, gpu_key)
        return name in out.names and (*name, source_digest(self.problem.spec, config)) in out.variants

    @functools.cached_property
    def fallback(self) -> Config:
        """The default to beat, of those that are not barred; where all are, the best, since something has to be given.

        A millisecond, and most look-ups end before they need it.
        """
        fallback = default_config(self.problem, self.gpu)
        if not self._is_barred(fallback, self.gpu.key):
            return fallback
        kinds = supporting(self.problem.spec, self.gpu)
        sound = [
            each for each in kinds if not self._is_barred(default_config(self.problem, self.gpu, [each]), self.gpu.key)
        ]
        return default_config(self.problem, self.gpu, sound) if sound else fallback

    def _choice(
        self, level: Level, source: RowSource, best: Ranked, note: str = "", config: Config | None = None
    ) -> Choice:
        row = best.measurement
        trust = best.trust
        notes = [_describe(best, trust)]
        if level == "borrowed":
            notes.insert(0, f"borrowed from {row.gpu_name}")
        if row.source_digest != source_digest(row.problem.spec, row.config):
            notes.append("the kernel's source has changed since")
        notes += filter(None, [note])
        chosen = config or row.config
        return Choice(
            config=chosen,
            level=level,
            evidence="; ".join(notes),
            origin=source.label,
            measurement=row,
            ratio=best.ratio,
            ratio_low=best.low,
            ratio_high=best.high,
            trust=trust,
        )


def _describe(best: Ranked, trust: Trust | None) -> str:
    row = best.measurement
    spread = f" (q20 {row.q20_us:.4g}, q80 {row.q80_us:.4g})" if row.q20_us and row.q80_us else ""
    text = f"{row.stage} on {row.gpu_name}, {row.created[:10]}: {best.median_us:.4g} us{spread}, {row.samples} samples"
    if best.ratio is not None:
        interval = "" if best.low is None or best.high is None else f" [{best.low:.3f}, {best.high:.3f}]"
        text += f", {best.ratio:.3f}{interval} of the default's time"
    if best.tied > 1:
        text += f", one of {best.tied} that are equally fast"
    if trust is not None:
        return f"{text}; {trust}"
    sessions = len({each.session for each in best.rows})
    return text + (f", {sessions} sessions" if sessions > 1 else "")


def _describe_prediction(each: Prediction) -> str:
    when = f"predicted for {each.gpu_name}, {each.created[:10]}"
    return f"{when}: {each.predicted_us:.4g} us, rank {each.rank}; not measured"


def _shipped(gpu: Gpu) -> list[RowSource]:
    try:
        return [bundled(capability(gpu.key))]
    except Exception as error:
        _warn_once("configs that ship with flashtune", error)
        return []


_warned = threading.Lock()
"""Taken by the one warning of this process."""


def _warn_once(what: str, error: Exception) -> None:
    if not _warned.acquire(blocking=False):
        return
    ours = isinstance(error, FlashtuneError)
    why = str(error) if ours else f"{type(error).__name__}: {error}"
    _log.warning("%s are not used: %s", what, printable(why, 1000))
    if not ours:
        _log.debug("that was not to be expected", exc_info=error)
