"""Thousands of mutated rows: each is refused by name or is a measurement like any other. None gets into a source."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mutations import MARK, change, odd, spoil, stored

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Spec
from flashtune.errors import IllegalConfig, InvalidInput, StoreError, UnsupportedProblem
from flashtune.tuned_db.exchange.export_file import SCHEMA, parse_line, read_export, write_export
from flashtune.tuned_db.records.measurement import Measurement, canonical, to_json
from flashtune.tuned_db.records.parse import measurement_from_json
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file
from flashtune.tuned_db.store.store import Store

SHIPPED = Path(__file__).parents[1] / "tuned_db" / "bundled" / "h200.jsonl"
GPU = gpu_by_alias("h200")
COLUMNS = {
    "problem": ("key", "spec_key", "op", "dtype", "head_dim", "seqlen_q", "causal", "json"),
    "device": ("key", "name", "capability"),
    "environment": ("unit", "driver", "nvrtc", "cupy", "flashtune"),
    "variant": ("family", "config", "source_digest"),
}
"""What others than a measurement itself hold; a measurement's own columns are asked of the database."""


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return list(read_export(SHIPPED).measurements)


_sound: set[tuple[Spec, Config]] = set()


def assert_harmless(row: Measurement) -> None:
    """The config has known parameters with listed values, and what it renders to holds nothing else of the row."""
    kind = family(row.config.family)
    assert type(row.config) is kind.config_type
    for each in row.config.parameters():
        got = getattr(row.config, each.name)
        assert any(type(got) is type(choice) and got == choice for choice in each.choices)
    spec = row.problem.spec
    if (spec, row.config) in _sound:
        return
    _sound.add((spec, row.config))
    try:
        kind.check(row.config, spec, GPU)
    except (IllegalConfig, UnsupportedProblem):
        return
    source = kind.source(row.config, spec)
    assert MARK not in source.text
    assert "{{" not in source.text


def taken(line: bytes) -> Measurement | str:
    """What the reader of exports makes of a line: a row, or why it is refused."""
    try:
        return measurement_from_json(parse_line(line))
    except InvalidInput as error:
        return str(error)


def outcome(call: Callable[[], Added]) -> tuple[Added | None, str]:
    """What was added, or why nothing was, by an error of ours. Any other error is a failure of the test."""
    try:
        return call(), ""
    except (InvalidInput, StoreError) as error:
        return None, str(error)


def mutated(draw: random.Random, originals: list[dict[str, Any]], place: int) -> bytes:
    data = copy.deepcopy(originals[place])
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        change(draw, data, originals)
    line = json.dumps(data).encode()
    return spoil(draw, line) if draw.random() < 0.3 else line


def test_mutated_lines_are_refused_or_are_measurements(tmp_path: Path, rows: list[Measurement]) -> None:
    draw = random.Random(1)
    originals = [to_json(each) for each in rows]
    reasons: Counter[bool] = Counter()
    accepted: dict[str, Measurement] = {}
    for _ in range(10_000):
        row = taken(mutated(draw, originals, draw.randrange(len(originals))))
        reasons[isinstance(row, str)] += 1
        if isinstance(row, str):
            assert 0 < len(row) < 700
            assert row.isprintable()
            continue
        assert_harmless(row)
        key = f"{len(accepted):08x}-0000-7000-8000-000000000000"
        accepted[key] = dataclasses.replace(row, id=key, gpu_key=rows[0].gpu_key, gpu_name=rows[0].gpu_name)
    assert min(reasons.values()) > 500, "else this says little of the one or the other"
    with Store.open(tmp_path / "tuned.db") as store:
        assert store.add(accepted.values()).new == len(accepted)
        kept = store.measurements()
        assert len(kept) == len(accepted)
        assert store.add(kept).new == store.add(accepted.values()).new == 0
    write_export(kept, tmp_path / "one.jsonl", origin="x")
    write_export(accepted.values(), tmp_path / "two.jsonl", origin="x")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_files_with_mutations_are_refused_by_line_or_taken_whole(tmp_path: Path, rows: list[Measurement]) -> None:
    draw = random.Random(2)
    originals = [to_json(each) for each in rows[:8]]
    file = tmp_path / "rows.jsonl"
    outcomes: Counter[str] = Counter()
    with Store.open(tmp_path / "tuned.db") as store:
        for turn in range(400):
            for number, each in enumerate(originals):
                each["id"] = f"{turn:08x}-0000-7000-8000-{number:012x}"
            lines = [canonical(each).encode() for each in originals]
            place = draw.randrange(len(lines))
            lines[place] = mutated(draw, originals, place).replace(b"\n", b" ")
            body = b"".join(each + b"\n" for each in lines)
            header = {
                "digest": hashlib.sha256(body).hexdigest(), "gpu_keys": [GPU.key], "origin": "x",
                "rows": len(lines), "schema": SCHEMA,
            }  # fmt: skip
            damaged = draw.random() < 0.4
            if damaged:
                header[draw.choice((*header, MARK))] = odd(draw)
            file.write_bytes(json.dumps(header).encode() + b"\n" + body)
            _, reason = outcome(functools.partial(add_file, store, file))
            there = store.rows_with_ids(each["id"] for each in originals)
            assert len(there) >= len(lines) - 1 if not reason else not there
            named = (f"{file}, line ", f"{file}: the ", "as in other rows of the model")
            assert not reason or any(each in reason for each in named), reason
            outcomes["taken" if not reason else "header" if damaged else "line"] += 1
    assert min(outcomes.values()) > 10
    assert len(outcomes) == 3


def own_columns(path: Path) -> dict[str, tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as plain:
        names = [row[1] for row in plain.execute("PRAGMA table_info(measurement)")]
    return COLUMNS | {"measurement": tuple(names)}


def put(path: Path, draw: random.Random, columns: dict[str, tuple[str, ...]], count: int) -> int:
    """Mutates ``count`` values, as someone may who has the file; returns how many SQLite took."""
    done = 0
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("PRAGMA ignore_check_constraints = ON")
        numbers = {table: plain.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in columns}
        while done < count:
            table = draw.choice(("measurement", "measurement", *columns))
            column, value = draw.choice(columns[table]), stored(draw)
            as_text = "CAST(? AS TEXT)" if isinstance(value, bytes) and draw.random() < 0.8 else "?"
            row = f"(SELECT rowid FROM {table} LIMIT 1 OFFSET {draw.randrange(numbers[table])})"
            try:
                plain.execute(f"UPDATE {table} SET {column} = {as_text} WHERE rowid = {row}", [value])
            except sqlite3.IntegrityError:  # NOT NULL and UNIQUE hold against anyone
                continue
            done += 1
    return done


def test_mutated_databases_are_read_but_for_rows_that_are_named(tmp_path: Path, rows: list[Measurement]) -> None:
    draw = random.Random(3)
    whole, bad = tmp_path / "whole.db", tmp_path / "bad.db"
    with Store.open(whole) as store:
        store.add(rows)
    columns = own_columns(whole)
    values = refused = readable = 0
    while values < 10_000:
        bad.write_bytes(whole.read_bytes())
        values += put(bad, draw, columns, draw.choice((1, 10, 100, 400)))
        before = bad.read_bytes()
        with Store.open(bad, readonly=True) as store:
            found = store.measurements()
            store.problems(), store.gpu_keys(), store.rejected(rows[0].problem.spec, rows[0].gpu_key)
            store.winner(rows[0].problem, rows[0].gpu_key)
        for row in found:
            assert_harmless(row)
        target = tmp_path / f"target{values}.db"
        with Store.open(target) as store:
            added, reason = outcome(functools.partial(add_database, store, bad))
            assert not reason or "as in other rows of the model" in reason, reason
            assert len(store.measurements()) == (added.new if added else 0) == (0 if reason else len(found))
            for each in added.refused.reasons if added else ():
                assert f"{bad}, table measurement, id " in each
                assert each.isprintable()
            refused += added.refused.rows if added else 0
        readable += len(found)
        assert bad.read_bytes() == before
        target.unlink()
    assert refused > 1000
    assert readable > 1000


def test_a_file_with_wrong_bytes_is_an_error_of_ours_or_a_database(tmp_path: Path, rows: list[Measurement]) -> None:
    draw = random.Random(4)
    path, own = tmp_path / "bad.db", tmp_path / "own.db"
    with Store.open(path) as store:
        store.add(rows)
    whole = path.read_bytes()
    refused = 0
    with Store.open(own) as target:
        for turn in range(120):
            data = bytearray(whole)
            for _ in range(draw.choice((1, 20, 400))):
                data[draw.randrange(100 if turn % 5 == 0 else len(data))] = draw.randrange(256)
            path.write_bytes(data[: draw.randrange(len(data))] if turn % 7 == 0 else data)
            before = target.measurements()
            _, reason = outcome(functools.partial(add_database, target, path))
            if reason:
                refused += 1
                assert str(tmp_path) in reason or "as in other rows of the model" in reason
                assert target.measurements() == before
    assert 20 < refused < 120
