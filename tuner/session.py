"""`tune()`: measures where the asked GPU is at hand, else predicts for it. Decides nothing about single configs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from flashtune.codegen.device import missing_device, visible_gpus
from flashtune.codegen.family import Family, family, supporting
from flashtune.codegen.gpu import Gpu, gpu_by_alias
from flashtune.codegen.problem import Problem
from flashtune.errors import InvalidInput, InvalidType, NoGpu, UnsupportedProblem
from flashtune.settings import database_path
from flashtune.tuned_db.store import Store

from .budget import Budget, parse_budget
from .build import ProcessBuilder, cores
from .measured import measure_problems
from .predicted import predict_problems
from .report import Progress, Report

Mode = Literal["auto", "measure", "predict"]
DEFAULT_BUDGET = "120s"


def tune(
    problems: Sequence[Problem],
    gpu: Gpu | str | None = None,
    *,
    mode: Mode = "auto",
    database: str | Path | None = None,
    budget: Budget | str = DEFAULT_BUDGET,
    seed: int = 0,
    families: Collection[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Searches configs for ``problems`` and stores all that is found out; running it again goes on where it ended.

    ``gpu`` is a `Gpu`, an alias such as ``"h100"``, or None for the first CUDA device. With that GPU at hand configs
    are checked and timed. Without it, mode ``auto`` compiles the most promising configs for it and stores predictions,
    which are never called measured; mode ``measure`` raises :class:`NoGpu`. ``predict`` never measures.
    ``budget`` is shared by the problems. ``families`` limits the search to these kernel families.

    Ctrl-C ends the run early with what is known; every result was stored when it was found. Bad input raises before
    the database is touched.
    """
    if mode not in ("auto", "measure", "predict"):
        raise InvalidInput(f"mode={str(mode)[:40]!r} is not known. Known: auto, measure, predict")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InvalidInput(f"seed={str(seed)[:40]} must be a whole number from 0 to 2**32 - 1")
    if isinstance(families, str):
        raise InvalidType(f"families={families[:40]!r} is text, it must be a collection of names")
    limit = parse_budget(budget)
    target, index, reason = locate(gpu, mode)
    wanted = list(dict.fromkeys(problems))
    _check(wanted, target, families)
    with Store.open(database_path() if database is None else database) as store:
        report = progress or (lambda _: None)

        def served_by(problem: Problem) -> list[Family]:
            return eligible(problem, target, families)

        if index is None:
            builder = ProcessBuilder(target.arch, cores())
            try:
                return predict_problems(wanted, target, store, builder, limit, served_by, report, note=reason)
            finally:
                builder.close()
        from .bench import DeviceBench

        bench = DeviceBench(index, target)
        builder = ProcessBuilder(target.arch, max(1, cores() - 1))
        try:
            return measure_problems(wanted, target, store, bench, builder, limit, seed, served_by, report)
        finally:
            builder.close()


def locate(gpu: Gpu | str | None, mode: str) -> tuple[Gpu, int | None, str]:
    """The `Gpu` meant, the CUDA device that is one (None if nothing is to be measured), and why there is none.

    Raises :class:`NoGpu` where ``mode`` or a missing name needs a device.
    """
    if not isinstance(gpu, Gpu | str | None):
        raise InvalidType(f"gpu is a {type(gpu).__qualname__}, it must be a Gpu, an alias such as 'h100', or None")
    found = visible_gpus()
    if gpu is None:
        if not found:
            missing = missing_device()
            raise NoGpu(f"{missing}. Name a GPU to predict for, e.g. h100")
        target = found[0]
    else:
        target = gpu_by_alias(gpu) if isinstance(gpu, str) else gpu
    if mode == "predict":
        return target, None, "prediction was asked for"
    index = next((index for index, each in enumerate(found) if each.key == target.key), None)
    if index is not None:
        return target, index, ""
    listed = ", ".join(each.name for each in found) if found else f"none ({missing_device()})"
    reason = f"{target} is not in this machine. GPUs found: {listed}"
    if mode == "measure":
        raise NoGpu(f"{reason}. Nothing was changed; mode predict works without the GPU")
    return target, None, reason


def _check(problems: Sequence[Problem], gpu: Gpu, names: Collection[str] | None) -> None:
    if not problems:
        raise InvalidInput("there is no problem to tune")
    for each in problems:
        if each.out_dtype:
            raise InvalidInput(f"{each}: out_dtype={each.out_dtype} is for references and is not tuned")
        eligible(each, gpu, names)


def eligible(problem: Problem, gpu: Gpu, names: Collection[str] | None) -> list[Family]:
    """Families to search for ``problem``, preferred first; none raises :class:`UnsupportedProblem`."""
    if names is None:
        return supporting(problem.spec, gpu)
    wanted = [family(name) for name in names]
    found = [each for each in wanted if each.unsupported(problem.spec, gpu) is None]
    if not found:
        reasons = "; ".join(f"{each.name}: {each.unsupported(problem.spec, gpu)}" for each in wanted)
        raise UnsupportedProblem(f"{problem} on {gpu}: {reasons}")
    return found
