"""Which config a look-up gives, from best evidence to none, whatever state the files are in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.config import Config
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.errors import UnsupportedProblem
from flashtune.tuned_db import lookup, sources
from flashtune.tuned_db.distance import chip_distance
from flashtune.tuned_db.exchange import Export, read_lines, write_export
from flashtune.tuned_db.lookup import find
from flashtune.tuned_db.records import Choice, Measurement
from flashtune.tuned_db.store import Store

Make = Callable[..., Any]

H200 = gpu_by_alias("h200")
H100 = gpu_by_alias("h100")
STALE = "5" * 64


@pytest.fixture
def look(path: Path, problem: Make) -> Callable[..., Choice]:
    """A look-up in the test's store; on an H200 for the usual problem unless told otherwise."""
    return lambda wanted=None, gpu=H200: find(wanted or problem(), gpu, store_path=path)


@pytest.fixture
def ship(shipped: Path) -> Callable[..., None]:
    """Bundles measurements."""

    def ship(*measurements: Measurement) -> None:
        write_export(measurements, shipped / "some.jsonl", origin="bundled")
        sources.bundled.cache_clear()

    return ship


def test_nothing_known_gives_the_default(look: Make, pair: Make, path: Path) -> None:
    choice = look()
    assert (choice.level, choice.config, choice.origin) == ("default", pair(block=64, stages=1), "")
    assert choice.measurement is None
    assert not path.exists()


def test_an_exact_winner(look: Make, store: Store, measurement: Make) -> None:
    record = store.record(measurement())
    choice = look()
    assert (choice.level, choice.config, choice.origin) == ("exact", record.config, "user")
    assert choice.measurement == record
    assert choice.evidence == (
        "final on h200, 2026-11-29: 80 us (q20 79, q80 82.5), 100 samples, 0.800 of the default's time"
        "; candidate, 1 session and none to compare it with"
    )


def test_a_store_of_the_settings_is_used(
    store: Store, path: Path, measurement: Make, problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.record(measurement())
    monkeypatch.setenv("FLASHTUNE_DB", str(path))
    assert find(problem(), H200).level == "exact"


def test_a_changed_template_makes_old_winners_configs_of_an_older_source(
    look: Make, store: Store, measurement: Make, pair: Make, templates: dict[str, str]
) -> None:
    """D81: a row with today's source comes first, however slow."""
    record = store.record(measurement())
    templates["pair.cu.jinja"] += "// only a comment\n"
    lookup.source_digest.cache_clear()
    assert look().level == "exact"
    templates["pair.cu.jinja"] += "better code\n"
    lookup.source_digest.cache_clear()
    choice = look()
    assert (choice.level, choice.config) == ("older_source", record.config)
    assert "source has changed since" in choice.evidence
    store.record(measurement(config=pair(block=16, stages=2), median_us=95.0))
    assert look().level == "exact"


def test_the_neighbour_serves_that_is_expected_to_gain_most(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float]
) -> None:
    near, nearer = pair(block=128, stages=3), pair(block=32, stages=3)
    store.record_all(
        [
            measurement(problem=problem(batch=8), config=near, median_us=78.0),
            measurement(problem=problem(batch=4), config=nearer, median_us=85.0),
        ]
    )
    choice = look()
    assert (choice.level, choice.config) == ("neighbour", near)
    assert "tuned for float16 d64 b8 s1024 h16/4, 2 octaves away; 0.780 of the default's time is expected" in (
        choice.evidence
    )
    store.record(measurement(problem=problem(batch=4), config=pair(block=16, stages=3), median_us=70.0))
    assert look().config == pair(block=16, stages=3)


@pytest.mark.parametrize("seconds", [1.0001e-3, float("nan")], ids=["slower", "nan"])
def test_a_neighbour_serves_only_where_the_model_sees_no_loss(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float],
    seconds: float,
) -> None:  # fmt: skip
    store.record(measurement(problem=problem(batch=4), config=pair(block=32, stages=3)))
    assert look().level == "neighbour"
    predicted[pair(block=32, stages=3)] = seconds
    choice = look()
    assert choice.level == "default"
    assert choice.evidence == "winners of near problems are not expected to be faster"


@pytest.mark.parametrize(("median_us", "level"), [(97.0, "neighbour"), (99.0, "default"), (100.0, "default")])
def test_a_neighbour_serves_only_where_its_gain_is_worth_it(
    look: Make, store: Store, measurement: Make, problem: Make, median_us: float, level: str
) -> None:
    store.record(measurement(problem=problem(batch=4), median_us=median_us))
    assert look().level == level


def test_a_neighbour_without_a_ratio_serves_by_the_model_alone(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make, predicted: dict[Config, float]
) -> None:
    config = pair(block=32, stages=3)
    store.record(measurement(problem=problem(batch=4), config=config, stage="measure", baseline_us=None))
    assert look().level == "default", "it is predicted to take as long as the default"
    predicted[config] = 0.97e-3
    assert look().level == "neighbour"


@pytest.mark.parametrize(("seqlen", "level"), [(2048, "neighbour"), (1024 * 16, "default")])
def test_no_neighbour_serves_from_afar(
    look: Make, store: Store, measurement: Make, problem: Make, seqlen: int, level: str
) -> None:
    store.record(measurement(problem=problem(seqlen_q=seqlen, seqlen_k=seqlen)))
    assert look().level == level


def test_float16_and_bfloat16_are_neighbours_and_float32_is_not(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make
) -> None:
    other = store.record(measurement(problem=problem(dtype="bfloat16"), config=pair(block=32, stages=3)))
    choice = look()
    assert (choice.level, choice.config) == ("neighbour", other.config)
    assert "source has changed" not in choice.evidence
    store.record(measurement(problem=problem(batch=4)))
    assert look().config == other.config, "as much gain, and nearer"
    assert look(problem(dtype="float32")).level == "default"


def test_what_was_wrong_for_bfloat16_is_no_neighbour_of_float16(
    look: Make, store: Store, measurement: Make, problem: Make
) -> None:
    near = problem(dtype="bfloat16", batch=4)
    store.record(measurement(problem=near))
    assert look().level == "neighbour"
    store.record(measurement(problem=problem(dtype="bfloat16"), status="wrong", stage="screen"))
    assert look().level == "default"


def test_a_neighbour_has_the_same_spec(look: Make, store: Store, measurement: Make, problem: Make) -> None:
    store.record_all([measurement(problem=problem(causal=True)), measurement(problem=problem(head_dim=128))])
    assert look().level == "default"


def test_a_winner_for_values_of_another_width_is_never_used(
    look: Make, store: Store, measurement: Make, problem: Make, prediction: Make, ship: Callable[..., None]
) -> None:
    """Neither exact nor near nor borrowed, in both directions; and both are found where they belong."""
    narrow = problem(head_dim_v=32)
    store.record_prediction(prediction(problem=narrow))
    ship(measurement(problem=narrow))
    store.record_all([measurement(problem=narrow), measurement(problem=problem(head_dim_v=32, batch=4))])
    for gpu in (H200, H100):
        assert look(gpu=gpu).level == "default"
        assert look(problem(head_dim_v=128), gpu=gpu).level == "default"
    found = look(narrow)
    assert found.level == "exact"
    assert found.measurement is not None
    assert found.measurement.problem == narrow
    assert look(problem(head_dim_v=32, batch=8)).level == "neighbour"
    plain = store.record(measurement())
    assert look().measurement == plain
    assert look(problem(head_dim_v=64)).measurement == plain, "as wide as the keys"


def test_exact_comes_before_older_before_neighbour(look: Make, store: Store, measurement: Make, problem: Make) -> None:
    store.record(measurement(problem=problem(batch=4)))
    assert look().level == "neighbour"
    store.record(measurement(source_digest=STALE, median_us=1.0))
    assert look().level == "older_source"
    store.record(measurement())
    assert look().level == "exact"


def test_a_chip_of_the_same_capability_lends(
    look: Make, store: Store, measurement: Make, problem: Make, prediction: Make
) -> None:
    far = dataclasses.replace(H200, name="tiny", num_sms=16)
    other = gpu_by_alias("a100")
    rows = {each.name: measurement(gpu_key=each.key, gpu_name=each.name) for each in (far, H200, other)}
    store.record_all(rows.values())
    store.record_prediction(prediction(gpu_key=H100.key, gpu_name=H100.name))
    choice = look(gpu=H100)
    assert (choice.level, choice.measurement) == ("borrowed", rows["h200"])
    assert choice.evidence.startswith("borrowed from h200; final on h200")


def test_a_chip_lends_near_problems_only_without_predicted_loss(
    look: Make, store: Store, measurement: Make, problem: Make, predicted: dict[Config, float]
) -> None:
    record = store.record(measurement(problem=problem(batch=4)))
    choice = look(gpu=H100)
    assert (choice.level, choice.config) == ("borrowed", record.config)
    assert "borrowed from h200" in choice.evidence
    assert "1 octaves away" in choice.evidence
    predicted[record.config] = 1.0
    assert look(gpu=H100).level == "default"


def test_entries_of_another_capability_are_no_hit(look: Make, store: Store, measurement: Make) -> None:
    """D80."""
    store.record(measurement())
    assert look(gpu=gpu_by_alias("a100")).level == "default"


def test_a_prediction_serves_its_own_gpu_only(look: Make, store: Store, prediction: Make, pair: Make) -> None:
    second = prediction(config=pair(block=16, stages=1), rank=2, predicted_us=70.0)
    first = prediction()
    for each in (second, first):
        store.record_prediction(each)
    choice = look()
    assert (choice.level, choice.prediction) == ("predicted", first)
    assert choice.evidence == "predicted for h200, 2026-11-29: 75 us, rank 1; not measured"
    assert look(gpu=H100).level == "default"


def test_an_illegal_config_is_passed_over(
    look: Make, store: Store, measurement: Make, prediction: Make, pair: Make
) -> None:
    too_big = pair(block=256, stages=3)  # needs more shared memory than there is
    good = pair(block=128, stages=1)
    store.record_all([measurement(config=too_big, median_us=10.0), measurement(config=good)])
    assert look().config == good
    assert look(gpu=dataclasses.replace(H200, shared_memory_block=1024)).level == "default"


def test_a_family_that_does_not_serve_the_problem_is_passed_over(
    look: Make, store: Store, measurement: Make, problem: Make, solo: Make
) -> None:
    wanted = problem(dtype="bfloat16")
    store.record(measurement(problem=wanted, config=solo(block=32)))
    assert look(wanted).level == "default"


def test_a_launch_that_needs_too_many_tiles_is_passed_over(
    look: Make, store: Store, measurement: Make, problem: Make, pair: Make
) -> None:
    huge = problem(batch=2**20, seqlen_q=2**13, num_heads=16)
    store.record_all(
        [
            measurement(problem=huge, config=pair(block=16, stages=1), median_us=10.0),
            measurement(problem=huge, config=pair(block=128, stages=1)),
        ]
    )
    assert look(huge).config == pair(block=128, stages=1)


def test_a_preferred_family_that_fits_is_the_default(look: Make, problem: Make, solo: Make) -> None:
    assert look(problem(head_dim=256)).config == solo(block=16)


def test_a_problem_that_no_family_serves_is_an_error(look: Make, problem: Make) -> None:
    with pytest.raises(UnsupportedProblem, match="head_dim is above 128"):
        look(problem(head_dim=256, dtype="bfloat16"))


@pytest.mark.parametrize("status", ["wrong", "illegal_access"])
def test_what_failed_for_the_spec_anywhere_is_never_chosen(
    look: Make, store: Store, measurement: Make, problem: Make, ship: Make, status: str
) -> None:
    ship(measurement(), measurement(problem=problem(batch=4)))
    assert look().origin == "bundled"
    store.record(measurement(problem=problem(batch=64), status=status, median_us=None, gpu_key=H100.key))
    assert look().level == "default"


def test_rows_of_the_user_win_over_those_that_ship(
    look: Make, store: Store, measurement: Make, pair: Make, ship: Make, problem: Make
) -> None:
    shipped = measurement(median_us=10.0)
    ship(shipped)
    choice = look()
    assert (choice.level, choice.origin, choice.measurement) == ("exact", "bundled", shipped)
    store.record(measurement(source_digest=STALE))
    assert look().origin == "bundled"
    mine = store.record(measurement(config=pair(block=16, stages=1), median_us=90.0))
    assert (look().origin, look().measurement) == ("user", mine)


def test_a_final_that_ships_comes_before_a_run_of_the_users_that_had_none(
    look: Make, store: Store, measurement: Make, pair: Make, ship: Make
) -> None:
    """A run that was stopped after its first config must not put that in the place of what ships."""
    shipped = measurement(stage="final")
    ship(shipped)
    store.record(measurement(config=pair(block=16, stages=1), stage="measure", median_us=1.0))
    assert (look().origin, look().measurement) == ("bundled", shipped)


def test_what_ships_lends_to_other_chips(look: Make, measurement: Make, ship: Make, path: Path) -> None:
    ship(measurement())
    assert look(gpu=H100).evidence.startswith("borrowed from h200")
    assert not path.exists()


def test_bundled_rows_of_another_version_are_passed_over(
    look: Make, measurement: Make, ship: Make, shipped: Path
) -> None:
    ship(measurement())
    file = shipped / "some.jsonl"
    file.write_bytes(file.read_bytes().replace(b"580.159", b"580.160"))
    sources.bundled.cache_clear()
    assert look().level == "default"


def test_of_bundled_rows_those_that_this_version_can_not_take_are_passed_over(
    look: Make, measurement: Make, ship: Make, shipped: Path, pair: Make
) -> None:
    ship(measurement(median_us=90.0), measurement(config=pair(block=16, stages=1), median_us=50.0))
    file = shipped / "some.jsonl"
    header, *rows = file.read_text().splitlines()
    rows = [row.replace('"median_us":50.0', '"median_us":50.0,"later_field":1') for row in rows] + ["[]"]
    body = "".join(row + "\n" for row in rows)
    digest = hashlib.sha256(body.encode()).hexdigest()
    changed = json.loads(header) | {"rows": len(rows), "digest": digest}
    file.write_text(json.dumps(changed) + "\n" + body)
    sources.bundled.cache_clear()
    choice = look()
    assert (choice.level, choice.measurement.median_us) == ("exact", 90.0)


def test_what_ships_is_read_once_and_only_for_its_capability(
    look: Make, measurement: Make, ship: Make, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counting(path: Path) -> tuple[Export, list[bytes]]:
        read.append(path)
        return read_lines(path)

    monkeypatch.setattr(sources, "read_lines", counting)
    ship(measurement())
    look(gpu=gpu_by_alias("a100"))
    assert read == []
    for _ in range(3):
        assert look().level == "exact"
    assert len(read) == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scramble(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 100)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60:64] = (9).to_bytes(4, "big")
    path.write_bytes(data)


def foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("CREATE TABLE songs (title)")


def damaged_inside(path: Path) -> None:
    """Opens well; the tables that a look-up reads are gone."""
    with closing(sqlite3.connect(path)) as plain:
        page, size = plain.execute("SELECT rootpage FROM sqlite_master WHERE name = 'problem'").fetchone()[0], 4096
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = b"\xa5" * size
    path.write_bytes(data)


@pytest.mark.parametrize("breaks", [cut, empty, scramble, directory, newer, foreign, damaged_inside])
def test_a_database_that_cannot_be_used_costs_one_warning(
    look: Make,
    store: Store,
    path: Path,
    measurement: Make,
    pair: Make,
    ship: Make,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[Path], None],
) -> None:
    """D73 and D75, the look-up."""
    store.record(measurement(config=pair(block=16, stages=1)))
    ship(measurement())
    breaks(path)
    before = path.read_bytes() if path.is_file() else b""
    for _ in range(3):
        assert look().origin == "bundled"
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "flashtune"
    assert str(path) in caplog.text
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_bad_setting_costs_one_warning(
    problem: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", "postgresql://secret@host/db")
    assert find(problem(), H200).level == "default"
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_a_locked_database_costs_one_warning_and_little_time(
    look: Make,
    store: Store,
    path: Path,
    measurement: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "LOCK_TIMEOUT", 0.1)
    store.record(measurement())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        before = time.monotonic()
        assert look().level == "default"
        assert time.monotonic() - before < 2
    assert "locked by another process" in caplog.text
    assert look().level == "exact"


def test_tampered_rows_are_passed_over(look: Make, store: Store, path: Path, measurement: Make) -> None:
    """D82."""
    store.record(measurement())
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("UPDATE variant SET config = ?", ['{"block":"64\\n__device__ int x=1;","stages":2}'])
    assert look().level == "default"


def test_threads_get_the_same_answer(look: Make, store: Store, measurement: Make) -> None:
    record = store.record(measurement())
    answers: list[Choice] = []

    def worker() -> None:
        answers.append(look())

    threads = [threading.Thread(target=worker) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.measurement for each in answers] == [record] * 8


KEY = "9.0a/{model}/{sms}sm/smem232448/l2-{l2}/{memory}gb"


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        ({"sms": 130}, {"sms": 114}),
        ({"memory": 96}, {"memory": 80}),
        ({"sms": 78}, {"sms": 132, "mig": "7g.141gb"}),
        ({"sms": 16, "mig": "1g.18gb"}, {"odd": True}),
    ],
    ids=["SMs", "memory", "a slice is far", "an unknown form is last"],
)
def test_nearness_of_chips(nearer: dict[str, Any], farther: dict[str, Any]) -> None:
    def key(changes: dict[str, Any]) -> str:
        if changes.get("odd"):
            return "9.0a/unheard-of"
        text = KEY.format(**({"model": "x", "sms": 132, "l2": 62914560, "memory": 141} | changes))
        return text + (f"/mig-{changes['mig']}" if "mig" in changes else "")

    here = key({})
    assert chip_distance(here, here) == (0, 0.0)
    assert chip_distance(here, key(nearer)) < chip_distance(here, key(farther))


def test_every_key_of_the_table_is_understood() -> None:
    from flashtune.codegen.gpu_table import GPUS

    assert all(chip_distance(each.key, each.key) == (0, 0.0) for each in GPUS.values())


def test_ten_thousand_rows_are_looked_up_quickly(
    store: Store, path: Path, measurement: Make, problem: Make, pair: Make, look: Make
) -> None:
    configs = [pair(block=block, stages=stages) for block in (16, 32, 64, 128) for stages in (1, 2, 3)]
    problems = [problem(seqlen_q=128 * (1 + each), seqlen_k=1024) for each in range(40)]
    rows = [
        measurement(problem=each, config=config, stage=stage, session=f"session {session}", median_us=60.0 + session)
        for each in problems
        for config in configs
        for stage in ("screen", "measure", "final")
        for session in range(7)
    ]
    assert len(rows) > 10_000
    store.record_all(rows)
    assert look(problems[0]).level == "exact"  # imports and the template's first use are not counted
    times = []
    for each, level in [(problems[1], "exact"), (problem(seqlen_q=77, seqlen_k=1024), "neighbour")] * 3:
        before = time.process_time()
        assert look(each).level == level
        times.append(time.process_time() - before)
    assert min(times[0::2]) < 0.05
    assert min(times[1::2]) < 0.05
