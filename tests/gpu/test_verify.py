"""Claims of a database are reproduced on the card that made them, by worker processes on the real device."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashtune.codegen.device import require_device
from flashtune.codegen.model import default_config
from flashtune.codegen.problem import Problem
from flashtune.tuned_db.store import Store
from flashtune.tuner.session import tune
from flashtune.tuner.verify import verify

pytestmark = pytest.mark.gpu

PROBLEM = Problem(
    dtype="float16", head_dim=64, batch=4, seqlen_q=2048, seqlen_k=2048, num_heads=16, num_heads_kv=16, causal=True
)


def test_what_was_just_tuned_is_reproduced(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    (row,) = tune([PROBLEM], devices=[0], database=path, budget="24").rows
    if row.config == default_config(PROBLEM, require_device()):
        pytest.skip("the default won: there is no claim")
    found = verify(devices=[0], database=path)
    (verified,) = found.rows
    assert verified.stored.config == row.config
    assert verified.word == "reproduced", verified
    assert verified.level == "candidate", "it is the same day and card"
    with Store.open(path, readonly=True) as store:
        finals = store.measurements(session=found.session, stage="final", status="ok")
    assert {each.config for each in finals} == {row.config, verified.stored.default}
    assert all(each.ratio_low and each.ratio_high and each.max_error is not None for each in finals)
