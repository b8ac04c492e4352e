"""Which config a look-up gives, from best evidence to none."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import UnsupportedProblem
from flashtune.tuned_db.lookup import lookup
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import Choice
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

H200 = gpu_by_alias("h200")
H100 = gpu_by_alias("h100")

STALE = "5" * 64


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


def test_exact_comes_before_older_before_neighbour(look: Make, store: Store, measurement: Make, problem: Make) -> None:
    store.record(measurement(problem=problem(batch=4)))
    assert look().level == "neighbour"
    store.record(measurement(source_digest=STALE, median_us=10.0))
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
            measurement(problem=huge, config=pair(block=16, stages=1), median_us=1e9, baseline_us=2e9),
            measurement(problem=huge, config=pair(block=128, stages=1), median_us=1.5e9, baseline_us=2e9),
        ]
    )
    assert look(huge).config == pair(block=128, stages=1)


def test_a_preferred_family_that_fits_is_the_default(look: Make, problem: Make, solo: Make) -> None:
    assert look(problem(head_dim=256)).config == solo(block=16)


def test_a_problem_that_no_family_serves_is_an_error(look: Make, problem: Make) -> None:
    with pytest.raises(UnsupportedProblem, match="head_dim is above 128"):
        look(problem(head_dim=256, dtype="bfloat16"))


@pytest.mark.parametrize("status", ["wrong", "illegal_access"])
def test_what_failed_for_the_spec_is_never_chosen(
    look: Make, store: Store, measurement: Make, problem: Make, ship: Make, status: str
) -> None:
    """On this device model at once, on others where two sessions say so."""
    ship(measurement(), measurement(problem=problem(batch=4)))
    assert look().origin == "bundled"
    failed = {"problem": problem(batch=64), "status": status, "median_us": None}
    store.record(measurement(**failed, gpu_key=H100.key, session="one"))
    assert look().origin == "bundled"
    store.record(measurement(**failed, gpu_key=H100.key, session="other", created="2026-11-28T12:00:00.000Z"))
    assert look().level == "default"


@pytest.mark.parametrize("status", ["wrong", "illegal_access"])
def test_what_failed_on_this_model_is_never_chosen(
    look: Make, store: Store, measurement: Make, problem: Make, ship: Make, status: str
) -> None:
    ship(measurement(), measurement(problem=problem(batch=4)))
    store.record(measurement(problem=problem(batch=64), status=status, median_us=None))
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
