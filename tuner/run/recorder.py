"""Stores what came of candidates and finals, and tells it to who goes by it: searches, blocklist, report, screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.records.measurement import Measurement, new_id
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.budget import Meter
from flashtune.tuner.results.rows import flags, measurement
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.workers.process_worker import Finished

from .blocklist import Blocklist
from .device_queue import DeviceQueue, Task
from .finals import finalists
from .progress import ProgressReporter, outcome_text


class Recorder:
    """The rows of one run, which is ``session`` in the database, and the counts that its report gives.

    Outcomes wait for :meth:`record`, which stores those of all devices in one transaction.
    """

    def __init__(self, gpu: Gpu, store: Store, meter: Meter, seed: int, reporter: ProgressReporter) -> None:
        self.session = new_id()
        self.blocklist = Blocklist(store, gpu.key)
        self.failed: Counter[str] = Counter()
        self.flagged: Counter[str] = Counter()
        """Measurements whose card was slowed down, again when they were repeated, or shared."""
        self._gpu = gpu
        self._store = store
        self._meter = meter
        self._seed = seed
        self._reporter = reporter
        self._waiting: list[tuple[DeviceQueue, Task, Outcome]] = []
        self._finals: list[Measurement] = []

    @property
    def waiting(self) -> bool:
        """Whether there are outcomes that are not stored yet."""
        return bool(self._waiting)

    def add(self, queue: DeviceQueue, task: Task, outcome: Outcome) -> None:
        """Takes what came of ``task``, to be stored by the next :meth:`record`."""
        self._waiting.append((queue, task, outcome))

    def record(self) -> list[Task]:
        """Stores the outcomes that wait. Gives the tasks whose configs are blocklisted now, because of these rows."""
        rows = self._store.record_all(
            measurement(
                outcome, task.search.problem, task.config, self._gpu, task.job.result(), queue.supervisor.evidence,
                session=self.session, seed=self._seed,
            )
            for queue, task, outcome in self._waiting
        )  # fmt: skip
        self.flagged += flags(rows)
        culprits = []
        for (queue, task, outcome), row in zip(self._waiting, rows, strict=True):
            if row.status != "ok":
                self.failed[row.status] += 1
            task.search.tell(task.config, row, task.search.comparable(row))
            if self.blocklist.grown(row):
                culprits.append(task)
            self._meter.trials += 1
            self._reporter.show(
                queue.supervisor.unit.name,
                f"{task.search.problem}: {task.config} {outcome_text(outcome)}",
                task.search,
                outcome.readings,
            )
        self._waiting.clear()
        return culprits

    def record_final(
        self, queue: DeviceQueue, search: ProblemSearch, answer: Finished, builds: Mapping[Config, Built]
    ) -> None:
        """Stores the final of ``search``; ``builds`` are its configs as they were measured."""
        self._finals += (
            measurement(
                outcome, search.problem, config, self._gpu, builds[config], queue.supervisor.evidence,
                session=self.session, seed=self._seed,
            )
            for config, outcome in finalists(answer, search.default, search.rows).items()
        )  # fmt: skip
        self.store_finals()
        search.finished = True
        self._reporter.show(queue.supervisor.unit.name, f"{search.problem}: decided", search, answer.readings)

    def store_finals(self) -> None:
        """Stores the rows of finals that are not stored yet: none, unless the database refused them before."""
        if not self._finals:
            return  # or it would wait for a lock with nothing to store
        rows = self._store.record_all(self._finals)
        self._finals.clear()
        self.flagged += flags(rows)
