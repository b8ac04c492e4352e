"""A device of a measured run, the problems that are measured on it, and what is to be tried for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from flashtune.codegen.config import Config

from .build import Built
from .post import Post
from .target import Target


@dataclass(frozen=True, slots=True)
class Task:
    target: Target
    config: Config
    job: Future[Built]


class Lane:
    """A device and the problems that are measured on it. ``tasks`` are to be tried, ``trying`` are in its worker."""

    def __init__(self, post: Post, targets: Sequence[Target]) -> None:
        self.post = post
        self.targets = list(targets)
        self.tasks: list[Task] = []
        self.trying: deque[Task] = deque()

    @property
    def unfinished(self) -> list[Target]:
        return [each for each in self.targets if not each.finished]


def hand_over(lost: Lane, others: Sequence[Lane]) -> None:
    """The unfinished problems of ``lost``, and what is to be tried for them, to whoever has least to do."""
    for target in lost.unfinished:
        other = min(others, key=lambda each: len(each.unfinished))
        other.targets.append(target)
        other.tasks += [each for each in lost.tasks if each.target is target]
    lost.targets = [each for each in lost.targets if each.finished]
    lost.tasks.clear()
