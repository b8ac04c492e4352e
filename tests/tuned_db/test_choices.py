"""The digest of choices: it changes when a choice does, and only then."""

from __future__ import annotations

import random
import re
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import DatabaseDamaged, UnsupportedProblem
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.lookup import lookup, sources
from flashtune.tuned_db.lookup.choices import choices
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
H200, H100, A100 = (gpu_by_alias(each) for each in ("h200", "h100", "a100"))


@pytest.fixture
def rows(measurement: Make, pair: Make, problem: Make) -> list[Measurement]:
    default = {"config": pair(block=64, stages=1), "median_us": 100.0}
    return [
        each
        for batch in (1, 2, 4)
        for each in (
            measurement(problem=problem(batch=batch), config=pair(block=32 * batch, stages=2)),
            measurement(problem=problem(batch=batch), **default),
        )
    ]


def digest(path: Path, *problems: Any, gpu: Any = H200) -> str:
    return choices(gpu, problems or None, database=path).digest


def filled(path: Path, rows: list[Measurement]) -> Path:
    with Store.open(path) as store:
        store.record_all(rows)
    return path


def test_the_order_of_rows_makes_no_difference(tmp_path: Path, rows: list[Measurement]) -> None:
    found = {digest(filled(tmp_path / "0.db", rows))}
    for number in range(1, 4):
        random.Random(number).shuffle(rows)
        for each in rows:
            filled(tmp_path / f"{number}.db", [each])
        found.add(digest(tmp_path / f"{number}.db"))
    assert len(found) == 1
    assert re.fullmatch("[0-9a-f]{64}", found.pop())


def test_another_process_gets_the_same(
    tmp_path: Path, rows: list[Measurement], start: Callable[[str, Path], subprocess.Popen[str]]
) -> None:
    path = filled(tmp_path / "tuned.db", rows)
    code = """
        import pathlib, types
        from flashtune.codegen.families import registry
        from flashtune.tuned_db.lookup import lookup, sources
        from flashtune.tuned_db.lookup.choices import choices
        registry.predict = lookup.predict = lambda *_: types.SimpleNamespace(seconds=1e-3)
        sources.BUNDLED = pathlib.Path(path).parent / "none"
        print(choices(fakes.H200, None, database=pathlib.Path(path)).digest)
    """
    output, _ = start(code, path).communicate(timeout=60)
    assert output == digest(path) + "\n"


def test_rows_that_decide_nothing_change_nothing(
    tmp_path: Path, rows: list[Measurement], measurement: Make, pair: Make, problem: Make
) -> None:
    path = filled(tmp_path / "tuned.db", rows)
    before = digest(path)
    for row in (
        measurement(config=pair(block=16, stages=1), median_us=99.0),  # slower than the winner
        measurement(config=pair(block=16, stages=3), stage="screen", median_us=1.0),
        measurement(config=pair(block=16, stages=2), status="timeout", median_us=None),
        measurement(gpu_key=A100.key, gpu_name=A100.name, problem=problem(batch=77)),  # another capability
        measurement(gpu_key=H100.key, gpu_name=H100.name),  # another chip, for a problem that is known here
        measurement(problem=problem(batch=8), config=pair(block=256, stages=3)),  # refused: as if it were not there
        measurement(problem=problem(batch=16), status="failed", median_us=None),
    ):
        filled(path, [row])
        assert digest(path) == before, row


def test_a_choice_that_changes_changes_it(
    tmp_path: Path, rows: list[Measurement], measurement: Make, pair: Make, problem: Make, templates: dict[str, str]
) -> None:
    path = filled(tmp_path / "tuned.db", rows)
    seen = [digest(path)]
    filled(path, [measurement(config=pair(block=16, stages=1), median_us=50.0)])
    seen.append(digest(path))
    filled(path, [measurement(config=pair(block=16, stages=1), status="wrong")])
    assert digest(path) == seen[0]  # the former winner again
    filled(path, [measurement(problem=problem(batch=32))])
    seen.append(digest(path))
    templates["pair.cu.jinja"] += "changed\n"
    lookup.source_digest.cache_clear()
    seen.append(digest(path))
    assert len(set(seen)) == 4


def test_the_gpu_counts(tmp_path: Path, rows: list[Measurement]) -> None:
    path = filled(tmp_path / "tuned.db", rows)
    assert len({digest(path, gpu=each) for each in (H200, H100, A100)}) == 3


def test_asked_problems_alone_count(tmp_path: Path, rows: list[Measurement], problem: Make, measurement: Make) -> None:
    path = filled(tmp_path / "tuned.db", rows)
    one, two = problem(batch=1), problem(batch=2)
    before = digest(path, one, two)
    assert before == digest(path, two, one, one)
    assert len({before, digest(path, one), digest(path)}) == 3
    filled(path, [measurement(problem=problem(batch=32))])
    assert digest(path, one, two) == before
    unknown = problem(batch=999)
    assert choices(H200, [unknown], database=path).chosen.keys() == {unknown}


def test_what_ships_counts_as_rows_of_ones_own_do(
    tmp_path: Path, shipped: Path, rows: list[Measurement], measurement: Make
) -> None:
    empty = choices(H200, database=None)
    assert empty.chosen == {}
    own = digest(filled(tmp_path / "tuned.db", rows))
    write_export(rows, shipped / "h200.jsonl", origin="bundled")
    sources.bundled.cache_clear()
    assert choices(H200, database=None).digest == own
    assert choices(H200, database=tmp_path / "missing.db").digest == own
    assert digest(tmp_path / "tuned.db") == own
    assert empty.digest != own


def test_a_prediction_is_a_choice(tmp_path: Path, prediction: Make) -> None:
    with Store.open(tmp_path / "tuned.db") as store:
        before = digest(store.path)
        store.record_prediction(prediction())
        assert digest(store.path) != before


def test_a_database_that_fails_is_not_passed_over(store: Store, path: Path, rows: list[Measurement]) -> None:
    """attention() would go on with what ships, and the ranks would run different kernels."""
    store.record_all(rows)
    assert digest(path)
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("DROP TABLE prediction")
    with pytest.raises(DatabaseDamaged, match=r"tuned\.db"):
        digest(path)
    path.write_bytes(b"")
    with pytest.raises(DatabaseDamaged, match="empty"):
        digest(path)


def test_a_problem_that_nothing_serves_is_named(store: Store, problem: Make) -> None:
    with pytest.raises(UnsupportedProblem):
        choices(H200, [problem(dtype="bfloat16", head_dim=256)], database=store.path)
