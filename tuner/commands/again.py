"""Configs that are known are tried again here: a tuning run that searches nothing, for `verify.py` and `recheck.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashtune import settings
from flashtune.codegen.families.registry import predict
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput, NoGpu, StoreError
from flashtune.files import shown_path
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import ProcessBuilder, spare_workers
from flashtune.tuner.results.budget import Budget
from flashtune.tuner.results.report import Progress
from flashtune.tuner.run.run import Means, Ran, run_searches
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.tune.session import locate
from flashtune.tuner.workers.process_worker import Unit
from flashtune.values import shown

MESSAGE = 200
"""Characters of the message of a failure; the row has all of it."""


@dataclass(frozen=True, slots=True)
class AtHand:
    """The GPU at hand and the database."""

    gpu: Gpu
    units: Sequence[Unit]
    path: Path

    @contextmanager
    def means(self, seed: int, progress: Callable[[Progress], None]) -> Iterator[Means]:
        """For a run."""
        with Store.open(self.path, create=False) as store:
            builder = ProcessBuilder(self.gpu.arch, spare_workers(len(self.units)))
            try:
                yield Means(gpu=self.gpu, units=self.units, store=store, builder=builder, seed=seed, progress=progress)
            finally:
                builder.close()


def at_hand(
    gpu: Gpu | str | None, devices: Sequence[int] | None, database: str | Path | None, *, sample: int, seed: int
) -> AtHand:
    """Where to run, before anything is changed. Raises `NoGpu`, `InvalidInput` and `StoreError`."""
    _check_number("sample", sample, 1)
    _check_number("seed", seed, 0)
    if gpu is None and devices is None:
        gpu = require_device()
    wanted, units, reason = locate(gpu, "auto", devices)
    if not units:
        raise NoGpu(f"{reason}. Claims are verified on the GPU that they are for; nothing was changed")
    settings.author()  # a name that can't be stored would fail with the first row
    path = Path(settings.database_path() if database is None else database)
    if not path.exists():
        raise StoreError(f"there is no tuning database at {shown_path(path)}")
    return AtHand(wanted, units, path)


def try_again(searches: Sequence[ProblemSearch], means: Means) -> Ran:
    """Tries the given configs of ``searches``, each of another problem.

    Ends early, with what is known, on Ctrl-C, or when no device can have a worker any more.
    """
    by_problem = {each.problem: each for each in searches}

    def seconds(problem: Problem) -> float:
        return predict(problem, by_problem[problem].default, means.gpu).seconds

    def search(problem: Problem, unit: Unit) -> tuple[ProblemSearch, Iterable[Config]]:
        return by_problem[problem], by_problem[problem].given

    budget = Budget(trials=sum(len(each.given) for each in searches))
    return run_searches(means, budget, list(by_problem), seconds, search)


def failure_text(row: Measurement) -> str:
    """What a failure says, in one line."""
    message = " ".join(row.message.split())  # a compiler's has lines
    return f"{row.status}: {message[:MESSAGE]}" if message else row.status


def _check_number(name: str, got: object, least: int) -> None:
    if isinstance(got, bool) or not isinstance(got, int) or not least <= got < 2**32:
        raise InvalidInput(f"{name}={shown(got)} must be a whole number from {least} to 2**32 - 1")
