"""`flashtune tune`: where problems come from, efforts, the JSON report and exit codes. The tuner itself is replaced."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from flashtune.cli import main
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.codegen.model import default_config
from flashtune.codegen.problem import Problem
from flashtune.tuned_db import lookup
from flashtune.tuned_db.captured import capture
from flashtune.tuned_db.records import Choice
from flashtune.tuned_db.store import Store
from flashtune.tuner import session, shared
from flashtune.tuner.budget import EFFORTS, parse_budget
from flashtune.tuner.report import Progress, Report, Row
from flashtune.tuner.shared import Shared

H100 = gpu_by_alias("h100")
ONE = Problem(dtype="bfloat16", head_dim=64, batch=1, seqlen_q=256, seqlen_k=256, num_heads=4, num_heads_kv=4)
TWO = replace(ONE, seqlen_q=512, seqlen_k=512, causal=True)
REAL_TUNE = session.tune


class Tuner:
    """Stands in for `tuner.session.tune`: keeps what it was asked, and reports the default for each problem."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.changes: dict[str, Any] = {}

    def __call__(self, problems: list[Problem], gpu: Any, **options: Any) -> Report:
        self.asked.append({"problems": list(problems), **options})
        options["progress"](Progress(0.5, "half of it"))
        rows = tuple(
            Row(problem=each, config=default_config(each, H100), seconds=1e-3, ratio=0.9, tried=3) for each in problems
        )
        made = Report(gpu=H100, measured=True, rows=rows, session="s", seconds=2.0, rejected=Counter(big=7))
        return replace(made, **self.changes)

    @property
    def problems(self) -> list[Problem]:
        (once,) = self.asked
        return list(once["problems"])


@pytest.fixture(autouse=True)
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHTUNE_CAPTURE", raising=False)
    made = Tuner()
    monkeypatch.setattr(session, "tune", made)
    return made


def call(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["tune", "--gpu", "h100", *arguments])
    assert result.exit_code == code, result.output
    return result


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


# The JSON report


def test_json_is_all_that_is_on_stdout_and_has_the_documented_keys(tmp_path: Path) -> None:
    from flashtune import _cli_json

    result = call("--json", "--seqlen", "256", "--heads", "4", "--head-dim", "64")
    document = json.loads(result.stdout)
    assert "half of it" in result.stderr
    documented = _cli_json.report_json.__doc__ or ""
    for key in [*document, *document["problems"][0]]:
        assert f"``{key}``" in documented, f"{key} is not documented"
    assert set(document) == {
        "schema", "gpu", "measured", "session", "database", "seconds", "tried", "interrupted", "stopped", "note",
        "rejected", "failed", "blocklisted", "flagged", "problems", "captured",
        "shared_config",
    }  # fmt: skip
    assert document["schema"] == "flashtune-report/1"
    assert document["gpu"] == {"name": H100.name, "key": H100.key}
    assert document["database"] == str(tmp_path / "tuned.db")
    assert (document["tried"], document["rejected"], document["captured"]) == (3, {"big": 7}, None)
    (row,) = document["problems"]
    assert Problem(**row["problem"]) == ONE
    config = default_config(ONE, H100)
    assert row["config"]["family"] == config.family
    assert type(config)(**row["config"]["parameters"]) == config
    assert (row["seconds"], row["ratio"], row["next_best"]) == (1e-3, 0.9, None)


@pytest.mark.parametrize(("changes", "code"), [({"interrupted": True}, 130), ({"stopped": "no device"}, 1)], ids=str)
@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "tables"])
def test_exit_codes_are_the_same_with_json(
    arguments: list[str], changes: dict[str, Any], code: int, tuner: Tuner
) -> None:
    tuner.changes = changes
    result = call(*arguments, code=code)
    if arguments:
        assert json.loads(result.stdout).items() >= changes.items()


@pytest.mark.parametrize(
    "place",
    [
        "problem_file.read_problem_file",
        "budget.parse_budget",
        "session.locate",
        "session.strategy",
        "session.Store.open",
        "session.ProcessBuilder",
        "session.predict_problems",
    ],
)
def test_ctrl_c_before_there_is_a_report_is_a_document_with_all_keys(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    path.write_text('[{"seqlen": 256, "heads": 4, "head_dim": 64}]')
    arguments = ["--problems", str(path), "--mode", "predict", "--json"]
    complete = json.loads(call(*arguments).stdout)

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session, "tune", REAL_TUNE)
    monkeypatch.setattr(f"flashtune.tuner.{place}", interrupt)
    result = call(*arguments, code=130)
    document = json.loads(result.stdout)
    assert document["interrupted"] is True
    assert list(document) == list(complete)
    assert list(document["gpu"]) == list(complete["gpu"])
    assert (document["schema"], document["database"]) == (complete["schema"], complete["database"])
    if place == "problem_file.read_problem_file":
        assert document["problems"] == []
    else:
        (row,), (normal,) = document["problems"], complete["problems"]
        assert list(row) == list(normal)
        assert (row["problem"], row["config"]) == (normal["problem"], None)
    assert result.stderr.endswith("Interrupted.\n")


def test_ctrl_c_while_the_document_is_written_adds_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = click.echo

    def interrupted(message: Any = None, *rest: Any, **options: Any) -> None:
        echo(message, *rest, **options)
        if str(message).startswith("{"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(click, "echo", interrupted)
    json.loads(call("--json", code=130).stdout)


def test_an_error_leaves_stdout_empty(tuner: Tuner) -> None:
    result = call("--json", "--budget", "soon", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: budget='soon'")


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
    monkeypatch.setattr(shared, "shared_config", lambda *_, **__: found)
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


# Captured problems


@pytest.fixture
def captured_problems(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem], None]:
    """ONE and TWO were captured for the H100, ONE for another GPU too. Call it to say that a problem is tuned."""
    from flashtune.tuned_db import captured

    monkeypatch.setenv("FLASHTUNE_CAPTURE", "1")
    monkeypatch.setattr(captured, "_written", set())
    capture(ONE, H100.key)
    capture(TWO, H100.key)
    capture(ONE, gpu_by_alias("a100").key)
    tuned: set[Problem] = set()

    def find(problem: Problem, gpu: Any, store_path: Any = None) -> Choice:
        level: Any = "exact" if problem in tuned else "predicted"
        return Choice(config=default_config(problem, gpu), level=level, evidence="")

    monkeypatch.setattr(lookup, "find", find)
    return tuned.add


def test_captured_problems_of_this_gpu_are_tuned_and_the_rest_is_named(
    captured_problems: Callable[[Problem], None], tuner: Tuner
) -> None:
    output = call("--captured").output
    assert set(tuner.problems) == {ONE, TWO}
    assert "Captured for h100-sxm: 2 problems, 0 of them tuned, 2 left without a measurement:" in output
    assert f"{ONE} (asked for by 1 process)" in output
    assert f"Captured for other GPUs: 1 for {gpu_by_alias('a100').key}" in output


def test_captured_problems_are_measured_on_a_cluster(
    captured_problems: Callable[[Problem], None], tuner: Tuner
) -> None:
    assert json.loads(call("--captured", "--ray", "auto", "--json").stdout)["measured"]
    assert set(tuner.problems) == {ONE, TWO}


def test_what_is_tuned_is_not_tuned_again(captured_problems: Callable[[Problem], None], tuner: Tuner) -> None:
    captured_problems(ONE)
    document = json.loads(call("--captured", "--json").stdout)["captured"]
    assert tuner.problems == [TWO]
    assert document["tuned"] == 1
    assert [each["name"] for each in document["left"]] == [str(TWO)]
    assert [Problem(**each["problem"]) for each in document["left"]] == [TWO]
    assert document["other_gpus"] == {gpu_by_alias("a100").key: 1}
    assert document["unreadable_lines"] == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_where_all_is_tuned_nothing_runs(
    captured_problems: Callable[[Problem], None], tuner: Tuner, as_json: bool
) -> None:
    captured_problems(ONE)
    captured_problems(TWO)
    result = call("--captured", *(["--json"] if as_json else []))
    assert not tuner.asked
    if as_json:
        assert json.loads(result.stdout)["problems"] == []
    else:
        assert "2 problems, 2 of them tuned." in result.stdout


def test_a_problem_that_the_family_does_not_serve_is_passed_over(
    captured_problems: Callable[[Problem], None], tuner: Tuner
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
