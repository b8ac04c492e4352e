"""`noise`: how often finals on this machine call a difference where there is none, and what they can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.common.options import problem_from, problem_options, take_problem

if TYPE_CHECKING:
    from flashtune.codegen.gpu.gpu import Gpu
    from flashtune.tuner.commands.noise import Noise


@click.command()
@problem_options
@click.option("--device", type=click.IntRange(0), default=0, show_default=True, help="CUDA device.")
@click.option("--finals", type=click.IntRange(1, 10_000), default=40, show_default=True, help="A second at most.")
def noise(device: int, finals: int, **flags: Any) -> None:
    """Test how far measurements on this machine can be trusted.

    One config takes part in many short finals as two candidates. The command prints how often one of the two is called
    faster, and the smallest difference that such finals can tell. Without problem flags: one of the preset quick.

    \b
    Examples:
      flashtune noise
      flashtune noise --device 1 --finals 200
      flashtune noise --seqlen 512 --batch 32 --heads 32 --head-dim 64
    """
    from flashtune.tuner.commands.noise import noise as run
    from flashtune.tuner.tune.presets import preset

    given = take_problem(flags)
    problem = problem_from(given) if given else preset("quick")[0]
    found, gpu = run(problem, device, finals=finals, progress=lambda each: click.echo(each.text, err=True))
    print_noise(found, gpu)


def print_noise(found: Noise, gpu: Gpu) -> None:
    """The answer in five lines, and what disturbed it."""
    from flashtune.cli.common.tables import config_text, milliseconds

    finals = len(found.ratios)
    rounds = sorted(each.rounds for each in found.ratios)
    click.echo(f"{found.problem} on {gpu}: {config_text(found.config)}, {milliseconds(found.seconds)}")
    click.echo(f"{finals} finals of {rounds[0]} to {rounds[-1]} rounds, one config as both candidates")
    chance = f"up to {found.expected_most} are chance, at 5 % each"
    click.echo(f"false wins: {found.false_wins} of {finals} ({100 * found.false_win_rate:.1f} %; {chance})")
    click.echo(f"interval: +-{100 * found.half_width:.2f} % of the time, median over finals")
    click.echo(f"smallest difference that 95 % of the finals tell: {100 * found.smallest_difference:.2f} %")
    for reason, count in found.flagged.most_common():
        click.echo(f"{count} finals were flagged: {reason}")
    if found.note:
        click.echo(f"Note: {found.note}")
    if found.false_wins > found.expected_most:
        click.echo("That is too often: something else uses this machine, or its clock moves while rounds are measured.")
