"""`flashtune tune --captured`: which problems are tuned, and what is said of the rest. The tuner itself is replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_tuner import H100, ONE, TWO, Tuner, call

from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.settings import database_path
from flashtune.tuned_db.lookup import lookup
from flashtune.tuned_db.lookup.captured import capture
from flashtune.tuned_db.records.measurement import Choice

pytestmark = pytest.mark.usefixtures("tuner")


@pytest.fixture
def captured_problems(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """ONE and TWO were captured for the H100, ONE for another GPU too. Call it to say that a problem is tuned, in the
    database of the settings or in another one."""
    from flashtune.tuned_db.lookup import captured

    monkeypatch.setenv("FLASHTUNE_CAPTURE", "1")
    monkeypatch.setattr(captured, "_written", set())
    capture(ONE, H100.key)
    capture(TWO, H100.key)
    capture(ONE, gpu_by_alias("a100").key)
    tuned: set[tuple[Problem, Path]] = set()

    def find(problem: Problem, gpu: Any, store_path: Path | None = None) -> Choice:
        level: Any = "exact" if (problem, store_path or database_path()) in tuned else "predicted"
        return Choice(config=default_config(problem, gpu), level=level, evidence="")

    monkeypatch.setattr(lookup, "find", find)
    return lambda problem, database=None: tuned.add((problem, database or database_path()))


def test_captured_problems_of_this_gpu_are_tuned_and_the_rest_is_named(
    captured_problems: Callable[..., None], tuner: Tuner
) -> None:
    output = call("--captured").output
    assert set(tuner.problems) == {ONE, TWO}
    assert "Captured for h100-sxm: 2 problems, 0 of them tuned, 2 left without a measurement:" in output
    assert f"{ONE} (asked for by 1 process)" in output
    assert f"Captured for other GPUs: 1 for {gpu_by_alias('a100').key}" in output


def test_captured_problems_are_measured_on_a_cluster(captured_problems: Callable[..., None], tuner: Tuner) -> None:
    assert json.loads(call("--captured", "--ray", "auto", "--json").stdout)["measured"]
    assert set(tuner.problems) == {ONE, TWO}


def test_what_is_tuned_is_not_tuned_again(captured_problems: Callable[..., None], tuner: Tuner) -> None:
    captured_problems(ONE)
    document = json.loads(call("--captured", "--json").stdout)["captured"]
    assert tuner.problems == [TWO]
    assert document["tuned"] == 1
    assert [each["name"] for each in document["left"]] == [str(TWO)]
    assert [Problem(**each["problem"]) for each in document["left"]] == [TWO]
    assert document["other_gpus"] == {gpu_by_alias("a100").key: 1}
    assert document["unreadable_lines"] == 0


def test_what_counts_as_tuned_is_tuned_in_the_database_that_is_named(
    captured_problems: Callable[..., None], tuner: Tuner, tmp_path: Path
) -> None:
    """A hole in the tests: a fake that answered for any database let the one of the settings be asked instead."""
    captured_problems(ONE)
    captured_problems(TWO, tmp_path / "other.db")
    call("--captured", "--db", str(tmp_path / "other.db"))
    assert tuner.problems == [ONE]
    tuner.asked.clear()
    call("--captured")
    assert tuner.problems == [TWO]


@pytest.mark.parametrize("as_json", [False, True])
def test_where_all_is_tuned_nothing_runs(captured_problems: Callable[..., None], tuner: Tuner, as_json: bool) -> None:
    captured_problems(ONE)
    captured_problems(TWO)
    result = call("--captured", *(["--json"] if as_json else []))
    assert not tuner.asked
    if as_json:
        assert json.loads(result.stdout)["problems"] == []
    else:
        assert "2 problems, 2 of them tuned." in result.stdout


def test_a_problem_that_the_family_does_not_serve_is_passed_over(
    captured_problems: Callable[..., None], tuner: Tuner
) -> None:
    output = call("--captured", "--family", "sm80_fwd").output
    assert len(tuner.problems) == 2
    assert "2 problems" in output
    capture(replace(ONE, dtype="float32"), H100.key)
    tuner.asked.clear()
    call("--captured", "--family", "sm80_fwd")
    assert len(tuner.problems) == 2


def test_nothing_captured_says_what_to_do() -> None:
    output = call("--captured", code=1).output
    assert output.startswith("Error: nothing was captured in ")
    assert output.count("\n") == 1
