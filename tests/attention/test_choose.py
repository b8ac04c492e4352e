"""What a call launches where its first choice can't be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashtune.call.choose import plan_for
from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.plan.plan import Plan
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import CompileError
from flashtune.tuned_db.lookup.captured import Captured, read_captured
from flashtune.tuned_db.lookup.lookup import find

LONG = Problem(dtype="bfloat16", head_dim=128, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads=16, num_heads_kv=16)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flashtune.call.choose._warned", False)
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "none.db"))


def loaded_unless(*families: str) -> list[str]:
    """Families in the order in which they were tried."""
    tried: list[str] = []

    def load(plan: Plan) -> Plan:
        tried.append(plan.family)
        if plan.family in families:
            raise CompileError(f"{plan.family} is broken")
        return plan

    plan_for(LONG, gpu_by_alias("h200"), None, load)
    return tried


def test_a_tuned_config_is_launched() -> None:
    assert loaded_unless() == ["sm90_fwd"]


def test_the_next_family_serves_where_one_is_broken() -> None:
    with pytest.warns(RuntimeWarning, match="sm90_fwd is broken"):
        *broken, last = loaded_unless("sm90_fwd")
    assert set(broken) == {"sm90_fwd"}
    assert last == "sm80_fwd"


def test_the_last_error_is_told_where_all_are() -> None:
    with pytest.warns(RuntimeWarning), pytest.raises(CompileError, match="fma_fwd is broken"):
        loaded_unless("sm90_fwd", "sm80_fwd", "fma_fwd")


def captured_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: Problem, config: Config | None
) -> list[Captured]:
    path = tmp_path / f"{problem.seqlen_q}.jsonl"
    monkeypatch.setenv("FLASHTUNE_CAPTURE", str(path))
    plan_for(problem, gpu_by_alias("h200"), config, lambda plan: plan)
    return read_captured(path)[0] if path.exists() else []


def test_a_problem_without_a_tuned_config_of_its_own_is_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = gpu_by_alias("h200")
    untuned = replace(LONG, seqlen_q=4095, seqlen_k=4095)
    assert find(untuned, gpu).level != "exact"
    assert captured_of(monkeypatch, tmp_path, untuned, None) == [Captured(gpu.key, untuned, 1)]


def test_a_tuned_problem_and_a_config_of_the_caller_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "flashtune.call.choose.find", lambda *_: replace(find(LONG, gpu_by_alias("h200")), level="exact")
    )
    assert captured_of(monkeypatch, tmp_path, LONG, None) == []
    untuned = replace(LONG, seqlen_q=4094, seqlen_k=4094)
    assert captured_of(monkeypatch, tmp_path, untuned, default_config(untuned, gpu_by_alias("h200"))) == []
