"""A device of a measured run, the problems that are measured on it, and what is to be tried for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from flashtune.codegen.plan.config import Config
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.workers.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Task:
    search: ProblemSearch
    config: Config
    job: Future[Built]


class DeviceQueue:
    """A device and the problems that are measured on it. ``tasks`` are to be tried, ``trying`` are in its worker."""

    def __init__(self, supervisor: Supervisor, searches: Sequence[ProblemSearch]) -> None:
        self.supervisor = supervisor
        self.searches = list(searches)
        self.tasks: list[Task] = []
        self.trying: deque[Task] = deque()

    @property
    def unfinished(self) -> list[ProblemSearch]:
        return [each for each in self.searches if not each.finished]


def hand_over(lost: DeviceQueue, others: Sequence[DeviceQueue]) -> None:
    """The unfinished problems of ``lost``, and what is to be tried for them, to whoever has least to do."""
    for search in lost.unfinished:
        other = min(others, key=lambda each: len(each.unfinished))
        other.searches.append(search)
        other.tasks += [each for each in lost.tasks if each.search is search]
    lost.searches = [each for each in lost.searches if each.finished]
    lost.tasks.clear()
