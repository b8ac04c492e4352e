"""`tune()`: measures where the asked GPU is at hand, else predicts for it. Decides nothing about single configs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from flashtune import settings
from flashtune.codegen.families.family import AnyFamily
from flashtune.codegen.families.registry import family, supporting, unusable
from flashtune.codegen.gpu.devices import missing_device, unit_uuid, visible_gpus
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import IllegalConfig, InvalidInput, InvalidType, NoGpu, UnsupportedProblem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.cluster.ray_cluster import asked_of_ray
from flashtune.tuner.processes.compile_pool import ProcessBuilder, spare_workers
from flashtune.tuner.results.budget import Budget, parse_budget
from flashtune.tuner.results.report import Progress, Report
from flashtune.tuner.run.run import Means
from flashtune.tuner.search.strategy import DEFAULT_SAMPLER, strategy
from flashtune.tuner.workers.cuda_device import CudaUnit, is_open
from flashtune.tuner.workers.process_worker import ProcessWorker, Unit, Worker
from flashtune.values import shown

from .measured_run import measure_problems
from .predicted_run import predict_problems
from .request import TuneRequest

Mode = Literal["auto", "measure", "predict"]
DEFAULT_BUDGET = "120s"


def tune(
    problems: Sequence[Problem],
    gpu: Gpu | str | None = None,
    *,
    mode: Mode = "auto",
    devices: Sequence[int] | None = None,
    database: str | Path | None = None,
    budget: Budget | str = DEFAULT_BUDGET,
    seed: int = 0,
    families: Collection[str] | None = None,
    sampler: str = DEFAULT_SAMPLER,
    first: Sequence[Config] = (),
    progress: Callable[[Progress], None] | None = None,
    ray: str | None = None,
) -> Report:
    """Searches configs for ``problems`` and stores all that is found out; running it again goes on where it ended.

    ``gpu`` is a `Gpu`, an alias such as ``"h100"``, or None for the first CUDA device. With that GPU at hand configs
    are checked and timed. Without it, mode ``auto`` compiles the most promising configs for it and stores predictions,
    which are never called measured; mode ``measure`` raises :class:`NoGpu`. ``predict`` never measures.
    All devices that are that GPU measure, each its own share of the problems; ``devices`` names the CUDA devices that
    may. With ``ray``, ``"auto"`` or an address, those measure instead that a Ray cluster gives of the model.
    ``budget`` is shared by the problems. ``families`` limits the search to these kernel families. ``sampler``
    proposes what is measured (see :func:`.strategy.strategy`); ``first`` are measured before that and must be legal for
    each problem. A prediction ranks all configs and compiles the best: it uses neither.

    Ctrl-C ends the run early with what is known; every result was stored when it was found. Bad input raises before
    the database is touched.
    """
    if mode not in ("auto", "measure", "predict"):
        raise InvalidInput(f"mode={str(mode)[:40]!r} is not known. Known: auto, measure, predict")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InvalidInput(f"seed={str(seed)[:40]} must be a whole number from 0 to 2**32 - 1")
    if isinstance(families, str):
        raise InvalidType(f"families={families[:40]!r} is text, it must be a collection of names")
    if families is not None and not families:
        raise InvalidInput("families is empty: name at least one, or None for all")
    settings.author()  # a name that can't be stored would fail with the first row
    limit = parse_budget(budget)
    target, local, reason = locate(gpu, mode, devices, ray)
    wanted = list(dict.fromkeys(problems))
    _check(wanted, target, families)
    chosen = strategy(sampler)
    _check_first(first, wanted, target, families)
    report = progress or (lambda _: None)

    request = TuneRequest(
        problems=wanted,
        budget=limit,
        families=lambda problem: eligible(problem, target, families),
        strategy=chosen,
        first=first,
    )
    with ExitStack() as stack:
        units: Sequence[Unit] = local
        hire: Callable[[Unit], Worker] = ProcessWorker
        busy = len(local)
        if ray is not None:
            from flashtune.tuner.cluster.ray_crew import crew

            report(Progress(0.0, f"asking the Ray cluster for {target}"))
            hired = stack.enter_context(crew(ray, target, len(wanted)))
            units, hire, busy = hired.units, hired.hire, hired.here
        store = stack.enter_context(Store.open(settings.database_path() if database is None else database))
        builder = ProcessBuilder(target.arch, spare_workers(busy))
        stack.callback(builder.close)
        means = Means(gpu=target, units=units, store=store, builder=builder, hire=hire, seed=seed, progress=report)
        return measure_problems(request, means) if units else predict_problems(request, means, reason)


def locate(
    gpu: Gpu | str | None, mode: str, devices: Sequence[int] | None = None, ray: str | None = None
) -> tuple[Gpu, list[CudaUnit], str]:
    """The `Gpu` meant, the CUDA devices that measure (none if nothing is to be measured), and why there are none.

    With ``ray`` there are none here: those of the cluster measure.

    Raises :class:`NoGpu` where ``mode`` or a missing name needs a device, and :class:`InvalidInput` for ``devices``
    that can't measure together, or for a request that no cluster can serve.
    """
    if ray is not None:
        return asked_of_ray(gpu, mode, devices, ray), [], ""
    if not isinstance(gpu, Gpu | str | None):
        raise InvalidType(f"gpu is a {type(gpu).__qualname__}, it must be a Gpu, an alias such as 'h100', or None")
    target = gpu_by_alias(gpu) if isinstance(gpu, str) else gpu
    found = visible_gpus()
    if devices is not None:
        _check_devices(devices, found, mode)
    if target is None:
        if not found:
            missing = missing_device()
            raise NoGpu(f"{missing}. Name a GPU to predict for, e.g. h100")
        target = found[devices[0] if devices is not None else 0]
    if mode == "predict":
        return target, [], "prediction was asked for"
    equal = [index for index, each in enumerate(found) if each.key == target.key]
    if devices is not None:
        if others := [index for index in devices if index not in equal]:
            raise InvalidInput(
                f"device {others[0]} is {found[others[0]]}, and this run is for {target}: models are never mixed. "
                f"Devices here: {_listed(found)}"
            )
        return target, _units(devices, target), ""
    if equal:
        return target, _units(equal, target), ""
    reason = f"{target} is not in this machine. GPUs found: {_listed(found) if found else f'none ({missing_device()})'}"
    if mode == "measure":
        raise NoGpu(f"{reason}. Nothing was changed; mode predict works without the GPU")
    return target, [], reason


def _check_devices(devices: Sequence[int], found: Sequence[Gpu], mode: str) -> None:
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise InvalidType(f"devices={shown(devices)} must be a list of device numbers such as [0, 1], or None for all")
    if mode == "predict":
        raise InvalidInput(f"devices={shown(devices)}: mode predict uses no device")
    if not devices:
        raise InvalidInput("devices is empty: name at least one, or None for all")
    if wrong := [each for each in devices if isinstance(each, bool) or not isinstance(each, int)]:
        raise InvalidType(f"devices: {shown(wrong[0])} is not a device number")
    if not found:
        raise NoGpu(f"devices={shown(devices)}: {missing_device()}")
    if absent := [each for each in devices if not 0 <= each < len(found)]:
        raise InvalidInput(f"device {absent[0]} does not exist. Devices here: {_listed(found)}")
    if twice := [each for each, count in Counter(devices).items() if count > 1]:
        raise InvalidInput(f"device {twice[0]} is named twice: two workers on one device would measure each other")


def _units(devices: Sequence[int], gpu: Gpu) -> list[CudaUnit]:
    """The devices as units. Two that are one card are refused."""
    units = [CudaUnit(index, gpu, unit_uuid(index), is_open(index)) for index in devices]
    seen: dict[str, CudaUnit] = {}
    for unit in units:
        other = seen.setdefault(unit.uuid, unit)
        if other is not unit and unit.uuid:
            raise InvalidInput(
                f"devices {other.index} and {unit.index} are one card, {unit.uuid}: two workers on it would measure "
                f"each other. Name one of them with --devices"
            )
    return units


def _listed(found: Sequence[Gpu]) -> str:
    return ", ".join(f"{index} ({each})" for index, each in enumerate(found))


def _check(problems: Sequence[Problem], gpu: Gpu, names: Collection[str] | None) -> None:
    if not problems:
        raise InvalidInput("there is no problem to tune")
    for each in problems:
        if each.out_dtype:
            raise InvalidInput(f"{each}: out_dtype={each.out_dtype} is for references and is not tuned")
        eligible(each, gpu, names)


def _check_first(first: Sequence[Config], problems: Sequence[Problem], gpu: Gpu, names: Collection[str] | None) -> None:
    if isinstance(first, str) or not isinstance(first, Sequence):
        raise InvalidType(f"first={shown(first)} must be a list of configs")
    for config in first:
        if not isinstance(config, Config):
            raise InvalidType(f"first: {shown(config)} is not a config such as flashtune.plan(problem).config")
        if names is not None and config.family not in names:
            raise InvalidInput(f"first: {config} is of another family than families={shown(sorted(names))}")
        for problem in problems:
            if reason := unusable(config, problem, gpu):
                raise IllegalConfig(f"first: {config} for {problem} on {gpu}: {reason}")


def eligible(problem: Problem, gpu: Gpu, names: Collection[str] | None) -> list[AnyFamily]:
    """Families to search for ``problem``, the most specialised first; none raises :class:`UnsupportedProblem`."""
    if names is None:
        return supporting(problem.spec, gpu)
    wanted = [family(name) for name in names]
    found = [each for each in wanted if each.refuses(problem.spec, gpu) is None]
    if not found:
        reasons = "; ".join(f"{each.name}: {each.refuses(problem.spec, gpu)}" for each in wanted)
        raise UnsupportedProblem(f"{problem} on {gpu}: {reasons}")
    return found
