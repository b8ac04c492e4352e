"""The rest of the public face: what would be launched, why, compiling ahead, and tuning."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flashtune.call.arrays import forget
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.plan import Plan
from flashtune.codegen.problem.problem import Problem

from .errors import InvalidInput, InvalidType, LaunchError
from .files import shown_path
from .values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from flashtune.codegen.compiler.nvrtc import Compiled
    from flashtune.codegen.plan.config import Config
    from flashtune.tuned_db.lookup.lookup import Choice
    from flashtune.tuner.results.budget import Budget
    from flashtune.tuner.results.report import Progress, Report
    from flashtune.tuner.tune.session import Mode


def plan(problem: Problem, gpu: Gpu | str | None = None) -> Plan:
    """The plan that ``attention()`` launches for ``problem``: config, kernels with their source, grid and memory.

    ``gpu`` is a `Gpu`, an alias such as ``"h100"`` (no GPU is needed then), or None for the current CUDA device
    (:class:`NoGpu` where there is none).

    Example:
        >>> import flashtune
        >>> problem = flashtune.Problem(
        ...     dtype="float16", head_dim=64, batch=1, seqlen_q=128, seqlen_k=128, num_heads=8, num_heads_kv=8
        ... )
        >>> print(flashtune.plan(problem, "h100").problem)
        float16 d64 b1 s128 h8
    """
    from flashtune.call.choose import chosen_plan

    _check_problem(problem)
    return chosen_plan(problem, _gpu(gpu))


def explain(problem: Problem, gpu: Gpu | str | None = None) -> Choice:
    """The config that ``attention()`` picks for ``problem`` and the reason; its text is for people.

    ``gpu`` as for :func:`plan`.
    """
    from flashtune.tuned_db.lookup.lookup import find

    _check_problem(problem)
    return find(problem, _gpu(gpu))


def choices_digest(
    problems: Problem | Iterable[Problem] | None = None,
    gpu: Gpu | str | None = None,
    *,
    database: str | Path | None = None,
) -> str:
    """64 hexadecimal digits that say which kernels ``attention()`` chooses: the same on all ranks of a job, or they run
    different ones.

    They cover the GPU model and, for each problem, the family, config and source. The same choices give the same
    digest, whatever measurements they follow from, in any process and on any machine.

    Args:
        problems: Those that count; None is all that the database and the measurements that ship with flashtune have a
            usable row of, for GPUs of that compute capability.
        gpu: As for :func:`plan`.
        database: The SQLite file; None is the one of the settings (``FLASHTUNE_DB``), if it is there.

    Raises:
        InvalidInput, InvalidType, UnsupportedProblem, UnknownGpu, NoGpu, StoreError: a database that can't be used is
            passed over by ``attention()``, but not here.

    Example:
        >>> import flashtune
        >>> problem = flashtune.Problem(
        ...     dtype="float16", head_dim=64, batch=1, seqlen_q=128, seqlen_k=128, num_heads=8, num_heads_kv=8
        ... )
        >>> len(flashtune.choices_digest(problem, "h100"))
        64
    """
    from pathlib import Path

    from flashtune.tuned_db.lookup.choices import choices

    from .settings import database_path

    wanted = [problems] if isinstance(problems, Problem) else None if problems is None else list(problems)
    for each in wanted or ():
        _check_problem(each)
    if not isinstance(database, str | os.PathLike | None):
        raise InvalidType(f"database={shown(database)} must be a path, or None for that of the settings")
    path = database_path() if database is None else Path(database)
    if database is not None and not path.exists():
        raise InvalidInput(
            f"there is no tuning database at {shown_path(path)}: pass another path, or None for that of the settings"
        )
    return choices(_gpu(gpu), wanted, database=path).digest


def compile(problem: Problem, gpu: Gpu | str | None = None) -> tuple[Compiled, ...]:
    """Builds what ``attention()`` launches for ``problem`` into the disk cache, one `Compiled` per kernel.

    ``gpu`` as for :func:`plan`. With None the kernels are loaded on the current device too: a first call of
    ``attention()`` then neither compiles nor loads, and may be captured in a CUDA graph.
    """
    from flashtune.call.choose import chosen_plan, plan_for
    from flashtune.codegen.compiler.kernel_cache import compiled

    _check_problem(problem)
    target = _gpu(gpu)
    if gpu is None:
        from flashtune.call.gpu_arrays import cold
        from flashtune.call.layer import CudaLayer

        layer = CudaLayer.shared()
        device = layer.current_device()
        with cold, layer.guard(device):
            loaded = plan_for(problem, target, None, lambda found: layer.load(found, device, capturing=False))
        return loaded.compiled
    return tuple(compiled(kernel.source, target.arch) for kernel in chosen_plan(problem, target).kernels)


def tune(
    problems: Problem | Iterable[Problem],
    gpu: Gpu | str | None = None,
    *,
    mode: Mode = "auto",
    devices: Sequence[int] | None = None,
    database: str | Path | None = None,
    budget: Budget | str = "120s",
    seed: int = 0,
    families: Collection[str] | None = None,
    sampler: str = "residual",
    first: Sequence[Config] = (),
    progress: Callable[[Progress], None] | None = None,
    ray: str | None = None,
) -> Report:
    """Searches configs for ``problems`` and stores what is found; ``attention()`` uses the winners at once.

    With ``gpu`` at hand (None: the first CUDA device) configs are checked and timed. Without it, mode ``"auto"``
    compiles the most promising ones for it and stores predictions, which are never called measured; ``"measure"``
    raises :class:`NoGpu`; ``"predict"`` never measures. Running it again goes on where it ended.

    Args:
        devices: CUDA devices that measure, each its share of the problems, such as ``[0, 1]``; None is all that are
            ``gpu``. They must be of one model.
        database: The SQLite file; None is the one of the settings (``FLASHTUNE_DB``).
        budget: A time such as ``"10m"``, a count of trials such as ``"200"``, or one of ``"quick"``, ``"normal"`` and
            ``"full"``; shared by the problems.
        families: Search only these kernel families.
        sampler: What proposes the configs that are measured: ``"residual"`` learns what the time model is off by;
            ``"tpe"`` is Optuna's, ``"random"`` knows no model, ``"exhaustive"`` takes all in the model's order, and
            ``"optuna:<class>"`` is a class of ``optuna.samplers``. A prediction needs none.
        first: Configs that are measured before any other, such as ``[flashtune.plan(problem).config]``; each must be
            legal for each problem.
        progress: Called with each step.
        ray: ``"auto"`` or ``"host:port"``: the GPUs measure that a Ray cluster has of the model ``gpu``, instead of
            those here (needs the extra ``ray``).

    Raises:
        InvalidInput, InvalidType, IllegalConfig, UnsupportedProblem, UnknownGpu, NoGpu, MissingDependency, StoreError:
            before anything is changed.

    Example:
        >>> import flashtune
        >>> problem = flashtune.Problem(
        ...     dtype="float16", head_dim=64, batch=1, seqlen_q=512, seqlen_k=512, num_heads=8, num_heads_kv=8
        ... )
        >>> report = flashtune.tune(problem, "h100", budget="20")  # doctest: +SKIP
    """
    from flashtune.tuner.results.budget import Budget
    from flashtune.tuner.tune.session import tune as run

    wanted = list(problems) if isinstance(problems, Iterable) else [problems]
    for each in wanted:
        _check_problem(each)
    _check_gpu(gpu)
    if not isinstance(budget, Budget | str):
        raise InvalidType(f"budget={shown(budget)} must be a Budget, a time such as '10m' or a count such as '200'")
    if not isinstance(seed, int):
        raise InvalidType(f"seed={shown(seed)} must be an int")
    if isinstance(families, str):
        raise InvalidType(f"families={shown(families)} must be a collection of names, such as [{shown(families)}]")
    try:
        return run(
            wanted,
            gpu,
            mode=mode,
            devices=devices,
            database=database,
            budget=budget,
            seed=seed,
            families=families,
            sampler=sampler,
            first=first,
            progress=progress,
            ray=ray,
        )
    finally:
        forget()


def _check_problem(problem: object) -> None:
    if not isinstance(problem, Problem):
        raise InvalidType(f"problem is a {type(problem).__qualname__}, it must be a flashtune.Problem")


def _check_gpu(gpu: object) -> None:
    if not isinstance(gpu, Gpu | str | None):
        raise InvalidType(f"gpu is a {type(gpu).__qualname__}, it must be a Gpu, an alias such as 'h100', or None")


def _gpu(gpu: Gpu | str | None) -> Gpu:
    _check_gpu(gpu)
    if isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, str):
        return gpu_by_alias(gpu)
    from flashtune.codegen.gpu.cuda import runtime
    from flashtune.codegen.gpu.devices import gpu_of_device, require_device

    require_device()
    try:
        return gpu_of_device(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        raise LaunchError.of("the current CUDA device", error) from error
