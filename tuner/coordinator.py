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

from flashtune.codegen.config import Config
from flashtune.codegen.family import family
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.model import predict
from flashtune.codegen.problem import Problem
from flashtune.codegen.render import Source, render_source
from flashtune.tuned_db.ranked import ALIKE
from flashtune.tuned_db.store import Store

from .budget import Meter
from .build import Builder, Built
from .finals import wanted
from .lane import Lane, Task, hand_over
from .post import Died, Reply, wait_for_posts
from .process import RunEndedError, interrupts_held
from .recorder import Recorder
from .report import Progress
from .sharing import trials_each
from .target import Target
from .teller import Teller
from .trial import Outcome
from .worker import Attempt, Failed, Final, Finished, Prepare, Prepared, Request

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
        self._teller = Teller(gpu, meter, progress)
        self.recorder = Recorder(gpu, store, meter, seed, self._teller)
        self._lanes: list[Lane] = []
        self._deaths: Counter[tuple[object, ...]] = Counter()
        self._finals_part = 0.0
        self._final_seconds = FINAL_SECONDS

    def run(self, lanes: Sequence[Lane]) -> None:
        """Searches and decides all problems. :class:`NoDeviceLeftError` where no device is left for some."""
        self._lanes = list(lanes)
        self._teller.targets = [each for lane in lanes for each in lane.targets]
        self._teller.many_devices = len(lanes) > 1
        budget = self.meter.budget.seconds
        if budget is not None:
            most = max(len(lane.targets) for lane in lanes)
            self._finals_part = min(FINALS_PART, FINAL_SECONDS * most / budget)
            self._final_seconds = self._finals_part * budget / most
        while any(lane.unfinished for lane in self._lanes):
            with interrupts_held():  # what was measured is stored, Ctrl-C or not
                for lane in self._lanes:
                    if reply := lane.post.poll():
                        self._take(lane, reply)
                self._leave_lost_devices()
                for lane in self._lanes:
                    self._feed(lane)
                recorded = self._record()
            if not recorded and not self._ask():
                waiting = any(lane.post.room and lane.unfinished for lane in self._lanes)
                wait_for_posts(
                    (lane.post for lane in self._lanes if not lane.post.lost),
                    COMPILING_SECONDS if waiting else WATCH_SECONDS,
                )

    def finish(self) -> None:
        """Stores what has been measured and is not stored yet, where the run ends early."""
        with interrupts_held():
            for lane in self._lanes:
                while (reply := lane.post.poll()) and isinstance(reply.answer, Outcome):
                    self._settle(lane, reply.answer)
            self._record()
            self.recorder.store_finals()

    # Asking and compiling

    def _ask(self) -> bool:
        """Asks for one config for the device that is shortest of them. False if none needs any now."""
        enough = max(2, math.ceil(2 * self.builder.workers / len(self._lanes)))
        for lane in sorted(self._lanes, key=lambda each: len(each.tasks)):
            if len(lane.tasks) < enough and (askable := self._askable(lane)):
                target = min(askable, key=lambda each: each.asked)
                config = target.ask()
                if config is not None:
                    lane.tasks.append(Task(target, config, self._submit(target.problem, config)))
                return True
        return False

    def _askable(self, lane: Lane) -> list[Target]:
        trials = self.meter.budget.trials
        if trials is None:
            return [] if self._search_over else [each for each in lane.targets if each.open]
        everyone = [target for each in self._lanes for target in each.targets]
        if sum(each.asked for each in everyone) >= trials:
            return []
        closed = [each.asked for each in everyone if not each.open]
        limit = trials_each(trials, closed, len(everyone) - len(closed))
        return [each for each in lane.targets if each.open and each.asked < limit]

    @property
    def _search_over(self) -> bool:
        """Whether the time for trying is used up."""
        return self.meter.budget.seconds is not None and self.meter.left <= self._finals_part

    def _submit(self, problem: Problem, config: Config) -> Future[Built]:
        return self.builder.submit(render(problem, config))

    # Handing out

    def _feed(self, lane: Lane) -> None:
        """Gives the worker what it has room for."""
        if self._search_over:
            lane.tasks.clear()
        while lane.post.room and (task := next((each for each in lane.tasks if _ready(each)), None)):
            problem, config = task.target.problem, task.config
            if not self._prepared(lane, problem):
                return
            lane.tasks.remove(task)
            lane.trying.append(task)
            limit = ATTEMPT_SECONDS + LIMIT_LAUNCHES * predict(problem, config, self.gpu).seconds
            best, default = task.target.best, task.target.beside(config)
            lane.post.ask(Attempt(problem, config, task.job.result(), best, default), limit)
        if lane.post.idle and not (lane.tasks or self.recorder.waiting or self._askable(lane)):
            self._final_next(lane)

    def _final_next(self, lane: Lane) -> None:
        """Hands out the next final: the finalists are measured again, interleaved with the default."""
        for target in lane.unfinished:
            jobs = {config: self._submit(target.problem, config) for config in self._wanted(target)}
            if not all(each.done() for each in jobs.values()):
                return
            configs = tuple(config for config, job in jobs.items() if not job.result().error)
            if configs:
                if self._prepared(lane, target.problem):
                    self._teller.show(lane.post.unit.name, f"{target.problem}: finals", target)
                    launches = LIMIT_LAUNCHES * sum(target.seconds[each] for each in configs)
                    limit = ATTEMPT_SECONDS + 10 * self._final_seconds + launches
                    margin = ALIKE if configs[0] == target.default else None
                    lane.post.ask(Final(target.problem, configs, self._final_seconds, margin), limit)
                return
            target.finished = True

    def _wanted(self, target: Target) -> list[Config]:
        return wanted(target, self.store, self.gpu, self._final_seconds)

    def _prepared(self, lane: Lane, problem: Problem) -> bool:
        """Whether the worker has what ``problem`` needs; if not, it is asked to make that as soon as it is idle."""
        if problem in lane.post.prepared:
            return True
        if lane.post.idle:
            lane.post.ask(Prepare(problem), PREPARE_SECONDS)
        return False

    # What comes back

    def _take(self, lane: Lane, reply: Reply) -> None:
        request, answer = reply.request, reply.answer
        if not isinstance(answer, Died):
            self._deaths.pop(request.key, None)  # only deaths in a row count: each worker has to prepare anew
        target = next(each for each in lane.targets if each.problem == request.problem)
        if isinstance(answer, Outcome):
            self._settle(lane, answer)
        elif isinstance(answer, Finished):
            builds = {each: self._submit(target.problem, each).result() for each in answer.rounds}
            self.recorder.record_final(lane, target, answer, builds)
        elif isinstance(answer, Prepared) and not answer.missing:
            lane.post.prepared.add(request.problem)
        elif isinstance(answer, Prepared | Failed):
            message = answer.missing if isinstance(answer, Prepared) else answer.message
            self._drop(lane, target, request, "failed", message)
        elif isinstance(answer, Died):
            self._after_death(lane, target, request, answer)

    def _after_death(self, lane: Lane, target: Target, request: Request, died: Died) -> None:
        """Once more in the next worker, unless the request hung or has cost a worker before."""
        self._deaths[request.key] += died.heard
        if died.heard:
            self._teller.show(
                lane.post.unit.name, f"{target.problem}: {request.what}: {died.message}; another worker goes on"
            )
        if self._deaths[request.key] >= BLAMED_DEATHS or (died.hung and isinstance(request, Attempt)):
            self._drop(lane, target, request, "timeout" if died.hung else "illegal_access", died.message)
        elif isinstance(request, Attempt):
            lane.tasks.insert(0 if died.heard else 1, lane.trying.popleft())

    def _drop(self, lane: Lane, target: Target, request: Request, status: str, message: str) -> None:
        """Gives ``request`` up."""
        if isinstance(request, Attempt):
            self._settle(lane, Outcome(status=status, message=message))
        elif isinstance(request, Prepare):
            target.skip(message)
            lane.tasks = [each for each in lane.tasks if each.target is not target]
        else:
            logger.warning("%s: there is no final on %s: %s", target.problem, lane.post.unit.name, message)
            target.finished = True

    def _settle(self, lane: Lane, outcome: Outcome) -> None:
        self.recorder.add(lane, lane.trying.popleft(), outcome)

    def _record(self) -> bool:
        """Stores the outcomes that are not stored yet; False if there are none."""
        if not self.recorder.waiting:
            return False
        for culprit in self.recorder.record():
            self._leave_alone(culprit)
        return True

    def _leave_alone(self, culprit: Task) -> None:
        """No other problem of its spec has the config tried, or goes on with it."""
        spec, blocklist = culprit.target.problem.spec, self.recorder.blocklist
        for lane in self._lanes:
            for target in lane.targets:
                if target.problem.spec == spec:
                    target.bar(culprit.config)
            for task in [each for each in lane.tasks if blocklist.holds(each.target.problem.spec, each.config)]:
                lane.tasks.remove(task)
                task.target.withdraw(task.config)

    # Devices that are no more

    def _leave_lost_devices(self) -> None:
        """Problems of a device that was given up go on on the others."""
        for lane in self._lanes:
            if lane.post.lost and not lane.trying and lane.post.lost not in self.lost:
                self.lost.append(lane.post.lost)
                self._teller.show(lane.post.unit.name, lane.post.lost)
                left = [each for each in self._lanes if not each.post.lost]
                if lane.unfinished and not left:
                    raise NoDeviceLeftError("; ".join(self.lost))
                hand_over(lane, left)


def _ready(task: Task) -> bool:
    return task.job.done() and not task.target.awaits_default(task.config)


def render(problem: Problem, config: Config) -> Source:
    """The source of ``config`` for ``problem``."""
    names = family(config.family).names(config, problem.spec)
    return render_source(config.family, problem.spec, config, names)
