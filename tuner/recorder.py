"""Stores what came of candidates and finals, and tells it to who goes by it: searches, blocklist, report, screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flashtune.codegen.config import Config
from flashtune.codegen.gpu import Gpu
from flashtune.tuned_db.records import Measurement, new_id
from flashtune.tuned_db.store import Store

from .blocklist import Blocklist
from .budget import Meter
from .build import Built
from .finals import finalists
from .lane import Lane, Task
from .records import flags, measurement
from .target import Target
from .teller import Teller, outcome_text
from .trial import Outcome
from .worker import Finished


class Recorder:
    """The rows of one run, which is ``session`` in the database, and the counts that its report gives.

    Outcomes wait for :meth:`record`, which stores those of all devices in one transaction.
    """

    def __init__(self, gpu: Gpu, store: Store, meter: Meter, seed: int, teller: Teller) -> None:
        self.session = new_id()
        self.blocklist = Blocklist(store, gpu.key)
        self.failed: Counter[str] = Counter()
        self.flagged: Counter[str] = Counter()
        """Measurements whose card was slowed down, again when they were repeated, or shared."""
        self._gpu = gpu
        self._store = store
        self._meter = meter
        self._seed = seed
        self._teller = teller
        self._waiting: list[tuple[Lane, Task, Outcome]] = []
        self._finals: list[Measurement] = []

    @property
    def waiting(self) -> bool:
        """Whether there are outcomes that are not stored yet."""
        return bool(self._waiting)

    def add(self, lane: Lane, task: Task, outcome: Outcome) -> None:
        """Takes what came of ``task``, to be stored by the next :meth:`record`."""
        self._waiting.append((lane, task, outcome))

    def record(self) -> list[Task]:
        """Stores the outcomes that wait. Gives the tasks whose configs are blocklisted now, because of these rows."""
        rows = self._store.record_all(
            measurement(
                outcome, task.target.problem, task.config, self._gpu, task.job.result(), lane.post.evidence,
                session=self.session, seed=self._seed,
            )
            for lane, task, outcome in self._waiting
        )  # fmt: skip
        self.flagged += flags(rows)
        culprits = []
        for (lane, task, outcome), row in zip(self._waiting, rows, strict=True):
            if row.status != "ok":
                self.failed[row.status] += 1
            task.target.tell(task.config, row, task.target.comparable(row))
            if self.blocklist.grown(row):
                culprits.append(task)
            self._meter.trials += 1
            self._teller.show(
                lane.post.unit.name,
                f"{task.target.problem}: {task.config} {outcome_text(outcome)}",
                task.target,
                outcome.readings,
            )
        self._waiting.clear()
        return culprits

    def record_final(self, lane: Lane, target: Target, answer: Finished, builds: Mapping[Config, Built]) -> None:
        """Stores the final of ``target``; ``builds`` are its configs as they were measured."""
        self._finals += (
            measurement(
                outcome, target.problem, config, self._gpu, builds[config], lane.post.evidence,
                session=self.session, seed=self._seed,
            )
            for config, outcome in finalists(answer, target.default, target.rows).items()
        )  # fmt: skip
        self.store_finals()
        target.finished = True
        self._teller.show(lane.post.unit.name, f"{target.problem}: decided", target, answer.readings)

    def store_finals(self) -> None:
        """Stores the rows of finals that are not stored yet: none, unless the database refused them before."""
        if not self._finals:
            return  # or it would wait for a lock with nothing to store
        rows = self._store.record_all(self._finals)
        self._finals.clear()
        self.flagged += flags(rows)
