"""How a device is kept staffed, by a clock that the test turns."""

from __future__ import annotations

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, LocalWorker, problem

from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.search.space import make_space
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.workers import supervisor
from flashtune.tuner.workers.process_worker import Attempt, Prepare, Request
from flashtune.tuner.workers.supervisor import Died, Reply, Supervisor

PROBLEM = problem()
ATTEMPT, OTHER = (
    Attempt(PROBLEM, config, Built(digest="a" * 64, registers=96), None)
    for config in make_space(PROBLEM, GPU, FAMILY).configs[:2]
)


class Silent(LocalWorker):
    """Answers when it is told to; a kill may not reach it."""

    deaf = False

    def __init__(self, unit: FakeBench) -> None:
        super().__init__(unit)
        self.asked: list[Request] = []

    def send(self, request: Request) -> None:
        if self._answers.closed:
            raise BrokenPipeError
        self.asked.append(request)

    def answer(self) -> None:
        super().send(self.asked.pop(0))

    def kill(self) -> None:
        if not self.deaf:
            super().kill()


class Stage:
    def __init__(self) -> None:
        self.now = 0.0
        self.workers: list[Silent] = []
        self.supervisor = Supervisor(FakeBench(), self.hire, lambda: self.now)
        assert self.supervisor.poll() is None
        assert self.supervisor.idle

    def hire(self, unit: FakeBench) -> Silent:
        self.workers.append(Silent(unit))
        unit.ready.add(PROBLEM)
        return self.workers[-1]

    def wait(self, seconds: float) -> Reply | None:
        """Looks once a second, as a session that is awake does; the first thing that happens."""
        for _ in range(round(seconds)):
            self.now += 1.0
            if reply := self.supervisor.poll():
                return reply
        return None


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_an_answer_in_time_is_the_reply(stage: Stage) -> None:
    stage.supervisor.ask(ATTEMPT, 10.0)
    assert not stage.supervisor.idle
    assert stage.wait(9.0) is None
    stage.workers[0].answer()
    reply = stage.supervisor.poll()
    assert reply is not None
    assert reply.request == ATTEMPT
    assert isinstance(reply.answer, Outcome)
    assert stage.supervisor.idle
    assert stage.wait(1000.0) is None, "an idle worker has no limit"
    assert len(stage.workers) == 1


def test_a_second_candidate_waits_in_the_worker_and_its_time_begins_with_its_turn(stage: Stage) -> None:
    stage.supervisor.ask(ATTEMPT, 10.0)
    assert stage.supervisor.room
    stage.supervisor.ask(OTHER, 10.0)
    assert not stage.supervisor.room
    assert stage.wait(8.0) is None
    stage.workers[0].answer()
    reply = stage.wait(1.0)
    assert reply is not None
    assert reply.request == ATTEMPT
    assert stage.wait(8.0) is None
    stage.workers[0].answer()
    reply = stage.wait(1.0)
    assert reply is not None
    assert reply.request == OTHER


def test_only_the_first_candidate_is_blamed_for_a_death(stage: Stage) -> None:
    stage.supervisor.ask(ATTEMPT, 10.0)
    stage.supervisor.ask(OTHER, 10.0)
    stage.workers[0].kill()
    assert stage.supervisor.poll() == Reply(ATTEMPT, Died("its worker was closed"))
    assert not stage.supervisor.room
    assert stage.supervisor.poll() == Reply(OTHER, Died("its worker was closed", heard=False))
    assert stage.supervisor.poll() is None
    assert stage.supervisor.idle


def test_nothing_waits_behind_what_is_no_candidate(stage: Stage) -> None:
    stage.supervisor.ask(Prepare(PROBLEM), 10.0)
    assert not stage.supervisor.room


def test_a_worker_past_its_limit_is_replaced(stage: Stage) -> None:
    stage.supervisor.ask(ATTEMPT, 10.0)
    reply = stage.wait(15.0)
    assert reply == Reply(ATTEMPT, Died("its worker was killed at the time limit", hung=True))
    assert 10.0 <= stage.now <= 12.0
    assert stage.wait(1.0) is None
    assert stage.supervisor.idle
    assert len(stage.workers) == 2


def test_the_time_in_which_the_session_was_stopped_does_not_count(stage: Stage) -> None:
    stage.supervisor.ask(ATTEMPT, 10.0)
    stage.wait(3.0)
    stage.now += 3600.0
    assert stage.supervisor.poll() is None
    assert stage.wait(6.0) is None
    reply = stage.wait(5.0)
    assert reply is not None
    assert isinstance(reply.answer, Died)


def test_a_worker_that_can_not_be_killed_costs_the_device(stage: Stage) -> None:
    stage.workers[0].deaf = True
    stage.supervisor.ask(ATTEMPT, 10.0)
    reply = stage.wait(10.0 + supervisor.KILL_SECONDS + 2.0)
    assert reply is not None
    assert isinstance(reply.answer, Died)
    assert "can't be killed" in stage.supervisor.lost
    assert not stage.supervisor.idle
    assert stage.supervisor.poll() is None


def test_a_worker_that_died_before_it_was_asked_has_not_heard(stage: Stage) -> None:
    stage.workers[0].kill()
    stage.supervisor.ask(ATTEMPT, 10.0)
    reply = stage.supervisor.poll()
    assert reply == Reply(ATTEMPT, Died("its worker was closed", heard=False))
    assert not stage.supervisor.lost


def test_a_device_without_processes_is_given_up() -> None:
    def hire(unit: FakeBench) -> LocalWorker:
        raise OSError("Resource temporarily unavailable")

    lost = Supervisor(FakeBench(), hire).lost
    assert "GPU-fake was given up" in lost
    assert "Resource temporarily unavailable" in lost


def test_a_new_worker_has_nothing_prepared(stage: Stage) -> None:
    stage.supervisor.prepared.add(PROBLEM)
    stage.workers[0].kill()
    assert stage.supervisor.poll() is None
    assert not stage.supervisor.prepared
    assert len(stage.workers) == 2
