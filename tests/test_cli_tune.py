"""`flashtune tune`: problems, clusters, budgets and one config for all. The tuner itself is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_tuner import H100, ONE, TWO, Tuner, call

from flashtune.cli.main import main
from flashtune.codegen.families.registry import default_config
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.commands import one_config
from flashtune.tuner.commands.one_config import Shared
from flashtune.tuner.results.budget import EFFORTS, parse_budget
from flashtune.tuner.results.report import Report
from flashtune.tuner.tune import session

pytestmark = pytest.mark.usefixtures("tuner")


# Problems from a file


def test_problems_of_a_file_are_tuned_in_their_order(tmp_path: Path, tuner: Tuner) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '[{"seqlen": 512, "heads": 4, "head_dim": 64, "causal": true}, {"seqlen": 256, "heads": 4, "head_dim": 64}]'
    )
    call("--problems", str(path))
    assert tuner.problems == [TWO, ONE]


def test_a_bad_file_is_one_line_and_nothing_is_tuned(tmp_path: Path, tuner: Tuner) -> None:
    path = tmp_path / "mine.json"
    path.write_text('[{"seqlen": 512, "heads": 4, "head_dim": 64}, {"seqlen": 0, "heads": 4, "head_dim": 64}]')
    output = call("--problems", str(path), code=1).output
    assert output == f"Error: {path}, problem 2 of 2: seqlen_q=0 must be at least 1\n"
    assert not tuner.asked
    assert not (tmp_path / "tuned.db").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problems", "/nowhere.json"], "'/nowhere.json' does not exist"),
        (["--problems", "/"], "is a directory"),
        (["--problems", __file__, "--preset", "quick"], "give --preset or --problems, not both"),
        (["--problems", __file__, "--captured"], "give --problems or --captured, not both"),
        (["--captured", "--heads", "4"], "give --captured or the flags of one problem, not both"),
        (["--captured", "--preset", "x", "--heads", "4"], "give one of --preset, --captured, the flags of one problem"),
        (["--effort", "huge"], "'huge' is not one of 'quick', 'normal', 'full'"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_misuse_exits_with_2(arguments: list[str], message: str, tuner: Tuner) -> None:
    assert message in call(*arguments, code=2).output
    assert not tuner.asked


# Where it is measured


def test_a_cluster_is_asked_for_by_its_address(tuner: Tuner, capsys: pytest.CaptureFixture[str]) -> None:
    call("--ray", "head:6379", "--seqlen", "512", "--heads", "4", "--head-dim", "64")
    (asked,) = tuner.asked
    assert (asked["ray"], asked["devices"], asked["mode"]) == ("head:6379", None, "auto")


def test_what_ray_prints_is_no_part_of_the_report(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(*arguments: Any, **options: Any) -> Report:
        print("(raylet) A worker died")
        return tuner(*arguments, **options)

    monkeypatch.setattr(session, "tune", noisy)
    result = call("--ray", "auto", "--json", "--seqlen", "512", "--heads", "4", "--head-dim", "64")
    assert len(json.loads(result.stdout)["problems"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100", "--ray", "auto", "--devices", "0"], "--devices are those of this machine"),
        (["--ray", "auto"], "--ray needs --gpu"),
    ],
)
def test_a_cluster_that_can_not_be_asked_is_a_usage_error(arguments: list[str], message: str, tuner: Tuner) -> None:
    result = CliRunner().invoke(main, ["tune", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert not tuner.asked


# Budgets by name


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        ([], "120s"),
        (["--effort", "quick"], EFFORTS["quick"]),
        (["--effort", "full"], EFFORTS["full"]),
        (["--effort", "full", "--budget", "7"], "7"),
    ],
    ids=str,
)
def test_an_effort_is_a_budget_and_an_explicit_budget_wins(arguments: list[str], budget: str, tuner: Tuner) -> None:
    call(*arguments)
    assert tuner.asked[0]["budget"] == parse_budget(budget)


def test_help_says_what_each_effort_means() -> None:
    output = " ".join(call("--help").output.split())
    assert all(f"{name} ({text})" in output for name, text in EFFORTS.items())


def test_efforts_grow_and_are_budgets_by_name_in_python_too() -> None:
    seconds = [parse_budget(name).seconds or 0.0 for name in ("quick", "normal", "full")]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


# One config for all
LONGER = ["--problems", "mine.json", "--shared-config"]


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text(
        '[{"seqlen": 256, "heads": 4, "head_dim": 64}, {"seqlen": 1024, "heads": 4, "head_dim": 64}]'
    )
    Store.open(tmp_path / "tuned.db")


@pytest.mark.usefixtures("shapes")
def test_the_shared_config_is_named_with_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Shared(config=default_config(ONE, H100), ratio=1.05, worst=ONE, worst_ratio=1.1, considered=9)
    monkeypatch.setattr(one_config, "shared_config", lambda *_, **__: found)
    output = call(*LONGER).stdout
    assert f"One config for all: {found.config.family} " in output
    assert f"1.050 of each problem's best time in the geometric mean, 1.100 at worst ({ONE}); of 9 known" in output
    document = json.loads(call(*LONGER, "--json").stdout)["shared_config"]
    assert document.pop("config")["family"] == found.config.family
    assert document == {"ratio": 1.05, "worst": str(ONE), "worst_ratio": 1.1, "considered": 9}


@pytest.mark.usefixtures("shapes")
def test_where_no_config_is_known_for_all_that_is_said() -> None:
    result = call(*LONGER, "--json")
    assert json.loads(result.stdout)["shared_config"] is None
    assert "No config is known for all of the problems yet" in result.stderr


def test_problems_that_one_kernel_can_not_serve_share_nothing(tuner: Tuner) -> None:
    output = call("--preset", "quick", "--shared-config", code=1).output
    assert output.startswith("Error: a shared config needs problems that one kernel serves")
    assert output.count("\n") == 1
    assert not tuner.asked
