"""The command line. It parses and prints; everything else is a call into the package, imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.common.group import Commands
from flashtune.cli.common.options import (
    budget_options,
    chosen_budget,
    database_option,
    devices_option,
    gpu_from,
    gpu_option,
    new_database_option,
    problem_from,
    problem_options,
    ray_option,
    take_problem,
)
from flashtune.cli.db.exchange import db
from flashtune.cli.db.verify import verify
from flashtune.cli.tune.noise import noise
from flashtune.cli.tune.optuna_export import export_optuna
from flashtune.cli.tune.problems import asked_problems, source_options

from .emulate import emulate

if TYPE_CHECKING:
    from flashtune.codegen.problem.problem import Problem


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from .show import own_version

        click.echo(f"flashtune {own_version()}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command explains itself with examples: flashtune tune --help\n\n"
    "Exit codes: 0 done, 1 failed, 2 misused, 130 after Ctrl-C. A command that gives them another meaning says so.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="And exit.")
def main() -> None:
    """Exact attention kernels: generated, compiled, tuned and served in your process.

    \b
    flashtune tune --gpu h100          tune a small set of problems, or predict without the GPU
    flashtune explain --gpu h100 --seqlen 4096 --heads 16 --head-dim 128
                                       which config attention() would run, and why
    """


@main.command()
@gpu_option
@source_options
@problem_options
@budget_options
@click.option(
    "--mode",
    type=click.Choice(["auto", "measure", "predict"]),
    default="auto",
    show_default=True,
    help="auto measures if the GPU is here and predicts otherwise; measure refuses otherwise; predict never measures.",
)
@devices_option
@ray_option
@click.option("--family", "families", multiple=True, help="Search only this kernel family. May be repeated.")
@click.option(
    "--sampler",
    default="residual",
    show_default=True,
    metavar="NAME",
    help="What proposes the configs that are measured: residual learns what the time model is off by; tpe is Optuna's; "
    "random knows no model; exhaustive takes all in the model's order; optuna:NAME is a class of optuna.samplers. "
    "A prediction needs none.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the search.")
@new_database_option
@click.option(
    "--shared-config",
    "share",
    is_flag=True,
    help="Also name the one config that serves all problems best (they may differ in sizes alone): the least geometric "
    "mean of its time relative to each problem's best, of the configs known for all of them.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the report as one JSON document, and nothing else on stdout."
)
def tune(
    gpu: str | None,
    preset: str | None,
    problem_file: Path | None,
    captured: bool,
    budget: str | None,
    effort: str | None,
    mode: str,
    devices: list[int] | None,
    ray: str | None,
    families: tuple[str, ...],
    sampler: str,
    seed: int,
    database: Path | None,
    share: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Search the fastest configs and store them.

    With the GPU at hand, candidates are checked for correctness and timed, on all GPUs of that model side by side.
    Without it they are compiled for it and ranked by a model, and nothing is called measured. Ctrl-C keeps what was
    found; the same command goes on later.

    The exit code is 0 if each problem has got a config, 1 if one has none or the run could not go on, 130 after Ctrl-C.

    \b
    Examples:
      flashtune tune                                   the GPUs here, a small set of problems, two minutes
      flashtune tune --gpu h200 --preset grid --budget 10m
      flashtune tune --seqlen 4096 --heads 32 --heads-kv 8 --head-dim 128 --causal --budget 200
      flashtune tune --problems mine.json --effort full --json > report.json
      flashtune tune --captured                        what attention() was asked for with FLASHTUNE_CAPTURE=1
      flashtune tune --gpu h100 --mode measure         fails where there is no H100
      flashtune tune --sampler exhaustive --budget 8h  all configs in the order of the model, or until the time is up
      flashtune tune --sampler optuna:NSGAIISampler    another of Optuna's own samplers
      flashtune tune --devices 2,3 --preset grid       on these two GPUs, which must be of one model
      flashtune tune --gpu h100 --ray auto             on all free H100s of the Ray cluster
    """
    if ray is not None and devices is not None:
        raise click.UsageError("--devices are those of this machine; with --ray the cluster measures: give one of them")
    if ray is not None and gpu is None:
        raise click.UsageError("--ray needs --gpu: the model to ask Ray for, such as h100")
    problems: Sequence[Problem] | None = None
    try:
        problems = asked_problems(flags, preset, problem_file, captured)
        from flashtune.cli.tune.command import run_tune

        run_tune(
            gpu,
            problems,
            budget=chosen_budget(budget, effort),
            mode=mode,
            devices=devices,
            ray=ray,
            families=families or None,
            sampler=sampler,
            seed=seed,
            database=database,
            share=share,
            as_json=as_json,
            source=problem_file,
        )
    except KeyboardInterrupt:  # before there was a report, which a run gives that has begun
        if as_json:
            from flashtune.cli.tune.json_report import interrupted_json
            from flashtune.settings import database_path

            click.echo(interrupted_json(problems or (), str(database or database_path())), nl=False)
        raise


@main.command(name="list")
@click.option("--gpu", help="Only this GPU.")
@database_option
def list_(gpu: str | None, database: Path | None) -> None:
    """List the best stored config of each problem.

    \b
    Examples:
      flashtune list
      flashtune list --gpu h100 --db team.db
    """
    from .show import show_list

    show_list(gpu, database)


@main.command()
@gpu_option
@problem_options
@database_option
@click.option("--json", "as_json", is_flag=True, help="Print all of it as one JSON document.")
def explain(gpu: str | None, database: Path | None, as_json: bool, **flags: Any) -> None:
    """Say which config attention() would run for a problem, why, and how far that can be trusted.

    What a final of one tuning session says is a candidate; it is verified once a session of another day or another
    card agrees, and disputed while fewer than half of such sessions agree. The last line says what would improve it.

    \b
    Examples:
      flashtune explain --seqlen 4096 --heads 16 --head-dim 128 --causal
      flashtune explain --gpu h100 --seqlen-q 1 --seqlen-k 8192 --heads 32 --heads-kv 8 --head-dim 128
      flashtune explain --gpu h100 --seqlen 4096 --heads 16 --head-dim 192 --head-dim-v 128 --causal
      flashtune explain --gpu h100 --seqlen 4096 --heads 16 --head-dim 128 --json
    """
    from .explain import show_explain

    show_explain(problem_from(take_problem(flags)), gpu_from(gpu), database, as_json)


@main.command()
@gpu_option
@problem_options
@click.option("--family", help="Kernel family. [default: what attention() would use]")
@click.option("--config", "settings", help="Parameters that differ from the family's default: block_m=64,num_warps=4")
@click.option("--lines", is_flag=True, help="Keep the #line directives that name template files.")
@database_option
def source(
    gpu: str | None, family: str | None, settings: str | None, lines: bool, database: Path | None, **flags: Any
) -> None:
    """Print the CUDA source that is generated for a problem.

    \b
    Examples:
      flashtune source --gpu h100 --seqlen 4096 --heads 16 --head-dim 128 > kernel.cu
      flashtune source --gpu a100 --seqlen 512 --heads 8 --head-dim 64 --family sm80_fwd --config block_n=32
    """
    from .show import show_source

    problem, target = problem_from(take_problem(flags)), gpu_from(gpu)
    show_source(problem, target, family, settings, lines, database)


db.add_command(verify)
main.add_command(db)
main.add_command(emulate)
main.add_command(export_optuna)
main.add_command(noise)


@main.command()
def info() -> None:
    """Show versions, GPUs, paths and settings.

    \b
    Example:
      flashtune info
    """
    from .show import show_info

    show_info()
