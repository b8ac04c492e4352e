"""`attention()` beside a tuning database that can't be used, or holds nothing for this GPU: the result is right."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_files import a_directory, cut_in_half, emptied, random_bytes

from flashtune import attention
from flashtune.call.arrays import forget
from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.codegen.problem.reference import tiled_attention
from flashtune.tuned_db.lookup import lookup
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.records.measurement import Measurement, new_id, now
from flashtune.tuned_db.store.store import Store

PROBLEM = Problem(dtype="float16", head_dim=16, batch=2, seqlen_q=5, seqlen_k=7, num_heads=4, num_heads_kv=2)
H100 = gpu_by_alias("h100")
DEFAULT = default_config(PROBLEM, H100)
TUNED = replace(DEFAULT, block_n=16 if DEFAULT.to_json()["block_n"] != 16 else 32)


@pytest.fixture
def path(tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where attention() looks; it has not warned yet."""
    monkeypatch.setattr(lookup, "_warned", threading.Lock())
    return tmp_path / "tuned.db"


def tuned(path: Path, gpu: Gpu) -> None:
    """Makes `TUNED` the winner on ``gpu``."""
    row = Measurement(
        id=new_id(), created=now(), session=new_id(), problem=PROBLEM, gpu_key=gpu.key, gpu_name=gpu.name,
        config=TUNED, source_digest=source_digest(PROBLEM.spec, TUNED), status="ok", stage="final", median_us=1.0,
        samples=20, baseline_us=2.0,
    )  # fmt: skip
    with Store.open(path) as store:
        store.record(row)


def launched(fakes: Any) -> Config:
    """What a call launches, whose result must be right."""
    forget()
    q = fakes.random(2, 5, 4, 16, seed=1)
    k, v = fakes.random(2, 7, 2, 16, seed=2), fakes.random(2, 7, 2, 16, seed=3)
    want, _ = tiled_attention(*(np.ascontiguousarray(each.host) for each in (q, k, v)))
    np.testing.assert_array_equal(attention(q, k, v).host, want)
    config: Config = fakes.layer.launches[-1].plan.config
    return config


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("breaks", [random_bytes, cut_in_half, emptied, a_directory, newer])
def test_a_database_that_is_of_no_use_costs_one_warning(
    fakes: Any, path: Path, breaks: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """D73, and D75 where it is of a newer version."""
    tuned(path, H100)
    assert launched(fakes) == TUNED != DEFAULT
    breaks(path)
    before = path.read_bytes() if path.is_file() else None
    for _ in range(3):
        assert launched(fakes) == DEFAULT
    (warning,) = caplog.records
    assert str(path) in warning.getMessage()
    assert (path.read_bytes() if path.is_file() else None) == before


def test_entries_for_another_gpu_are_no_hit(fakes: Any, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D80. Why there is none, `flashtune db check` says: tests/test_cli_db_keep.py."""
    tuned(path, gpu_by_alias("a100"))
    assert launched(fakes) == DEFAULT
    assert not caplog.records
