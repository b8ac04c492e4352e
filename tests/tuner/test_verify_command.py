"""`flashtune db verify` from the command to its exit code, on fake devices, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from tuner_fakes import GPU, PROBLEMS, FakeBench, FakeBuilder, LocalWorker, problem, slower

from flashtune.cli.explain import problem_flags
from flashtune.codegen.gpu import devices
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput, NoGpu, StoreError
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import new_id
from flashtune.tuned_db.sharing.merge import add_database
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.commands import again
from flashtune.tuner.commands.verify import verify
from flashtune.tuner.run.run import Means
from flashtune.tuner.trial.outcome import DeviceLostError, Outcome
from flashtune.tuner.tune import session as session_module

call = functools.partial(run, "db", "verify")


@pytest.fixture
def path(tuned: Path) -> Path:
    """Where there are winners already."""
    return tuned


class Unit:
    """In place of a `CudaUnit`: worker processes are not started in these tests."""

    bench: FakeBench

    def __init__(self, index: int, gpu: object, uuid: str, shared: bool) -> None:
        self.index, self.uuid, self.name = index, uuid, f"cuda:{index}"

    def open(self) -> FakeBench:
        return self.bench

    def sources(self, problem: Problem) -> list[Any]:
        return []


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Unit]:
    """The GPU is here, and its bench is ``Unit.bench``."""
    monkeypatch.setattr(again, "require_device", lambda: GPU)
    monkeypatch.setattr(session_module, "visible_gpus", lambda: [GPU])
    monkeypatch.setattr(session_module, "unit_uuid", lambda index: "GPU-other")
    monkeypatch.setattr(session_module, "CudaUnit", Unit)
    monkeypatch.setattr(again, "ProcessBuilder", lambda arch, workers: FakeBuilder())
    monkeypatch.setattr(again, "Means", functools.partial(Means, hire=LocalWorker))
    monkeypatch.setattr(Unit, "bench", FakeBench(unit="GPU-other"), raising=False)
    return Unit


def test_the_command_prints_claim_result_and_verdict(here: type[Unit], path: Path) -> None:
    done = call("--db", str(path), "--sample", "2")
    assert done.stdout.count("candidate -> verified") == 2
    assert "2 reproduced, 0 not reproduced, 0 could not be run, of 2" in done.stdout
    assert "Seen in 2 of the finals: the power limit lowers the clock; normal under load" in done.stdout
    assert "choosing winners" in done.stderr
    assert "2 of 2: " in done.stderr
    again = call("--db", str(path), "--gpu", "a100", "--sample", "2")
    assert "candidate" not in again.stdout


def test_it_fails_where_a_claim_is_not_reproduced(here: type[Unit], path: Path) -> None:
    winner = find(PROBLEMS[0], GPU, store_path=path).config
    here.bench = FakeBench(slower(winner, 1.2), unit="GPU-other")
    flags = ["--dtype", "float16", "--batch", "2", "--seqlen", "512", "--heads", "8", "--head-dim", "64"]
    done = call("--db", str(path), *flags, code=1)
    assert "0 reproduced, 1 not reproduced" in done.stdout
    assert "candidate -> disputed" in done.stdout


def test_ctrl_c_prints_what_is_known_and_ends_as_shells_have_it(here: type[Unit], path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)
        return None

    here.bench = FakeBench(unit="GPU-other", outcome=outcome)
    assert "Interrupted: all results up to here are stored." in call("--db", str(path), code=130).stdout


def test_a_card_on_which_the_default_fails_too_disproves_nothing(here: type[Unit], path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        raise DeviceLostError("the card fell off the bus")

    here.bench = FakeBench(unit="GPU-other", outcome=outcome)
    said = call("--db", str(path), code=1).stdout
    assert "0 reproduced, 0 not reproduced, 3 could not be run" in said
    assert "the default: illegal_access" in said
    assert "the card fell off the bus" in said


def test_it_fails_where_nothing_could_be_run(here: type[Unit], path: Path) -> None:
    here.bench = FakeBench(outcome=lambda config, number: Outcome(status="out_of_memory"))
    assert "3 could not be run" in call("--db", str(path), code=1).stdout


def test_a_session_of_the_same_day_and_card_says_what_to_do(here: type[Unit], path: Path) -> None:
    here.bench = FakeBench()
    assert "another day or another card can confirm it" in call("--db", str(path)).stdout


@pytest.mark.parametrize("named", [[], ["--gpu", "a100"]], ids=["the first", "named"])
def test_without_the_gpu_there_is_one_error_and_nothing_changes(
    path: Path, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (devices, session_module):
        monkeypatch.setattr(each, "visible_gpus", list)
    before = path.read_bytes()
    done = call("--db", str(path), *named, code=1)
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1
    assert "CUDA" in done.output
    assert path.read_bytes() == before


def test_bad_input_is_refused_before_anything_is_changed(here: type[Unit], path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    for name, got in (("sample", 0), ("sample", True), ("sample", 2.0), ("seed", -1)):
        given: dict[str, Any] = {name: got}
        with pytest.raises(InvalidInput, match=f"{name}="):
            verify(GPU, database=path, **given)
    with pytest.raises(NoGpu, match="h100"):
        verify("h100", database=path)
    with pytest.raises(InvalidInput, match="nothing to verify for float16 d64 b2 s4096 h8"):
        verify(GPU, database=path, problem=problem(4096))
    assert path.read_bytes() == before
    with pytest.raises(StoreError, match="there is no tuning database"):
        verify(GPU, database=tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    assert "usage" in call("--db", str(path), "--sample", "0", code=2).output.lower()


class TestFailures:
    """M11: what is said to be wrong on this GPU model is tried here."""

    @pytest.fixture
    def said(self, path: Path) -> dict[Problem, Config]:
        """By one session of this model that a merge brought: each winner is wrong."""
        found = {each: find(each, GPU, store_path=path).config for each in PROBLEMS}
        with Store.open(path) as store:
            finals = [each for each in store.measurements(stage="final") if found[each.problem] == each.config]
            lies = [
                dataclasses.replace(each, id=new_id(), session="liar", status="wrong", median_us=None)
                for each in finals
            ]
        with Store.open(path.with_name("other.db")) as other:
            other.add(lies)
        with Store.open(path) as store:
            add_database(store, path.with_name("other.db"))
        assert all(find(each, GPU, store_path=path).config != config for each, config in found.items())
        return found

    def test_what_is_right_here_is_named_with_the_way_out(
        self, here: type[Unit], path: Path, said: dict[Problem, Config]
    ) -> None:
        done = call("--failures", "--db", str(path), code=1)
        assert "0 wrong here too, 3 right here, 0 could not be run, of 3" in done.stdout
        assert all(find(each, GPU, store_path=path).config != config for each, config in said.items()), "not by itself"
        (line,) = [each for each in done.stdout.splitlines() if each.startswith("To take out")]
        assert line.startswith("To take out 3 that say otherwise: flashtune db forget --arrival 1 --db ")
        run(*shlex.split(line.split("flashtune ")[1])[:-1])
        assert {each: find(each, GPU, store_path=path).config for each in PROBLEMS} == said
        with Store.open(path, readonly=True) as store:
            assert {each.status for each in store.measurements()} == {"ok"}

    def test_what_is_wrong_here_too_stays(self, here: type[Unit], path: Path, said: dict[Problem, Config]) -> None:
        wrong = said[PROBLEMS[0]]

        def outcome(config: Config, number: int) -> Outcome | None:
            return Outcome(status="wrong", message="row 3") if config == wrong else None

        here.bench = FakeBench(unit="GPU-other", outcome=outcome)
        done = call("--failures", "--db", str(path), *shlex.split(" ".join(problem_flags(PROBLEMS[0]))))
        assert "1 wrong here too, 0 right here, 0 could not be run, of 1" in done.stdout
        assert "wrong here too: wrong: row 3" in " ".join(done.stdout.split())
        assert "To take out" not in done.stdout

    def test_what_could_not_be_tried_says_so(self, here: type[Unit], path: Path, said: dict[Problem, Config]) -> None:
        here.bench = FakeBench(outcome=lambda config, number: Outcome(status="out_of_memory", message="full"))
        done = call("--failures", "--db", str(path), code=1)
        assert "0 wrong here too, 0 right here, 3 could not be run, of 3" in done.stdout

    def test_several_of_one_problem_are_tried_in_one_run(self, here: type[Unit], path: Path) -> None:
        """The default among them."""
        with Store.open(path) as store:
            tried = store.measurements(problem=PROBLEMS[0], stage="measure")
            configs = {each.config: each for each in tried if each.status == "ok"}
            store.add(
                dataclasses.replace(each, id=new_id(), session="liar", status="wrong", median_us=None)
                for each in configs.values()
            )
        assert len(configs) > 3
        done = call("--failures", "--db", str(path), code=1)
        assert f"0 wrong here too, {len(configs)} right here" in done.stdout
        assert set(configs) == {config for problem, config in here.bench.attempts if problem == PROBLEMS[0]}
        assert "flashtune db forget --session liar --db " in done.stdout

    def test_nothing_of_another_model_or_source_is_tried(self, here: type[Unit], path: Path) -> None:
        with Store.open(path) as store:
            one = store.measurements(stage="final")[0]
            for changes in ({"gpu_key": "8.0/other", "gpu_name": "other"}, {"source_digest": "0" * 64}):
                store.record(
                    dataclasses.replace(one, id=new_id(), session="liar", status="wrong", median_us=None, **changes)
                )
        done = call("--failures", "--db", str(path), code=1)
        assert "nothing is said to be wrong on a100-sxm-80gb" in done.stderr
