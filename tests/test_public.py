"""`plan`, `explain`, `compile` and `tune` as the package offers them, with no GPU at hand."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashtune
from flashtune import api
from flashtune.call import arrays, attention
from flashtune.codegen.gpu.devices import missing_device
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import InvalidType, MissingDependency, NoGpu, UnknownGpu, UnsupportedProblem

PROBLEM = flashtune.Problem(
    dtype="float16", head_dim=64, batch=1, seqlen_q=128, seqlen_k=128, num_heads=8, num_heads_kv=8, causal=True
)


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))


def test_plan_and_explain_agree() -> None:
    for gpu in ("t4", "a100", "h100", gpu_by_alias("rtx 4090")):
        plan, choice = flashtune.plan(PROBLEM, gpu), flashtune.explain(PROBLEM, gpu)
        assert plan.problem == PROBLEM
        assert (plan.family, plan.config) == (choice.family, choice.config)
        assert choice.level in str(choice).replace(" ", "_")


@pytest.mark.nvrtc
def test_compile_fills_the_disk_cache(tmp_path: Path) -> None:
    (built,) = flashtune.compile(PROBLEM, "h100")
    assert built.arch.startswith("sm_90")
    assert built.registers > 0
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    (again,) = flashtune.compile(PROBLEM, "h100")
    assert again.cubin == built.cubin


@pytest.mark.parametrize("name", ["plan", "explain", "compile"])
class TestRefusals:
    def test_no_device(self, name: str) -> None:
        if missing_device() is None:
            pytest.skip("there is a CUDA device")
        with pytest.raises((NoGpu, MissingDependency)) as caught:
            getattr(flashtune, name)(PROBLEM)
        assert str(caught.value)

    def test_gpu(self, name: str) -> None:
        call = getattr(flashtune, name)
        with pytest.raises(UnknownGpu, match=r"'h1000' is not known\..* Known: .*h100"):
            call(PROBLEM, "h1000")
        with pytest.raises(InvalidType, match="gpu is a int, it must be a Gpu, an alias such as 'h100', or None"):
            call(PROBLEM, 0)

    def test_problem(self, name: str) -> None:
        with pytest.raises(InvalidType, match=r"problem is a dict, it must be a flashtune.Problem"):
            getattr(flashtune, name)({"dtype": "float16"}, "h100")

    def test_unsupported(self, name: str) -> None:
        wide = flashtune.Problem(
            dtype="float16", head_dim=260, batch=1, seqlen_q=1, seqlen_k=1, num_heads=1, num_heads_kv=1, alignment=2
        )
        with pytest.raises(UnsupportedProblem, match=r"head_dim=260.*8 to 256"):
            getattr(flashtune, name)(wide, "h100")


def test_tune_takes_one_problem_or_several_and_forgets_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.tuner.tune import session

    calls: list[Any] = []
    forgotten: list[bool] = []

    def run(problems: Any, gpu: Any, **options: Any) -> str:
        calls.append((problems, gpu, options["budget"]))
        return "report"

    monkeypatch.setattr(session, "tune", run)
    monkeypatch.setattr(api, "forget", lambda: forgotten.append(True))
    assert flashtune.tune(PROBLEM, "h100", budget="3") == "report"
    assert flashtune.tune([PROBLEM, PROBLEM]) == "report"
    assert calls == [([PROBLEM], "h100", "3"), ([PROBLEM, PROBLEM], None, "120s")]
    assert forgotten == [True, True]
    for wrong, words in (
        ({"problems": ["float16"]}, "problem is a str"),
        ({"problems": "float16"}, "problem is a str"),
        ({"problems": None}, "problem is a NoneType"),
        ({"gpu": 3}, "gpu is a int, it must be a Gpu"),
        ({"budget": None}, "budget=None must be a Budget, a time such as"),
        ({"budget": 20}, "budget=20 must be a Budget"),
        ({"seed": "x"}, "seed='x' must be an int"),
        ({"families": "sm80_fwd"}, r"families='sm80_fwd' must be a collection of names, such as \['sm80_fwd'\]"),
    ):
        arguments: dict[str, Any] = {"problems": PROBLEM, "gpu": "h100"} | wrong
        with pytest.raises(InvalidType, match=words):
            flashtune.tune(**arguments)
    assert len(calls) == 2


@pytest.mark.parametrize("module", [attention, api], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_an_object_that_is_no_array_does_not_replace_its_library() -> None:
    """A new kind would have forgotten every call, and `tune` would not reach the old one to make it forget."""
    q = np.ones((1, 2, 1, 8), np.float16)
    flashtune.attention(q, q, q)
    kind = arrays.kinds[np.ndarray]
    with pytest.raises(InvalidType, match=r"q is a numpy\.float16"):
        flashtune.attention(np.float16(1), q, q)
    assert arrays.kinds[np.ndarray] is kind


def test_a_kind_can_be_taken_out_again() -> None:
    """The door by which tests, and other array libraries, come in."""

    class Mine: ...

    class Kind(arrays.ArrayKind):
        name = "Mine"
        types = (Mine,)

        def call(self, q: Any, k: Any, v: Any, out: Any, options: Any) -> Any:
            return options

        def facts(self, name: str, array: Any) -> Any:
            raise NotImplementedError

    class Derived(Mine): ...

    kind = Kind()
    arrays.register(kind)
    for each in (Mine(), Derived()):
        assert flashtune.attention(each, None, None, causal=True) == (True, None, False, "bshd", None)
    arrays.unregister(kind)
    for each in (Mine(), Derived()):
        with pytest.raises(InvalidType, match="Accepted: CuPy arrays, torch CUDA tensors and NumPy arrays"):
            flashtune.attention(each, None, None)
