"""`flashtune db verify --failures`: what is said to be wrong on this GPU model is tried on the GPU at hand.

A failure bars a variant on its model, whoever reported it (`tuned_db.policy.blocklist`), and nothing that is measured
later outvotes it. So where it can't be reproduced people decide whether to take it out: `flashtune db forget`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flashtune.codegen.families.registry import default_config, unusable
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput
from flashtune.files import shown_path
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.records.measurement import Measurement, Variant
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.results.report import Progress
from flashtune.tuner.run.run import Means, Ran
from flashtune.tuner.search.problem_search import ProblemSearch

from .again import at_hand, failure_text, try_again
from .verify import SAMPLE

Word = Literal["wrong here too", "right here", "could not be run"]
WORDS: tuple[Word, ...] = get_args(Word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A variant that rows say was wrong for a spec, and the problem by which it is tried."""

    problem: Problem
    config: Config
    variant: Variant
    rows: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of one."""

    said: Said
    word: Word
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """One run."""

    gpu: Gpu
    rows: tuple[Tried, ...]
    ran: Ran
    arrivals: dict[str, int]
    """Numbers of the arrivals that brought rows which say so, by their ids; none for what was measured here."""

    def count(self, word: Word) -> int:
        return sum(each.word == word for each in self.rows)


def recheck(
    gpu: Gpu | str | None = None,
    *,
    sample: int = SAMPLE,
    seed: int = 0,
    problem: Problem | None = None,
    devices: Sequence[int] | None = None,
    database: str | Path | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Recheck:
    """Tries variants that ``database`` says are wrong on ``gpu``: ``sample`` of them, drawn by ``seed``, of any problem
    or of ``problem``.

    Those with today's source that can be tried. Raises what `verify` does, all before anything is changed.
    """
    place = at_hand(gpu, devices, database, sample=sample, seed=seed)
    progress(Progress(0.0, f"choosing failures of {shown_path(place.path)}", gpu=str(place.gpu)))
    said = failures(place.path, place.gpu, sample, seed, problem)
    with place.means(seed, progress) as means:
        return try_failures(said, means)


def failures(path: Path, gpu: Gpu, sample: int, seed: int, problem: Problem | None = None) -> list[Said]:
    """At most ``sample`` variants that are said to be wrong on ``gpu``; `InvalidInput` where there is none."""
    found: dict[tuple[str, Variant], list[Measurement]] = defaultdict(list)
    with Store.open(path, create=False, readonly=True) as store:
        for each in store.measurements(problem=problem, gpu_key=gpu.key, status="wrong"):
            asked = each.problem
            if asked.out_dtype or unusable(each.config, asked, gpu):
                continue
            if each.source_digest == source_digest(asked.spec, each.config):
                found[asked.spec.key, each.variant].append(each)
    drawn = random.Random(seed).sample(sorted(found), min(sample, len(found)))
    if not drawn:
        what = f"on {gpu}" if problem is None else f"for {problem} on {gpu}"
        raise InvalidInput(f"nothing is said to be wrong {what} in {shown_path(path)}, of today's source")
    return [
        Said(problem=rows[0].problem, config=rows[0].config, variant=rows[0].variant, rows=tuple(rows))
        for rows in map(found.__getitem__, drawn)
    ]


def try_failures(said: Sequence[Said], means: Means) -> Recheck:
    """Tries ``said`` with ``means``, into its database; ends as `verify_claims` does."""
    configs: dict[Problem, list[Config]] = defaultdict(list)
    for each in said:
        configs[each.problem].append(each.config)
    searches = {
        problem: ProblemSearch(problem, [], default_config(problem, means.gpu), {}, [], means.seed, given=given)
        for problem, given in configs.items()
    }
    ran = try_again(list(searches.values()), means)
    here = means.store.measurements(session=ran.session)
    return Recheck(
        gpu=means.gpu,
        rows=tuple(_judged(each, searches[each.problem], here, ran) for each in said),
        ran=ran,
        arrivals=means.store.arrivals_of([row.id for each in said for row in each.rows]),
    )


def _judged(said: Said, search: ProblemSearch, here: Sequence[Measurement], ran: Ran) -> Tried:
    own = [each for each in here if (each.problem.spec, each.variant) == (said.problem.spec, said.variant)]
    wrong = next((each for each in own if each.status == "wrong"), None)
    failed = next((each for each in own if each.status != "ok"), None)
    if wrong is not None:
        return Tried(said=said, word="wrong here too", why=failure_text(wrong))
    if failed is not None:
        return Tried(said=said, word="could not be run", why=failure_text(failed))
    if not own:
        return Tried(said=said, word="could not be run", why=search.skipped or ran.ended or "it is blocklisted")
    return Tried(said=said, word="right here", why="")
