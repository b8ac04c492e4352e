"""What was measured on real cards: what ships, and the sweeps that are kept. Every row of it is believed."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path

import pytest

from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.lookup.sources import BUNDLED
from flashtune.tuned_db.policy.plausible import impossible, least_us
from flashtune.tuned_db.policy.toolchain import NEWEST
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.records.measurement import Measurement

SWEEPS = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("tune_h200*.jsonl.gz"))
WINNERS = {
    "tune_h200.jsonl.gz": "ff9d1cecc67c48e6",
    "tune_h200_grid.jsonl.gz": "656d56e85168a890",
    "tune_h200_models.jsonl.gz": "b09042bb5d86f340",
    "tune_h200_sm90.jsonl.gz": "a7cdabead9f7013a",
    "tune_h200_wide.jsonl.gz": "9f423d173b2ed830",
    "h200.jsonl": "8e0e36e33ae0ef7d",
    "all": "505131280c94bd1d",
}
"""Digest of the winner and its ratio for each problem, as they were before rows were held against physics. A policy
that is meant to choose other winners changes them; one that is meant to keep out lies does not."""


@pytest.fixture(scope="module")
def kept() -> dict[str, tuple[Measurement, ...]]:
    found = {each.name: read_export(each).measurements for each in (*SWEEPS, *sorted(BUNDLED.glob("*.jsonl")))}
    together = {row.id: row for rows in found.values() for row in rows}
    return found | {"all": tuple(together.values())}


def test_nothing_that_a_card_has_measured_is_impossible(kept: dict[str, tuple[Measurement, ...]]) -> None:
    """M10: with room to spare."""
    rows = kept["all"]
    assert len(rows) > 19_000
    assert [impossible(each) for each in rows if impossible(each)] == []
    assert min(each.median_us / least_us(each.problem, each.gpu_key) for each in rows if each.median_us) > 2


@pytest.mark.parametrize("name", WINNERS)
def test_the_winners_are_those_of_before(kept: dict[str, tuple[Measurement, ...]], name: str) -> None:
    groups: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for each in kept[name]:
        groups[each.gpu_key, each.problem.key].append(each)
    rankings = {place: rank(rows, toolchain=NEWEST) for place, rows in groups.items()}
    winners = [[place, ranked[0].variant, ranked[0].ratio] for place, ranked in sorted(rankings.items()) if ranked]
    assert hashlib.sha256(json.dumps(winners).encode()).hexdigest()[:16] == WINNERS[name]
