"""`flashtune tune --captured`: which captured problems are still to be tuned, and what is left of them afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtune.files import shown_path
from flashtune.settings import capture_path, captured_problems_path

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.codegen.gpu.gpu import Gpu
    from flashtune.codegen.problem.problem import Problem
    from flashtune.tuned_db.lookup.captured import Captured


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What the file of captured problems holds for a run on ``gpu``."""

    file: Path
    gpu: Gpu
    measures: bool
    """Whether a device that is ``gpu`` is here, and may measure, or a cluster is asked for it."""
    mine: tuple[Captured, ...]
    others: Counter[str]
    """Problems of other device models, by key."""
    strange: int
    """Lines that could not be read."""

    def untuned(self, database: Path) -> list[Captured]:
        """Those of this GPU that have no measured config of their own, most often asked for first."""
        from flashtune.tuned_db.lookup.lookup import find

        return [each for each in self.mine if find(each.problem, self.gpu, store_path=database).level != "exact"]


def read_capture(
    gpu: str | None,
    mode: Any,
    devices: Sequence[int] | None,
    families: Collection[str] | None,
    ray: str | None = None,
) -> Capture:
    """Reads the file that the settings name; a problem that no family serves on the GPU is passed over."""
    from flashtune.errors import UnsupportedProblem
    from flashtune.tuned_db.lookup.captured import read_captured
    from flashtune.tuner.tune.session import eligible, locate

    target, units, _ = locate(gpu, mode, devices, ray)
    path = capture_path() or captured_problems_path()
    found, strange = read_captured(path)

    def served(problem: Problem) -> bool:
        try:
            return bool(eligible(problem, target, families))
        except UnsupportedProblem:
            return False

    mine = tuple(each for each in found if each.gpu_key == target.key and served(each.problem))
    return Capture(
        file=path,
        gpu=target,
        measures=bool(units) or ray is not None,
        mine=mine,
        others=Counter(each.gpu_key for each in found if each.gpu_key != target.key),
        strange=strange,
    )


def print_left(out: Console, capture: Capture, left: Sequence[Captured]) -> None:
    """What is tuned of the captured problems, and what is not."""
    tuned = len(capture.mine) - len(left)
    words = f"Captured for {capture.gpu}: {len(capture.mine)} problems, {tuned} of them tuned"
    out.print(words + (f", {len(left)} left without a measurement:" if left else "."))
    for each in left:
        asked = "1 process" if each.count == 1 else f"{each.count} processes"
        out.print(f"  {each.problem} (asked for by {asked})")
    if capture.others:
        listed = ", ".join(f"{count} for {key}" for key, count in capture.others.items())
        out.print(f"Captured for other GPUs: {listed}. Tune them there, or predict with --gpu.")
    if capture.strange:
        out.print(f"{capture.strange} lines of {shown_path(capture.file)} could not be read and were passed over.")
