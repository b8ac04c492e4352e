"""What `flashtune db verify` does, on fake devices: what is drawn, what is stored, and what the verdicts say."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
from tuner_fakes import (
    FAMILY,
    GPU,
    PROBLEMS,
    FakeBench,
    ShutBench,
    means,
    problem,
    run,
    slower,
)

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import Measurement, new_id
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.commands.verify import Verification, verify_claims, winners
from flashtune.tuner.trial.outcome import DeviceLostError, Outcome
from flashtune.tuner.trial.sensors import Readings
from flashtune.tuner.workers import supervisor

DEFAULT = FAMILY.default(PROBLEMS[0].spec, GPU)


@pytest.fixture
def path(tuned: Path) -> Path:
    """Where there are winners already."""
    return tuned


def verified(path: Path, *benches: FakeBench, sample: int = 20, seed: int = 0, wanted: Problem | None = None) -> Any:
    found = winners(path, GPU, sample, seed, wanted)
    with Store.open(path) as store:
        units = benches or (FakeBench(unit="GPU-other"),)
        return verify_claims(found, means(store, *units, seed=seed))


def rows_of(path: Path, session: str) -> list[Measurement]:
    with Store.open(path, readonly=True) as store:
        return store.measurements(session=session)


def words(found: Verification) -> list[str]:
    return [each.word for each in found.rows]


def test_the_winners_are_checked_and_meet_the_default_in_a_final(path: Path) -> None:
    bench = FakeBench(unit="GPU-other")
    before = {each: find(each, GPU, store_path=path) for each in PROBLEMS}
    found = verified(path, bench)
    assert words(found) == ["reproduced"] * 3
    for each in found.rows:
        config = before[each.stored.problem].config
        assert each.stored.config == config != DEFAULT
        assert bench.finalists[each.stored.problem] == [DEFAULT, config]
        assert each.here is not None
        assert each.here.ratio == pytest.approx(each.stored.claim.ratio)
    assert sorted(bench.attempts, key=str) == sorted(
        ((each, config) for each in PROBLEMS for config in (DEFAULT, before[each].config)), key=str
    )


def test_what_was_measured_is_an_ordinary_session_that_verifies(path: Path) -> None:
    with Store.open(path, readonly=True) as store:
        earlier = store.measurements()
    found = verified(path)
    assert {(each.stored.level, each.level) for each in found.rows} == {("candidate", "verified")}
    with Store.open(path, readonly=True) as store:
        assert [each for each in store.measurements() if each.session != found.session] == earlier
    rows = rows_of(path, found.session)
    assert {each.unit for each in rows} == {"GPU-other"}
    finals = [each for each in rows if each.stage == "final"]
    assert len(finals) == 6
    assert all(each.ratio is not None and each.rounds == 9 for each in finals)
    choice = find(PROBLEMS[0], GPU, store_path=path)
    assert choice.trust is not None
    assert (choice.trust.level, choice.trust.units) == ("verified", ("GPU-fake", "GPU-other"))


def test_the_same_card_on_the_same_day_reproduces_and_verifies_nothing(path: Path) -> None:
    found = verified(path, FakeBench())
    assert words(found) == ["reproduced"] * 3
    assert {each.level for each in found.rows} == {"candidate"}


def test_a_claim_that_is_not_reproduced_is_disputed_and_gives_way(path: Path) -> None:
    winner = find(PROBLEMS[1], GPU, store_path=path).config
    found = verified(path, FakeBench(slower(winner, 1.05), unit="GPU-other"), wanted=PROBLEMS[1])
    (row,) = found.rows
    assert (row.word, row.stored.level, row.level) == ("not reproduced", "candidate", "disputed")
    assert row.here is not None
    assert row.here.ratio == pytest.approx(1.05 * row.stored.claim.ratio)
    assert find(PROBLEMS[1], GPU, store_path=path).config != winner


@pytest.mark.parametrize(("status", "word"), [("wrong", "not reproduced"), ("out_of_memory", "could not be run")])
def test_a_winner_that_fails_says_so(path: Path, status: str, word: str) -> None:
    winner = find(PROBLEMS[0], GPU, store_path=path).config

    def outcome(config: Config, number: int) -> Outcome | None:
        return Outcome(status=status, message="row 3") if config == winner else None

    (row,) = verified(path, FakeBench(unit="GPU-other", outcome=outcome), wanted=PROBLEMS[0]).rows
    assert (row.word, row.why, row.here) == (word, f"{status}: row 3", None)
    assert row.level == "candidate"
    assert (find(PROBLEMS[0], GPU, store_path=path).config == winner) == (status != "wrong")


def test_a_default_that_fails_is_no_baseline(path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        return Outcome(status="failed", message="row 3") if config == DEFAULT else None

    (row,) = verified(path, FakeBench(unit="GPU-other", outcome=outcome), wanted=PROBLEMS[0]).rows
    assert (row.word, row.why) == ("could not be run", "the default: failed: row 3")


def test_a_problem_that_does_not_fit_says_so(tmp_path: Path) -> None:
    path, large = tmp_path / "tuned.db", problem(8192)
    run(path, [large], 12)
    (row,) = verified(path, FakeBench(unit="GPU-other", unprepared="needs 900 GB")).rows
    assert (row.word, row.why) == ("could not be run", "needs 900 GB")


def test_a_final_on_a_shared_card_says_nothing(path: Path) -> None:
    class Shared(FakeBench):
        def readings(self) -> Readings:
            return Readings(contended=True)

    found = verified(path, Shared(lambda config: 1e-3, unit="GPU-other"))
    assert words(found) == ["could not be run"] * 3
    assert {each.level for each in found.rows} == {"candidate"}
    assert "shared" in found.rows[0].why


@pytest.mark.parametrize("factor", [1.0, 1.2], ids=["holds", "does not hold"])
@pytest.mark.parametrize(
    "throttle", ["power_cap", "power_brake", "hw_slowdown,power_cap", "power_brake,slow_clock", "clock_setting"]
)
def test_a_card_at_its_power_limit_gives_a_verdict(path: Path, throttle: str, factor: float) -> None:
    """Point 9: those that meet in a final have the same clock, and what was seen is said."""

    class Loaded(FakeBench):
        def readings(self) -> Readings:
            return Readings(1200.0, 700.0, 70.0, throttle, False)

    winner = find(PROBLEMS[0], GPU, store_path=path).config
    found = verified(path, Loaded(slower(winner, factor), unit="GPU-other"), wanted=PROBLEMS[0])
    assert words(found) == ["reproduced" if factor == 1 else "not reproduced"]
    assert found.rows[0].why == ""
    assert found.seen == dict.fromkeys(throttle.split(","), 1)


@pytest.mark.parametrize(
    ("throttle", "why"),
    [
        ("hw_thermal", "too hot, by the hardware's own limit"),
        ("power_cap,sw_thermal", "too hot, by the driver's limit"),
        ("slow_clock", "the clock was far below"),
        ("power_brake,slow_clock,slow_host", "times count the host"),
    ],
)
def test_what_voids_a_final_is_named(path: Path, throttle: str, why: str) -> None:
    class Slowed(FakeBench):
        def readings(self) -> Readings:
            return Readings(1200.0, 700.0, 90.0, throttle, False)

    found = verified(path, Slowed(unit="GPU-other"))
    assert words(found) == ["could not be run"] * 3
    assert all(each.why.startswith("the times say nothing") and why in each.why for each in found.rows)
    assert {each.level for each in found.rows} == {"candidate"}


def test_times_that_scatter_say_nothing(path: Path) -> None:
    class Loud(FakeBench):
        def finals(self, problem: Problem, configs: Any, *rest: Any) -> dict[Config, list[float]]:
            rounds = super().finals(problem, configs, *rest)
            return {
                each: [time * (1 + number / 10 * (each != DEFAULT)) for number, time in enumerate(times)]
                for each, times in rounds.items()
            }

    found = verified(path, Loud(unit="GPU-other"))
    assert words(found) == ["could not be run"] * 3
    assert "scatter" in found.rows[0].why
    assert {each.level for each in found.rows} == {"candidate"}


def test_a_config_that_costs_its_workers_is_blamed_and_the_others_go_on(path: Path) -> None:
    winner = find(PROBLEMS[0], GPU, store_path=path).config
    there = [find(each, GPU, store_path=path).config for each in PROBLEMS].count(winner)

    class Fragile(FakeBench):
        def attempt(self, problem: Problem, config: Config, *rest: Any) -> Outcome:
            if (problem, config) == (PROBLEMS[0], winner):
                raise DeviceLostError("the card fell off the bus")
            return super().attempt(problem, config, *rest)

    found = verified(path, Fragile(unit="GPU-other"))
    by_problem = {each.stored.problem: each for each in found.rows}
    assert by_problem[PROBLEMS[0]].word == "not reproduced"
    assert "illegal_access" in by_problem[PROBLEMS[0]].why
    assert words(found).count("reproduced") >= 3 - there


def test_a_device_that_can_not_be_opened_ends_the_run_with_a_reason(path: Path) -> None:
    bench = ShutBench(unit="GPU-other")
    found = verified(path, bench)
    assert bench.opened == supervisor.IDLE_DEATHS
    assert "no memory for a context" in found.stopped
    assert words(found) == ["could not be run"] * 3
    assert all("no memory for a context" in each.why for each in found.rows)


def test_ctrl_c_keeps_what_was_measured(path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)
        return None

    bench = FakeBench(unit="GPU-other", outcome=outcome)
    found = verified(path, bench)
    assert found.interrupted
    assert len(rows_of(path, found.session)) == len(bench.attempts) < 6
    assert set(words(found)) == {"could not be run"}
    assert found.rows[-1].why == "interrupted"


def test_two_cards_share_the_winners(path: Path) -> None:
    benches = FakeBench(unit="GPU-b"), FakeBench(unit="GPU-c")
    assert words(verified(path, *benches)) == ["reproduced"] * 3
    assert all(bench.finalists for bench in benches)


def test_the_draw_follows_the_seed(path: Path) -> None:
    drawn = [[each.problem for each in winners(path, GPU, 2, seed)] for seed in (*range(20), *range(20))]
    assert drawn[:20] == drawn[20:]
    assert len({tuple(each) for each in drawn}) > 3
    assert all(len(set(each)) == 2 for each in drawn)


def test_only_claims_that_can_be_verified_are_drawn(path: Path) -> None:
    """Not the default, not an older source, not a claim against another default, not one of another GPU."""
    with Store.open(path, readonly=True) as store:
        rows = store.measurements(problem=PROBLEMS[0], stage="final")
    winner = find(PROBLEMS[0], GPU, store_path=path).measurement
    assert winner is not None
    default = next(each for each in rows if each.config == DEFAULT)

    def database(name: str, *made: Measurement) -> Path:
        other = path.with_name(f"{name}.db")
        with Store.open(other) as store:
            store.add(dataclasses.replace(each, id=new_id()) for each in made)
        return other

    old, h100 = "0" * 64, gpu_by_alias("h100")
    assert len(winners(database("both", winner, default), GPU, 20, 0)) == 1
    assert len(winners(database("alone", winner), GPU, 20, 0)) == 1
    for name, *made in (
        ("default", default),
        ("older", dataclasses.replace(winner, source_digest=old), default),
        ("another", winner, dataclasses.replace(default, source_digest=old)),
        ("measure", dataclasses.replace(winner, stage="measure"), default),
        ("elsewhere", dataclasses.replace(winner, gpu_key=h100.key, gpu_name=h100.name)),
    ):
        with pytest.raises(InvalidInput, match="nothing to verify"):
            winners(database(name, *made), GPU, 20, 0)
