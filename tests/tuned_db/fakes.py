"""Two small kernel families that stand in for the real ones, and measurements of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from flashtune.codegen.compiler.render import Templates
from flashtune.codegen.families import family, registry
from flashtune.codegen.families.counts import Work
from flashtune.codegen.families.family import Family
from flashtune.codegen.families.resources import Resources
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config, parameter
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.tuned_db.lookup import lookup
from flashtune.tuned_db.records import measurement
from flashtune.tuned_db.records.measurement import Measurement, Prediction, new_id
from flashtune.tuned_db.upkeep.gc import in_sample

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
    patch.setattr(family, "templates", lambda: Templates(templates))
    patch.setattr(registry, "families", lambda: FAKES)
    return templates


def make_problem(**changes: Any) -> Problem:
    base: dict[str, Any] = {"dtype": "float16", "head_dim": 64, "batch": 2, "num_heads": 16, "num_heads_kv": 4}
    return Problem(**(base | {"seqlen_q": 1024, "seqlen_k": 1024} | changes))


def plain_id() -> str:
    """An id that is not in the sample of rows that `gc` keeps, one in a hundred."""
    return next(name for name in iter(new_id, "") if not in_sample(name))


def name_of(gpu_key: object) -> str:
    """The model in a key, or for what is no key any name."""
    return str(gpu_key).partition("/")[2].partition("/")[0] or "none"


def make_measurement(**changes: Any) -> Measurement:
    """A final of a config that is not the default; its digest is what the template renders now."""
    problem = changes.get("problem", make_problem())
    config = changes.get("config", PairConfig(block=128, stages=2))
    median = changes.get("median_us", 80.0)
    base: dict[str, Any] = {
        "id": measurement.new_id(),
        "created": "2026-11-29T12:00:00.000Z",
        "session": SESSION,
        "problem": problem,
        "gpu_key": H200.key,
        "gpu_name": name_of(changes.get("gpu_key", H200.key)),
        "config": config,
        "source_digest": lookup.source_digest(problem.spec, config),
        "status": "ok",
        "stage": "final",
        "median_us": 80.0,
        "q20_us": 79.0 if median is None or median == 80.0 else median,
        "q80_us": 82.5 if median is None or median == 80.0 else median,
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
        "gpu_name": name_of(changes.get("gpu_key", H200.key)),
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
