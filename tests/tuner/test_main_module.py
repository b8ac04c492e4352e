"""F11: worker processes need nothing of the program that calls tune(), whatever that is, and don't run it again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import get_context, spawn
from pathlib import Path

import pytest

import flashtune
from flashtune.tuner.processes.process import Child

PROGRAM = """
print("begun", flush=True)
import slow_compiler
from flashtune.codegen.compiler.render import Source
from flashtune.tuner.processes import compile_pool as build
build.build = slow_compiler.build
builder = build.ProcessBuilder("sm_90a", 1)
print(builder.submit(Source("0", "int x;")).result(300).error or "compiled", flush=True)
builder.close()
"""
"""A program that starts a worker, with no guard around anything."""
TUNE = """
import flashtune
problem = flashtune.Problem(
    dtype="float16", head_dim=32, batch=1, seqlen_q=64, seqlen_k=64, num_heads=2, num_heads_kv=2
)
report = flashtune.tune(problem, "a100", mode="predict", budget="1", families=["fma_fwd"])
print(report.tried, report.failed.total(), report.rows[0].config is not None)
"""


def python(*arguments: str, folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    paths = [Path(flashtune.__file__).parents[1], Path(__file__).parent, folder]
    return subprocess.run(
        [sys.executable, *arguments], input=given, capture_output=True, text=True, check=False, cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "FLASHTUNE_DB": str(folder / "tuned.db"),
            "FLASHTUNE_CACHE_DIR": str(folder / "cache"),
        },
    )  # fmt: skip


@pytest.mark.parametrize("how", ["input", "interactive", "command", "file", "module", "package", "deleted"])
def test_a_program_of_any_kind_starts_workers_and_runs_once(tmp_path: Path, how: str) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "gone.py").write_text(f"import os; os.unlink(__file__)\n{PROGRAM}")
    done = {
        "input": lambda: python("-", folder=tmp_path, given=PROGRAM),
        "interactive": lambda: python("-i", "-q", folder=tmp_path, given=PROGRAM),
        "command": lambda: python("-c", PROGRAM, folder=tmp_path),
        "file": lambda: python("mine.py", folder=tmp_path),
        "module": lambda: python("-m", "mine", folder=tmp_path),
        "package": lambda: python("-m", "package", folder=tmp_path),
        "deleted": lambda: python("gone.py", folder=tmp_path),
    }[how]()
    assert (done.stdout, done.returncode) == ("begun\ncompiled\n", 0), done.stderr
    assert "Error" not in done.stderr


@pytest.mark.nvrtc
@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__":'])
def test_tune_from_a_script_on_standard_input(tmp_path: Path, guard: str) -> None:
    program = f"{guard}\n" + "\n".join(f"    {line}" for line in TUNE.splitlines()) if guard else TUNE
    done = python("-", folder=tmp_path, given=program)
    assert done.stdout == "1 0 True\n", done.stderr


def told(connection: object) -> None:
    """What a child process has for a main module."""
    connection.send(getattr(sys.modules["__main__"], "__file__", "none"))  # type: ignore[attr-defined]


def test_other_processes_of_the_program_still_have_its_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed for a process that another thread starts at the same moment, nor afterwards."""
    prepare, main = spawn.get_preparation_data, sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "/the/script.py", raising=False)
    seen: list[dict[str, object]] = []

    def in_another_thread(*_: object) -> None:
        thread = threading.Thread(target=lambda: seen.append(spawn.get_preparation_data("another")))
        thread.start()
        thread.join()
        seen.append(spawn.get_preparation_data("ours"))
        raise OSError("enough")

    monkeypatch.setattr(get_context("spawn").Process, "start", in_another_thread)
    with pytest.raises(OSError, match="enough"):
        Child("ours", told)
    another, ours = seen
    assert another["init_main_from_path"] == "/the/script.py"
    assert not {"init_main_from_path", "init_main_from_name"} & set(ours)
    assert spawn.get_preparation_data is prepare
