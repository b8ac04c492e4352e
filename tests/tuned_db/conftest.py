"""Stores and rows for these tests, all of the fake families, and processes that know these too."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
import pytest
from command_line import run
from fakes import H200, PairConfig, SoloConfig, install, make_measurement, make_prediction, make_problem, plain_id

import flashtune
from flashtune.codegen.families import registry
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.exchange.signing import Signer
from flashtune.tuned_db.lookup import lookup, sources
from flashtune.tuned_db.records import parse
from flashtune.tuned_db.records.measurement import Choice, Measurement, Prediction
from flashtune.tuned_db.store.store import Store


@pytest.fixture(autouse=True)
def templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The fake families in place of the real ones; gives the templates."""
    templates = install(monkeypatch)
    caches = (lookup.source_digest, sources.bundled, parse.problem_from_text, parse.config_from_text)
    for cache in caches:
        cache.cache_clear()
    yield templates
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(autouse=True)
def predicted(monkeypatch: pytest.MonkeyPatch) -> dict[Config, float]:
    """Seconds that the model predicts by config; 1e-3 for those that a test doesn't list."""
    seconds: dict[Config, float] = {}

    @dataclass(frozen=True)
    class Estimate:
        seconds: float

    for module in (registry, lookup):
        monkeypatch.setattr(module, "predict", lambda problem, config, gpu: Estimate(seconds.get(config, 1e-3)))
    return seconds


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of bundled files, empty; there is no database but the test's own, and the one warning is not yet given."""
    folder = tmp_path_factory.mktemp("shipped")
    monkeypatch.setenv("FLASHTUNE_DB", str(folder / "none.db"))
    monkeypatch.setattr(sources, "BUNDLED", folder)
    monkeypatch.setattr(lookup, "_warned", threading.Lock())
    return folder


PREAMBLE = f"""
import importlib.util, sys
import pytest
from flashtune.tuned_db.store.store import Store
where = importlib.util.spec_from_file_location("fakes", {fakes.__file__!r})
sys.modules["fakes"] = fakes = importlib.util.module_from_spec(where)
where.loader.exec_module(fakes)
fakes.install(pytest.MonkeyPatch())
path = sys.argv[1]
"""


@pytest.fixture
def start() -> Callable[[str, Path], subprocess.Popen[str]]:
    """Starts a process that runs some code with the fake families; the code knows ``path``, ``Store`` and ``fakes``."""

    def start(code: str, path: Path) -> subprocess.Popen[str]:
        source = str(Path(flashtune.__file__).parents[1])
        command = [sys.executable, "-W", "error", "-c", PREAMBLE + textwrap.dedent(code), str(path)]
        environment = os.environ | {"PYTHONPATH": source}
        return subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.PIPE
        )

    return start


LOCKER = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("PRAGMA journal_mode = DELETE")
other.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locked() -> Callable[[Path], AbstractContextManager[None]]:
    """Another process keeps a file without a log for itself, for the time of a block."""

    @contextmanager
    def lock(path: Path) -> Iterator[None]:
        command = [sys.executable, "-c", LOCKER, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            try:
                yield
            finally:
                other.communicate()

    return lock


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A new database without rows; making one takes a while."""
    path = tmp_path_factory.mktemp("empty") / "tuned.db"
    Store.open(path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where `store` is, or may be made."""
    return tmp_path / "data é 数据" / "tuned.db"


@pytest.fixture
def url(team_url: str) -> str:
    """`team_url`, where that is the name of a function, too."""
    return team_url


@pytest.fixture
def store(path: Path, empty_database: bytes, request: pytest.FixtureRequest) -> Store:
    """Empty: in a file, or on a server where a test is marked ``on_both``."""
    if getattr(request, "param", "file") == "server":
        return Store.on_server(request.getfixturevalue("team_url"))
    path.parent.mkdir()
    path.write_bytes(empty_database)
    return Store.open(path)


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture
def measurement() -> Callable[..., Measurement]:
    return make_measurement


@pytest.fixture
def prediction() -> Callable[..., Prediction]:
    return make_prediction


@pytest.fixture
def pair() -> type[PairConfig]:
    return PairConfig


@pytest.fixture
def solo() -> type[SoloConfig]:
    return SoloConfig


@pytest.fixture
def look(path: Path, problem: Callable[..., Problem]) -> Callable[..., Choice]:
    """A look-up in the test's store; on an H200 for the usual problem unless told otherwise."""
    return lambda wanted=None, gpu=H200: lookup.find(wanted or problem(), gpu, store_path=path)


@pytest.fixture
def ship(shipped: Path) -> Callable[..., None]:
    """Bundles measurements."""

    def ship(*measurements: Measurement) -> None:
        write_export(measurements, shipped / "some.jsonl", origin="bundled")
        sources.bundled.cache_clear()

    return ship


@pytest.fixture
def searched(measurement: Callable[..., Measurement], pair: type[PairConfig]) -> Callable[..., list[Measurement]]:
    """A session: a time for each of some configs, and a final of the best and the default unless told otherwise."""

    def make(session: str = "s", final: bool = True, **changes: Any) -> list[Measurement]:
        configs = [pair(block=block, stages=stages) for block, stages in itertools.product((16, 32, 64), (1, 2))]
        rows = [
            measurement(id=plain_id(), session=session, config=config, stage="measure", **changes) for config in configs
        ]
        if final:
            rows.append(measurement(id=plain_id(), session=session, config=configs[0], paired_ratio=0.8, **changes))
            rows.append(measurement(id=plain_id(), session=session, config=configs[1], paired_ratio=1.0, **changes))
        return rows

    return make


@pytest.fixture
def other(tmp_path: Path, searched: Callable[..., list[Measurement]]) -> tuple[Path, list[Measurement]]:
    """Another database with a finished search."""
    rows = searched()
    with Store.open(tmp_path / "other.db") as made:
        made.add(rows)
    return tmp_path / "other.db", rows


@pytest.fixture(params=["rows.jsonl", "rows.jsonl.gz"])
def signed(
    store: Store, rows: list[Measurement], key: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Path:
    """An export that the key "mine" has signed."""
    store.add(rows)
    export = tmp_path / str(request.param)
    said = run("db", "export", export, "--db", store.path, "--sign", key("mine"))
    assert Signer.read(tmp_path / "mine.pem").public in said.stdout
    return export
