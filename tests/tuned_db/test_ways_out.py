"""What one door lets in, every way out carries: text, a merge, a server, studies. A bad row harms itself alone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generated import DATES
from sqlalchemy import text

from flashtune.tuned_db.exchange.export_file import LINE_LIMIT, read_export
from flashtune.tuned_db.records.limits import MESSAGE_LIMIT, NUMBERS, TEXTS
from flashtune.tuned_db.records.measurement import THROTTLES, Measurement, canonical, now, to_json
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file, export_database
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.commands.optuna_export import export_studies

Make = Callable[..., Any]
WIDE = "\U00010380"
"""A letter that takes twelve bytes as JSON."""


@pytest.fixture
def largest(measurement: Make, problem: Make) -> Measurement:
    """With each field as long as it may be."""
    _, _, shared, _ = TEXTS[Measurement]
    own = dict.fromkeys(("session", "unit", "driver", "author"), WIDE * 200)
    own |= dict.fromkeys(("nvrtc", "cupy", "flashtune"), "v" * 60)
    assert {*own, "gpu_key", "gpu_name"} == {*shared, "session"}, "a text that is not listed here"
    numbers = {name: low / 3 if float in types else int(high) for name, types, low, high, _ in NUMBERS[Measurement][1]}
    numbers |= dict.fromkeys(("paired_ratio", "ratio_low", "ratio_high"), 1 / 3e5)
    numbers["temperature_c"] = -100 / 3
    times = {name: 1e11 / 3 for name in numbers if name.endswith("_us")}
    sizes = dict.fromkeys(("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv"), 2**31 - 1024)
    return measurement(
        **{**numbers, **times, **own},
        problem=problem(
            **sizes, head_dim=2**31 - 1, head_dim_v=2**31 - 2, out_dtype="float64", causal=True, alignment=2
        ),
        gpu_key=f"9.0a/{WIDE * 195}",
        throttle=",".join(THROTTLES),
        contended=False,
        message=WIDE * MESSAGE_LIMIT,
    )


def test_the_longest_row_fits_a_line_with_room_to_spare(largest: Measurement) -> None:
    """M5: a config of a real family is a few hundred bytes longer than those here."""
    assert LINE_LIMIT // 2 < len(canonical(to_json(largest))) < LINE_LIMIT - 8192


@pytest.fixture(params=["UTC", "Etc/GMT+12", "Etc/GMT-14"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time zones at both ends of the earth."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_extremes_get_out_every_way(
    store: Store, measurement: Make, problem: Make, largest: Measurement, tmp_path: Path, team_url: str, anywhere: None
) -> None:
    """M5: dates at both ends, the longest row, and three problems that people can't tell apart by their names."""
    rows = [
        *(measurement(created=each) for each in (*DATES, now())),
        *(measurement(problem=problem(out_dtype=each)) for each in ("", "float32", "float64")),
        dataclasses.replace(largest, status="failed", source_digest=""),
        largest,
    ]
    rows[-1] = dataclasses.replace(rows[-1], id=measurement().id)
    store.add(rows)
    assert export_database(store, tmp_path / "rows.jsonl") == len(rows)
    assert {each.id for each in read_export(tmp_path / "rows.jsonl").measurements} == {each.id for each in rows}
    team = Store.on_server(team_url)
    assert carry(store, team) == Added(new=len(rows), known=0)
    with Store.open(tmp_path / "other.db") as other:
        assert add_file(other, tmp_path / "rows.jsonl") == Added(new=len(rows), known=0)
        assert add_database(other, store.path) == carry(team, other) == Added(new=0, known=len(rows))
    studies = export_studies(store.path, tmp_path / "optuna.db")
    assert sum(each.trials for each in studies) == len(rows)


POISON = {
    "a long throttle": "throttle = replace(hex(zeroblob(35000)), '0', ',')",
    "no throttle that is known": "throttle = 'power_cap,tired'",
    "no such day": "created = '9998-19-39T29:59:69.900Z'",
    "no such year": "created = '0000-00-00T00:00:00.000Z'",
    "the end of time": "created = '9999-12-31T23:59:59.999Z'",
    "another form of a date": "created = '2026-11-29 12:00:00'",
    "a long message": "message = replace(hex(zeroblob(35000)), '0', 'x')",
}


@pytest.mark.parametrize("poison", POISON)
def test_a_row_that_is_there_already_and_can_not_get_out_keeps_no_other_in(
    store: Store, measurement: Make, tmp_path: Path, team_url: str, poison: str
) -> None:
    """M5: an earlier version let it in."""
    rows = [measurement(session=each) for each in "abc"]
    store.add(rows)
    with store.backend.writing() as connection:
        connection.execute(text(f"UPDATE measurement SET {POISON[poison]} WHERE session = 'b'"))
    assert [each.session for each in store.measurements()] == ["a", "c"]
    assert export_database(store, tmp_path / "rows.jsonl") == 2
    assert export_studies(store.path, tmp_path / "optuna.db")[0].trials == 2
    team = Store.on_server(team_url)
    for _ in range(2):
        carry(store, team)
    with Store.open(tmp_path / "other.db") as other:
        assert add_file(other, tmp_path / "rows.jsonl").new == 2
        assert add_database(other, store.path).refused.rows == 1
        assert {each.id for each in other.measurements()} == {rows[0].id, rows[2].id}
    assert {each.id for each in team.measurements()} == {rows[0].id, rows[2].id}
