"""The one thread of a measured run: asks, compiles ahead, hands out to the devices, takes what they answer.

Storing rows and asking for a config each take about 10 ms, a good part of what a trial takes. So each device has the
next candidate before it has finished one, and rows come before asking.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from flashtune.codegen.families.registry import predict, source_for
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.policy.ranked import ALIKE
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Builder, Built
from flashtune.tuner.processes.process import RunEndedError, interrupts_held
from flashtune.tuner.results.budget import Meter
from flashtune.tuner.results.report import Progress
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.workers.process_worker import Attempt, Failed, Final, Finished, Prepare, Prepared, Request
from flashtune.tuner.workers.supervisor import Died, Reply, wait_for_answers

from .deal import trials_each
from .device_queue import DeviceQueue, Task, hand_over
from .finals import wanted
from .progress import ProgressReporter
from .recorder import Recorder

logger = logging.getLogger("flashtune")

FINAL_SECONDS = 3.0
"""With one, the winners' intervals were 0.7 % wide on an H200, and up to 4.5 %: too wide to tell finalists apart. With
three they are 0.2 % wide, 0.4 % at most (tune_twice_24_shuffled_h200.json, tune_twice_h200.json)."""
FINALS_PART = 0.25
"""Most of a time budget that is kept for finals: with many problems each of them is shorter, to its fewest rounds."""
PREPARE_SECONDS = 300.0
ATTEMPT_SECONDS = 60.0
"""Limits of a request before its worker is killed; an attempt's and a final's grow with the time of a launch."""
LIMIT_LAUNCHES = 400
"""An attempt is some 50 launches at most, and the model is hardly ever wrong by this much."""
BLAMED_DEATHS = 2
"""Workers that may end over one request. The first may have been killed for reasons of its own."""
COMPILING_SECONDS, WATCH_SECONDS = 0.02, 0.5
"""How often compile jobs are looked at while a device waits for one, and time limits while none does."""


class NoDeviceLeftError(RunEndedError):
    """No device of the run can have a worker any more."""


class Coordinator:
    """The state of one run, so that it can end at any point and still report."""

    def __init__(
        self, gpu: Gpu, store: Store, builder: Builder, meter: Meter, seed: int, progress: Callable[[Progress], None]
    ) -> None:
        self.gpu = gpu
        self.store = store
        self.builder = builder
        self.meter = meter
        self.lost: list[str] = []
        """Why devices were given up."""
        self._reporter = ProgressReporter(gpu, meter, progress)
        self.recorder = Recorder(gpu, store, meter, seed, self._reporter)
        self._queues: list[DeviceQueue] = []
        self._deaths: Counter[tuple[object, ...]] = Counter()
        self._finals_part = 0.0
        self._final_seconds = FINAL_SECONDS

    def run(self, queues: Sequence[DeviceQueue]) -> None:
        """Searches and decides all problems. :class:`NoDeviceLeftError` where no device is left for some."""
        self._queues = list(queues)
        self._reporter.searches = [each for queue in queues for each in queue.searches]
        self._reporter.many_devices = len(queues) > 1
        budget = self.meter.budget.seconds
        if budget is not None:
            most = max(len(queue.searches) for queue in queues)
            self._finals_part = min(FINALS_PART, FINAL_SECONDS * most / budget)
            self._final_seconds = self._finals_part * budget / most
        while any(queue.unfinished for queue in self._queues):
            with interrupts_held():  # what was measured is stored, Ctrl-C or not
                for queue in self._queues:
                    if reply := queue.supervisor.poll():
                        self._take(queue, reply)
                self._leave_lost_devices()
                for queue in self._queues:
                    self._feed(queue)
                recorded = self._record()
            if not recorded and not self._ask():
                waiting = any(queue.supervisor.room and queue.unfinished for queue in self._queues)
                wait_for_answers(
                    (queue.supervisor for queue in self._queues if not queue.supervisor.lost),
                    COMPILING_SECONDS if waiting else WATCH_SECONDS,
                )

    def finish(self) -> None:
        """Stores what has been measured and is not stored yet, where the run ends early."""
        with interrupts_held():
            for queue in self._queues:
                while (reply := queue.supervisor.poll()) and isinstance(reply.answer, Outcome):
                    self._settle(queue, reply.answer)
            self._record()
            self.recorder.store_finals()

    # Asking and compiling

    def _ask(self) -> bool:
        """Asks for one config for the device that is shortest of them. False if none needs any now."""
        enough = max(2, math.ceil(2 * self.builder.workers / len(self._queues)))
        for queue in sorted(self._queues, key=lambda each: len(each.tasks)):
            if len(queue.tasks) < enough and (askable := self._askable(queue)):
                search = min(askable, key=lambda each: each.asked)
                config = search.ask()
                if config is not None:
                    queue.tasks.append(Task(search, config, self._submit(search.problem, config)))
                return True
        return False

    def _askable(self, queue: DeviceQueue) -> list[ProblemSearch]:
        trials = self.meter.budget.trials
        if trials is None:
            return [] if self._search_over else [each for each in queue.searches if each.open]
        everyone = [search for each in self._queues for search in each.searches]
        if sum(each.asked for each in everyone) >= trials:
            return []
        closed = [each.asked for each in everyone if not each.open]
        limit = trials_each(trials, closed, len(everyone) - len(closed))
        return [each for each in queue.searches if each.open and each.asked < limit]

    @property
    def _search_over(self) -> bool:
        """Whether the time for trying is used up."""
        return self.meter.budget.seconds is not None and self.meter.left <= self._finals_part

    def _submit(self, problem: Problem, config: Config) -> Future[Built]:
        return self.builder.submit(source_for(problem, config))

    # Handing out

    def _feed(self, queue: DeviceQueue) -> None:
        """Gives the worker what it has room for."""
        if self._search_over:
            queue.tasks.clear()
        while queue.supervisor.room and (task := next((each for each in queue.tasks if _ready(each)), None)):
            problem, config = task.search.problem, task.config
            if not self._prepared(queue, problem):
                return
            queue.tasks.remove(task)
            queue.trying.append(task)
            limit = ATTEMPT_SECONDS + LIMIT_LAUNCHES * predict(problem, config, self.gpu).seconds
            best, default = task.search.best, task.search.beside(config)
            queue.supervisor.ask(Attempt(problem, config, task.job.result(), best, default), limit)
        if queue.supervisor.idle and not (queue.tasks or self.recorder.waiting or self._askable(queue)):
            self._final_next(queue)

    def _final_next(self, queue: DeviceQueue) -> None:
        """Hands out the next final: the finalists are measured again, interleaved with the default."""
        for search in queue.unfinished:
            jobs = {config: self._submit(search.problem, config) for config in self._wanted(search)}
            if not all(each.done() for each in jobs.values()):
                return
            configs = tuple(config for config, job in jobs.items() if not job.result().error)
            if configs:
                if self._prepared(queue, search.problem):
                    self._reporter.show(queue.supervisor.unit.name, f"{search.problem}: finals", search)
                    launches = LIMIT_LAUNCHES * sum(search.seconds[each] for each in configs)
                    limit = ATTEMPT_SECONDS + 10 * self._final_seconds + launches
                    margin = ALIKE if configs[0] == search.default else None
                    queue.supervisor.ask(Final(search.problem, configs, self._final_seconds, margin), limit)
                return
            search.finished = True

    def _wanted(self, search: ProblemSearch) -> list[Config]:
        return wanted(search, self.store, self.gpu, self._final_seconds)

    def _prepared(self, queue: DeviceQueue, problem: Problem) -> bool:
        """Whether the worker has what ``problem`` needs; if not, it is asked to make that as soon as it is idle."""
        if problem in queue.supervisor.prepared:
            return True
        if queue.supervisor.idle:
            queue.supervisor.ask(Prepare(problem), PREPARE_SECONDS)
        return False

    # What comes back

    def _take(self, queue: DeviceQueue, reply: Reply) -> None:
        request, answer = reply.request, reply.answer
        if not isinstance(answer, Died):
            self._deaths.pop(request.key, None)  # only deaths in a row count: each worker has to prepare anew
        search = next(each for each in queue.searches if each.problem == request.problem)
        if isinstance(answer, Outcome):
            self._settle(queue, answer)
        elif isinstance(answer, Finished):
            builds = {each: self._submit(search.problem, each).result() for each in answer.rounds}
            self.recorder.record_final(queue, search, answer, builds)
        elif isinstance(answer, Prepared) and not answer.missing:
            queue.supervisor.prepared.add(request.problem)
        elif isinstance(answer, Prepared | Failed):
            message = answer.missing if isinstance(answer, Prepared) else answer.message
            self._drop(queue, search, request, "failed", message)
        elif isinstance(answer, Died):
            self._after_death(queue, search, request, answer)

    def _after_death(self, queue: DeviceQueue, search: ProblemSearch, request: Request, died: Died) -> None:
        """Once more in the next worker, unless the request hung or has cost a worker before."""
        self._deaths[request.key] += died.heard
        if died.heard:
            self._reporter.show(
                queue.supervisor.unit.name, f"{search.problem}: {request.what}: {died.message}; another worker goes on"
            )
        if self._deaths[request.key] >= BLAMED_DEATHS or (died.hung and isinstance(request, Attempt)):
            self._drop(queue, search, request, "timeout" if died.hung else "illegal_access", died.message)
        elif isinstance(request, Attempt):
            queue.tasks.insert(0 if died.heard else 1, queue.trying.popleft())

    def _drop(self, queue: DeviceQueue, search: ProblemSearch, request: Request, status: str, message: str) -> None:
        """Gives ``request`` up."""
        if isinstance(request, Attempt):
            self._settle(queue, Outcome(status=status, message=message))
        elif isinstance(request, Prepare):
            search.skip(message)
            queue.tasks = [each for each in queue.tasks if each.search is not search]
        else:
            logger.warning("%s: there is no final on %s: %s", search.problem, queue.supervisor.unit.name, message)
            search.finished = True

    def _settle(self, queue: DeviceQueue, outcome: Outcome) -> None:
        self.recorder.add(queue, queue.trying.popleft(), outcome)

    def _record(self) -> bool:
        """Stores the outcomes that are not stored yet; False if there are none."""
        if not self.recorder.waiting:
            return False
        for culprit in self.recorder.record():
            self._leave_alone(culprit)
        return True

    def _leave_alone(self, culprit: Task) -> None:
        """No other problem of its spec has the config tried, or goes on with it."""
        spec, blocklist = culprit.search.problem.spec, self.recorder.blocklist
        for queue in self._queues:
            for search in queue.searches:
                if search.problem.spec == spec:
                    search.bar(culprit.config)
            for task in [each for each in queue.tasks if blocklist.holds(each.search.problem.spec, each.config)]:
                queue.tasks.remove(task)
                task.search.withdraw(task.config)

    # Devices that are no more

    def _leave_lost_devices(self) -> None:
        """Problems of a device that was given up go on on the others."""
        for queue in self._queues:
            if queue.supervisor.lost and not queue.trying and queue.supervisor.lost not in self.lost:
                self.lost.append(queue.supervisor.lost)
                self._reporter.show(queue.supervisor.unit.name, queue.supervisor.lost)
                left = [each for each in self._queues if not each.supervisor.lost]
                if queue.unfinished and not left:
                    raise NoDeviceLeftError("; ".join(self.lost))
                hand_over(queue, left)


def _ready(task: Task) -> bool:
    return task.job.done() and not task.search.awaits_default(task.config)
