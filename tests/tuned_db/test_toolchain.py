"""Rows of several compilers: those of the version that is nearest to ours count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import MissingDependency
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.policy import toolchain
from flashtune.tuned_db.policy.toolchain import NEWEST, compatible
from flashtune.tuned_db.policy.trust import trust_of
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store

H200 = gpu_by_alias("h200")
Make = Callable[..., Any]


@pytest.fixture
def tried(measurement: Make, pair: Make) -> Make:
    """A final of a config with this block, compiled by this version of NVRTC."""

    def make(block: int, nvrtc: str, ratio: float, **changes: Any) -> Measurement:
        made: Measurement = measurement(
            config=pair(block=block, stages=1), nvrtc=nvrtc, median_us=100.0 * ratio, baseline_us=100.0, **changes
        )
        return made

    return make


@pytest.mark.parametrize(
    ("ours", "wanted"),
    [
        ("13.0", "12.9"),  # the newest that is not newer, though 12.10 sorts before it as text
        ("12.10", "12.9"),
        ("13.1", "13.1"),
        ("14", "13.1"),
        ("12.4", "12.4"),
        ("12.3", "12.4"),  # all are newer: the oldest of them
        ("9.0", "12.4"),
        (NEWEST, "13.1"),
        ("unknown", "13.1"),
    ],
)
def test_the_nearest_version_counts(tried: Make, ours: str, wanted: str) -> None:
    rows = [tried(16, version, 0.9) for version in ("12.9", "", "12.4", "13.1", "strange")]
    assert [each.nvrtc for each in compatible(rows, ours)] == [wanted]


def test_numbers_of_a_version_compare_as_numbers(tried: Make) -> None:
    rows = [tried(16, version, 0.9) for version in ("12.9", "12.10")]
    assert [each.nvrtc for each in compatible(rows, "13.0")] == ["12.10"]


def test_a_release_is_its_own_first_version(tried: Make) -> None:
    rows = [tried(16, version, 0.9) for version in ("13", "13.0", "13.0.0", "12.9")]
    assert [each.nvrtc for each in compatible(rows, "13.0")] == ["13", "13.0", "13.0.0"]


def test_trust_goes_by_the_rows_that_decide(tried: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "installed", lambda: "13.0")
    old = [tried(16, "12.9", 0.9, session=day, created=f"2026-11-2{day}T12:00:00.000Z") for day in "12"]
    new = tried(16, "13.0", 0.9, session="3", created="2026-11-23T12:00:00.000Z")
    silent = tried(16, "13.0", 0.9, session="4", created="2026-11-24T12:00:00.000Z")
    silent = dataclasses.replace(silent, baseline_us=None)
    for rows, level in ((old, "verified"), ([*old, new], "candidate"), ([*old, silent], None)):
        (ranked,) = rank(rows, toolchain="13.0")
        trust = trust_of(rows, old[0].variant)
        assert (trust and trust.level) == (ranked.trust and ranked.trust.level) == level


def test_a_version_that_is_not_known_counts_where_there_is_no_other(tried: Make) -> None:
    rows = [tried(16, "", 0.9), tried(16, "strange", 0.8)]
    assert compatible(rows, "13.0") == rows
    assert [each.nvrtc for each in compatible([*rows, tried(16, "13.5", 0.9)], "13.0")] == ["13.5"]


def test_what_a_new_compiler_made_slow_no_longer_wins(tried: Make) -> None:
    """sglang #5716: an H20 config was 3 % faster with one release and slower than the default with the next."""
    old = [tried(16, "12.9", 0.97, session=str(day)) for day in range(3)]
    rows = [*old, tried(16, "13.0", 1.02, session="new"), tried(32, "13.0", 1.0, session="new")]
    assert [each.variant for each in rank(rows, toolchain="13.0")] == [rows[-1].variant]
    assert rank(rows, toolchain="12.9")[0].variant == old[0].variant, "who still has the older one is served by it"


def test_of_older_compilers_the_newest_counts(tried: Make) -> None:
    """sglang #24562: without rows of the own version those of an old one were taken, not of the one just before."""
    rows = [tried(16, "12.4", 0.80), tried(16, "12.9", 0.95), tried(32, "12.9", 0.90)]
    assert [each.ratio for each in rank(rows, toolchain="13.0")] == [0.90, 0.95]


def test_what_only_an_older_compiler_measured_still_competes(tried: Make) -> None:
    rows = [tried(16, "12.9", 0.85), tried(32, "13.0", 1.0)]
    assert rank(rows, toolchain="13.0")[0].variant == rows[0].variant


def test_rows_of_a_slowed_card_count_less_than_those_of_an_older_compiler(tried: Make) -> None:
    rows = [tried(16, "12.9", 0.9), tried(16, "13.0", 0.5, contended=True)]
    assert rank(rows, toolchain="13.0")[0].ratio == 0.9


@pytest.mark.parametrize(("ours", "block"), [("12.9", 16), ("13.0", 32), ("13.5", 32)])
def test_a_look_up_asks_for_the_version_here(
    tmp_path: Path, tried: Make, monkeypatch: pytest.MonkeyPatch, ours: str, block: int
) -> None:
    monkeypatch.setattr(toolchain, "installed", lambda: ours)
    rows = [tried(16, "12.9", 0.8), tried(16, "13.0", 0.9), tried(32, "13.0", 0.85)]
    with Store.open(tmp_path / "tuned.db") as store:
        store.add(rows)
    chosen = find(rows[0].problem, H200, store_path=tmp_path / "tuned.db")
    assert (chosen.level, chosen.config.to_json()["block"]) == ("exact", block)


def test_without_a_compiler_the_newest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise MissingDependency("no CuPy")

    monkeypatch.setattr(toolchain, "nvrtc_version", missing)
    toolchain.installed.cache_clear()
    try:
        assert toolchain.installed() == NEWEST
    finally:
        toolchain.installed.cache_clear()
