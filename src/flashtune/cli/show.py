"""`list`, `source` and `info`: they read and print, and change nothing."""

from __future__ import annotations

import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from flashtune import settings
from flashtune.cli.common.options import existing_database
from flashtune.cli.common.tables import config_text, console, milliseconds, table
from flashtune.errors import FlashtuneError, InvalidInput
from flashtune.files import shown_path

if TYPE_CHECKING:
    from flashtune.codegen.gpu.gpu import Gpu
    from flashtune.codegen.plan.config import Config
    from flashtune.codegen.problem.problem import Problem

PACKAGES = ("numpy", "jinja2", "optuna", "sqlalchemy", "alembic", "cupy-cuda13x", "cupy-cuda12x", "torch")


def show_list(gpu_name: str | None, database: Path | None) -> None:
    from flashtune.codegen.gpu.table import gpu_by_alias
    from flashtune.tuned_db.lookup.lookup import source_digest
    from flashtune.tuned_db.store.queries import count_unreadable
    from flashtune.tuned_db.store.store import Store

    gpu = gpu_by_alias(gpu_name) if gpu_name is not None else None
    wanted = gpu.key if gpu else None
    path = existing_database(database)
    out = console()
    with Store.open(path, create=False, readonly=True) as opened, opened.snapshot() as store:
        keys = [wanted] if wanted else store.gpu_keys()
        measured = table("GPU", "problem", "best config", "time", "vs default", "stage", "date", title="Measured")
        for key in keys:
            for problem in store.problems(gpu_key=key):
                current = store.winner(problem, key, partial(source_digest, problem.spec))
                best = current or store.winner(problem, key)
                if best is None:
                    continue
                row = best.measurement
                stage = row.stage if current else f"{row.stage}, older source"
                ratio = "-" if best.ratio is None else f"{best.ratio:.3f}"
                time = milliseconds(best.median_us / 1e6)
                cells = (row.gpu_name, str(problem), config_text(best.config), time, ratio, stage, row.created[:10])
                measured.add_row(*(Text(cell) for cell in cells))
        predicted = table("GPU", "problem", "best config", "predicted", "date", title="Predicted, not measured")
        for each in store.predictions(gpu_key=wanted):
            if each.rank == 1:
                time = milliseconds(each.predicted_us / 1e6)
                texts = (each.gpu_name, str(each.problem), config_text(each.config), time, each.created[:10])
                predicted.add_row(*(Text(cell) for cell in texts))
        with count_unreadable() as unreadable:
            store.measurements(gpu_key=wanted)
            store.predictions(gpu_key=wanted)
    for shown in (measured, predicted):
        if shown.row_count:
            out.print(shown)
    if unreadable.rows:
        out.print(Text(f"{unreadable}: {shown_path(path)}"))
    elif not measured.row_count and not predicted.row_count:
        out.print(Text(f"Nothing is stored{f' for {gpu} ({gpu.key})' if gpu else ''} in {shown_path(path)}"))


def show_source(
    problem: Problem, gpu: Gpu, family_name: str | None, parameters: str | None, lines: bool, database: Path | None
) -> None:
    from flashtune.codegen.families.registry import family
    from flashtune.tuned_db.lookup.lookup import find

    if family_name is None and parameters is None:
        config = find(problem, gpu, store_path=database).config
    else:
        config = asked_config(problem, gpu, family_name, parameters)
    plan = family(config.family).plan(problem, config, gpu)
    click.echo(f"// {problem} on {gpu}: {config}")
    for kernel in plan.kernels:
        click.echo(kernel.source.expanded() if lines else kernel.source.readable(), nl=False)


def show_info() -> None:
    from flashtune.codegen.gpu.devices import device_facts, missing_device, visible_gpus

    out = console()
    versions = table("what", "version", title="Versions")
    versions.add_row("flashtune", own_version() or "not installed, used from a checkout")
    versions.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        if found := _version_of(name):
            versions.add_row(name, found)
    versions.add_row("nvrtc", _nvrtc())
    out.print(versions)

    gpus = table("device", "GPU", "key", "driver", "unit", title="GPUs")
    for index, gpu in enumerate(visible_gpus()):
        facts = device_facts(index)
        gpus.add_row(str(index), gpu.name, gpu.key, f"{facts.driver} (CUDA {facts.cuda_driver})", facts.uuid)
    if gpus.row_count:
        out.print(gpus)
    else:
        out.print(Text(f"GPUs: none. {missing_device()}"))

    paths = table("path", "value", "exists", title="Paths")
    places = (
        ("database", settings.database_path()),
        ("cache", settings.cache_dir()),
        ("captured problems", settings.capture_path() or settings.captured_problems_path()),
    )
    for label, path in places:
        paths.add_row(Text(label), Text(shown_path(path)), "yes" if path.exists() else "not yet")
    out.print(paths)

    variables = table("variable", "value", "meaning", title="Settings")
    for each in settings.SETTINGS:
        variables.add_row(
            each.name, Text(settings.presentable(each.name) or "not set"), f"{each.meaning} {each.default}"
        )
    out.print(variables)


def own_version() -> str:
    return _version_of("flashtune")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _nvrtc() -> str:
    from flashtune.codegen.compiler.nvrtc import nvrtc_version

    try:
        return nvrtc_version()
    except FlashtuneError as error:
        return str(error)


def asked_config(problem: Problem, gpu: Gpu, family_name: str | None, text: str | None) -> Config:
    """The default with the parameters that ``text`` gives; without a family, that of one that has all of them."""
    from flashtune.codegen.families.registry import default_config, family, supporting

    if family_name is not None:
        return changed_config(default_config(problem, gpu, [family(family_name)]), text)
    names = {part.partition("=")[0].strip() for part in filter(None, (text or "").split(","))}
    kinds = [
        each
        for each in supporting(problem.spec, gpu)
        if names <= {parameter.name for parameter in each.config_type.parameters()}
    ]
    return changed_config(default_config(problem, gpu, kinds), text)


def changed_config(config: Config, text: str | None) -> Config:
    """``config`` with the parameters that ``text`` (``block_m=64,num_warps=4``) gives."""
    data: dict[str, Any] = {each.name: getattr(config, each.name) for each in config.parameters()}
    known = {each.name: each for each in config.parameters()}
    given: set[str] = set()
    for part in filter(None, (text or "").split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise InvalidInput(f"{config.family} has no parameter {name[:40]!r}. Known: {', '.join(known)}")
        if name in given:
            raise InvalidInput(f"{name} is given twice")
        given.add(name)
        choices = {str(choice).lower(): choice for choice in known[name].choices}
        if value.lower() not in choices:
            raise InvalidInput(f"{name}={value[:40]!r} is not allowed. Allowed: {', '.join(choices)}")
        data[name] = choices[value.lower()]
    return type(config).from_json(data)
