"""`import flashtune` costs next to nothing, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashtune

HEAVY = ("cupy", "torch", "optuna", "sqlalchemy", "alembic", "numpy", "jinja2", "click", "rich")


def run(code: str) -> str:
    """What a new Python process prints."""
    environment = os.environ | {"PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str) -> set[str]:
    printed = run(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    return {name.partition(".")[0] for name in json.loads(printed.splitlines()[-1])}


def test_import_loads_nothing_heavy() -> None:
    assert not loaded_by("import flashtune").intersection(HEAVY)


def test_import_is_quick() -> None:
    """The best of five: other processes may disturb any one."""
    code = "import time; start = time.perf_counter(); import flashtune; print(time.perf_counter() - start)"
    assert min(float(run(code)) for _ in range(5)) < 0.3


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("from flashtune import attention", ("cupy", "torch", "optuna", "sqlalchemy", "numpy")),
        ("from flashtune import errors, Problem", ("cupy", "torch", "optuna", "sqlalchemy", "numpy")),
        (
            "import numpy; from flashtune import attention; q = numpy.ones((1, 2, 1, 8), 'f'); attention(q, q, q)",
            ("cupy", "torch", "optuna", "sqlalchemy"),
        ),
        (
            "import flashtune; flashtune.plan(flashtune.Problem(dtype='float16', head_dim=64, batch=1, seqlen_q=8, "
            "seqlen_k=8, num_heads=1, num_heads_kv=1), 'h100')",
            ("cupy", "torch", "optuna"),
        ),
    ],
    ids=["attention", "values", "numpy", "plan"],
)
def test_what_is_not_needed_is_not_loaded(code: str, absent: tuple[str, ...]) -> None:
    assert not loaded_by(code).intersection(absent)
