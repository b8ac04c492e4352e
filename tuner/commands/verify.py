"""`flashtune db verify`: winners of a database are timed again here; is what they claim reproduced?

A run is a tuning run that searches nothing: of each problem the default and the winner are checked and timed as any
candidate, then they meet in a final. Its rows are ordinary measurements of a new session, by which
`tuned_db.policy.trust` judges the claim from then on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput, UnsupportedProblem
from flashtune.files import shown_path
from flashtune.tuned_db.lookup.lookup import find, source_digest
from flashtune.tuned_db.policy.trust import Claim, claim_of, defaults, trust_of
from flashtune.tuned_db.records.measurement import REJECTING, SLOWDOWNS, THROTTLES, Choice, Measurement, Variant
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.results.report import Progress
from flashtune.tuner.run.run import Means, Ran
from flashtune.tuner.search.problem_search import ProblemSearch

from .again import at_hand, failure_text, try_again

SAMPLE = 20
"""Winners that are timed: about a minute. Where one in eight doesn't hold, a sample of 20 shows it with 93 %."""
POWER = ("hw_slowdown", "power_brake")
"""Reasons by which a card that draws too much halves its clock, for all that meet in a final: their ratio holds."""

Word = Literal["reproduced", "not reproduced", "could not be run"]
WORDS: tuple[Word, ...] = get_args(Word)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWinner:
    """A winner whose claim is to be verified."""

    problem: Problem
    config: Config
    default: Config
    variant: Variant
    claim: Claim
    level: str
    """How far it is trusted before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What came of one claim. ``here`` is None where there was no final to judge by; ``why`` then says why."""

    stored: StoredWinner
    word: Word
    here: Claim | None
    why: str
    level: str
    """How far it is trusted now."""
    seen: tuple[str, ...] = ()
    """What the card said during the final, in words of `tuned_db.records.THROTTLES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """One run. ``session`` is its id in the database."""

    gpu: Gpu
    rows: tuple[Verified, ...]
    session: str
    seconds: float
    interrupted: bool = False
    stopped: str = ""
    """Why it ended early, other than by Ctrl-C; empty if it did not."""
    note: str = ""

    @property
    def seen(self) -> Counter[str]:
        """In how many finals the card said what."""
        return Counter(word for each in self.rows for word in each.seen)

    def count(self, word: Word) -> int:
        return sum(each.word == word for each in self.rows)


def verify(
    gpu: Gpu | str | None = None,
    *,
    sample: int = SAMPLE,
    seed: int = 0,
    problem: Problem | None = None,
    devices: Sequence[int] | None = None,
    database: str | Path | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Verification:
    """Times ``sample`` winners of ``database`` for ``gpu``, drawn by ``seed``, or the one of ``problem``.

    Winners are what attention() would run, if it has today's source, was in a final with today's default, and is
    another config. Raises `NoGpu` where the GPU is not here, and `InvalidInput` or `StoreError` where there is nothing
    to verify; all before anything is changed.
    """
    place = at_hand(gpu, devices, database, sample=sample, seed=seed)
    progress(Progress(0.0, f"choosing winners of {shown_path(place.path)}", gpu=str(place.gpu)))
    stored = winners(place.path, place.gpu, sample, seed, problem)
    with place.means(seed, progress) as means:
        return verify_claims(stored, means)


def winners(path: Path, gpu: Gpu, sample: int, seed: int, problem: Problem | None = None) -> list[StoredWinner]:
    """At most ``sample`` winners for ``gpu`` with a claim that can be verified; `InvalidInput` where there is none."""
    with Store.open(path, create=False, readonly=True) as store:
        problems = store.problems(gpu_key=gpu.key) if problem is None else [problem]
        found: list[StoredWinner] = []
        for each in random.Random(seed).sample(problems, len(problems)):
            stored = None if each.out_dtype else _stored(store, each, gpu)
            if stored is not None:
                found.append(stored)
            if len(found) == sample:
                break
    if not found:
        what = f"for {gpu}" if problem is None else f"for {problem} on {gpu}"
        raise InvalidInput(
            f"there is nothing to verify {what} in {shown_path(path)}: no winner of today's source that was in a "
            f"final with today's default and is another config. flashtune tune --gpu {gpu} makes them"
        )
    return found


def verify_claims(stored: Sequence[StoredWinner], means: Means) -> Verification:
    """Times ``stored`` with ``means``, into its database.

    Ends early, with what is known, on Ctrl-C, or when no device can have a worker any more.
    """
    searches = [
        ProblemSearch(each.problem, [], each.default, {}, [], means.seed, previous=each.config) for each in stored
    ]
    ran = try_again(searches, means)
    rows = (_judged(each, search, means, ran) for each, search in zip(stored, searches, strict=True))
    return Verification(
        gpu=means.gpu,
        rows=tuple(rows),
        session=ran.session,
        seconds=ran.seconds,
        interrupted=ran.interrupted,
        stopped=ran.stopped,
        note=ran.note,
    )


def _stored(store: Store, problem: Problem, gpu: Gpu) -> StoredWinner | None:
    """The winner for ``problem``, if it claims something that can be verified."""
    try:
        choice = find(problem, gpu, store_path=store.path)
        default = default_config(problem, gpu)
    except UnsupportedProblem:  # a row of another version may be of one
        return None
    row = choice.measurement
    if row is None or choice.trust is None or choice.ratio is None or choice.config == default:
        return None
    if (choice.level, choice.origin) != ("exact", store.label) or not _same_default(store, choice, default, gpu):
        return None
    claim = Claim.of(choice.ratio, choice.ratio_low, choice.ratio_high)
    return StoredWinner(
        problem=problem,
        config=choice.config,
        default=default,
        variant=row.variant,
        claim=claim,
        level=choice.trust.level,
    )


def _same_default(store: Store, choice: Choice, default: Config, gpu: Gpu) -> bool:
    """Whether a session claims against the default of today, as far as is known: ratios to others don't compare."""
    assert choice.measurement is not None
    problem = choice.measurement.problem
    rows = store.measurements(problem=problem, gpu_key=gpu.key, status="ok", stage="final")
    against = defaults(rows)
    known = {against.get(each.session) for each in rows if each.variant == choice.measurement.variant}
    today = default.family, default.key, source_digest(problem.spec, default)
    return None in known or today in known


def _judged(stored: StoredWinner, search: ProblemSearch, means: Means, ran: Ran) -> Verified:
    rows = means.store.measurements(problem=stored.problem, gpu_key=means.gpu.key)
    trust = trust_of(rows, stored.variant)
    said = partial(Verified, stored=stored, level=trust.level if trust else stored.level)
    here = [each for each in rows if each.session == ran.session]
    own = [each for each in here if each.variant == stored.variant]
    final = next((each for each in own if each.stage == "final" and each.ratio is not None), None)
    failed = next((each for each in own if each.status != "ok"), None)
    other = next((each for each in here if each.status != "ok" and each.variant != stored.variant), None)
    sound = any(each.status == "ok" and each.config == stored.default for each in here)
    if failed is not None and failed.status in REJECTING and sound:  # else the fault may be the machine's
        return said(word="not reproduced", here=None, why=failure_text(failed))
    if final is not None:
        claim, why = claim_of(final), _void(final)
        if claim.blurred and not why:
            why = "the times scatter too much to say anything; flashtune noise says more"
        agrees: Word = "reproduced" if claim.agrees(stored.claim) else "not reproduced"
        return said(word="could not be run" if why else agrees, here=claim, why=why, seen=final.reasons)
    if other is not None:
        why = f"the default: {failure_text(other)}"
    elif failed is not None:
        why = failure_text(failed)
    else:
        why = search.skipped or ran.ended or "there was no final; the log says why"
    return said(word="could not be run", here=None, why=why)


def _void(row: Measurement) -> str:
    """Why the ratio of a final says nothing; empty where it does, as at the power limit."""
    if row.contended:
        return "the card was shared with another process meanwhile, so the times say nothing"
    excused = "slow_clock" if any(each in row.reasons for each in POWER) else ""
    worst = next((each for each in row.reasons if each in SLOWDOWNS and each != excused), None)
    return f"the times say nothing: {THROTTLES[worst]}" if worst else ""
