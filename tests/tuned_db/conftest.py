"""Two small kernel families that stand in for the real ones, and measurements of them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import pytest

import flashtune
from flashtune.codegen import family, model, render
from flashtune.codegen.config import Config, parameter
from flashtune.codegen.family import Family, Resources
from flashtune.codegen.gpu import Gpu, gpu_by_alias
from flashtune.codegen.problem import Problem, Spec
from flashtune.codegen.work import Work
from flashtune.tuned_db import gate, lookup, records, sources
from flashtune.tuned_db.exchange import write_export
from flashtune.tuned_db.gc import in_sample
from flashtune.tuned_db.records import Choice, Measurement, Prediction
from flashtune.tuned_db.store import Store

H200 = gpu_by_alias("h200")
SESSION = "01935f6e-0000-7000-8000-000000000000"


@dataclass(frozen=True, kw_only=True)
class PairConfig(Config):
    """A config of the preferred fake family."""

    family: ClassVar[str] = "pair"

    block: int = parameter(choices=(16, 32, 64, 128, 256), help="rows of a tile")
    stages: int = parameter(choices=(1, 2, 3), help="loads in flight")
    order: str = parameter(choices=("plain", "reversed"), neutral="plain", help="order of tiles")


@dataclass(frozen=True, kw_only=True)
class SoloConfig(Config):
    """A config of the fallback."""

    family: ClassVar[str] = "solo"

    block: int = parameter(choices=(16, 32), help="rows of a tile")


class Pair(Family):
    name = "pair"
    config_type: type[Config] = PairConfig
    entry = "pair"

    def unsupported(self, spec: Spec, gpu: Gpu) -> str | None:
        return "head_dim is above 128" if spec.head_dim > 128 else None

    def illegal(self, config: Config, spec: Spec, gpu: Gpu) -> str | None:
        assert isinstance(config, PairConfig)
        needed = config.block * config.stages * 512
        return f"needs {needed} B" if needed > gpu.shared_memory_block else None

    def default(self, spec: Spec, gpu: Gpu) -> Config:
        return PairConfig(block=64, stages=1)

    def resources(self, config: Config, spec: Spec) -> Resources:
        return Resources(threads=128, shared_memory=0, registers=64)

    def names(self, config: Config, spec: Spec) -> Mapping[str, object]:
        return {}

    def tiles(self, config: Config, problem: Problem) -> int:
        return problem.batch * problem.num_heads * -(-problem.seqlen_q // int(config.to_json()["block"]))

    def work(self, config: Config, problem: Problem, gpu: Gpu) -> Work:
        raise AssertionError("tests say what the model predicts")


class Solo(Pair):
    name = "solo"
    config_type = SoloConfig
    entry = "solo"

    def unsupported(self, spec: Spec, gpu: Gpu) -> str | None:
        return "dtype is not float16" if spec.dtype != "float16" else None

    def illegal(self, config: Config, spec: Spec, gpu: Gpu) -> str | None:
        return None

    def default(self, spec: Spec, gpu: Gpu) -> Config:
        return SoloConfig(block=16)


FAKES: dict[str, Family] = {"pair": Pair(), "solo": Solo()}
TEXT = "block {{ config.block }} of {{ spec.head_dim }} by {{ config }}\n"


def install(patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Puts the fake families in place of the real ones; returns their templates, which may be edited."""
    templates = {"pair.cu.jinja": TEXT, "solo.cu.jinja": TEXT}
    environment = jinja2.Environment(loader=jinja2.DictLoader(templates), auto_reload=True, cache_size=0)
    patch.setattr(render, "environment", lambda: environment)
    patch.setattr(family, "families", lambda: FAKES)
    return templates


@pytest.fixture(autouse=True)
def templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The fake families in place of the real ones; gives the templates."""
    templates = install(monkeypatch)
    caches = (lookup.source_digest, sources.bundled, gate.problem_from_text, gate.config_from_text)
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

    for module in (model, lookup):
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


def make_problem(**changes: Any) -> Problem:
    base: dict[str, Any] = {"dtype": "float16", "head_dim": 64, "batch": 2, "num_heads": 16, "num_heads_kv": 4}
    return Problem(**(base | {"seqlen_q": 1024, "seqlen_k": 1024} | changes))


def make_measurement(**changes: Any) -> Measurement:
    """A final of a config that is not the default; its digest is what the template renders now."""
    problem = changes.get("problem", make_problem())
    config = changes.get("config", PairConfig(block=128, stages=2))
    base: dict[str, Any] = {
        "id": records.new_id(),
        "created": "2026-11-29T12:00:00.000Z",
        "session": SESSION,
        "problem": problem,
        "gpu_key": H200.key,
        "gpu_name": H200.name,
        "config": config,
        "source_digest": lookup.source_digest(problem.spec, config),
        "status": "ok",
        "stage": "final",
        "median_us": 80.0,
        "q20_us": 79.0,
        "q80_us": 82.5,
        "samples": 100,
        "baseline_us": 100.0,
        "max_error": 1e-3,
        "rms_error": 1e-4,
        "registers": 168,
        "spill_bytes": 0,
        "shared_bytes": 98304,
        "clock_mhz": 1980.0,
        "unit": "GPU-5f0c0c2e",
        "driver": "580.159",
        "nvrtc": "13.0",
        "cupy": "14.2.0",
        "flashtune": "0.1.0",
        "seed": 7,
    }
    return Measurement(**(base | changes))


SECOND: dict[str, Any] = {
    "paired_ratio": 0.8,
    "ratio_low": 0.79,
    "ratio_high": 0.815,
    "rounds": 25,
    "power_w": 612.5,
    "temperature_c": 61.0,
    "throttle": "power_cap,hw_thermal",
    "contended": True,
}
"""What rows have since schema version 2."""


def make_prediction(**changes: Any) -> Prediction:
    problem = changes.get("problem", make_problem())
    config = changes.get("config", PairConfig(block=32, stages=3))
    base: dict[str, Any] = {
        "created": "2026-11-29T12:00:00.000Z",
        "problem": problem,
        "gpu_key": H200.key,
        "gpu_name": H200.name,
        "config": config,
        "source_digest": lookup.source_digest(problem.spec, config),
        "predicted_us": 75.0,
        "rank": 1,
        "registers": 128,
        "spill_bytes": 0,
        "nvrtc": "13.5",
        "flashtune": "0.1.0",
    }
    return Prediction(**(base | changes))


PREAMBLE = f"""
import importlib.util, sys
import pytest
from flashtune.tuned_db.store import Store
where = importlib.util.spec_from_file_location("fakes", {__file__!r})
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


def plain_id() -> str:
    """One that is not in the sample."""
    return next(name for name in iter(records.new_id, "") if not in_sample(name))


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
