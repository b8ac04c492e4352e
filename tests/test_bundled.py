"""What ships, asked for problems off its grid: plans that can be launched, with bounded workspaces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.lookup.sources import BUNDLED, bundled
from flashtune.tuned_db.records.measurement import STAGES

MEGABYTE = 2**20


def problem(batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int, *, causal: bool = False) -> Problem:
    return Problem(
        dtype="bfloat16", head_dim=128, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=heads,
        num_heads_kv=heads_kv, causal=causal,
    )  # fmt: skip


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize("batch", [1, 13, 256])
def test_workspaces_stay_small_wherever_a_config_came_from(gpu: str, batch: int, tmp_path: Path) -> None:
    for seqlen_q, seqlen_k, (heads, heads_kv) in itertools.product(
        (1, 33, 200), (1, 1024, 32768), ((32, 8), (32, 32), (28, 4))
    ):
        asked = problem(batch, seqlen_q, seqlen_k, heads, heads_kv)
        chip = gpu_by_alias(gpu)
        choice = find(asked, chip, store_path=tmp_path / "none.db")
        plan = family(choice.family).plan(asked, choice.config, chip)
        assert plan.workspace_bytes <= 48 * MEGABYTE, f"{asked}: {choice}"


def test_one_query_with_a_causal_mask_is_one_query(tmp_path: Path) -> None:
    chip = gpu_by_alias("h200")
    masked, plain = problem(1, 1, 8192, 32, 8, causal=True), problem(1, 1, 8192, 32, 8)
    assert masked == plain
    choice = find(masked, chip, store_path=tmp_path / "none.db")
    assert (choice.level, choice.origin) == ("exact", "bundled")


def test_every_row_that_ships_is_found_at_its_place() -> None:
    """Of a line only the place is read at first, by its spelling."""
    rows = read_export(BUNDLED / "h200.jsonl").measurements
    shipped = bundled("9.0a")
    assert shipped.gpu_keys(capability="9.0a") == [gpu_by_alias("h200").key]
    found = {
        row.id: row
        for each in shipped.problems(gpu_key=rows[0].gpu_key)
        for stage in STAGES
        for row in shipped.measurements(problem=each, gpu_key=rows[0].gpu_key, status="ok", stage=stage)
    }
    assert found == {row.id: row for row in rows if row.status == "ok"}
    assert len(found) > 400
