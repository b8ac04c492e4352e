"""`emulate`: one problem through a generated kernel on the CPU, and what float64 says of the result."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.common.options import problem_from, problem_options, take_problem

if TYPE_CHECKING:
    from flashtune.codegen.problem.problem import Problem


@click.command()
@problem_options
@click.option("--gpu", default="h200", show_default=True, help="GPU whose limits the config must keep; none is used.")
@click.option("--family", help="Kernel family. [default: the fastest by prediction]")
@click.option("--config", "parameters", help="Parameters that differ from the family's default: block_m=64,num_warps=4")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Of inputs and thread order. [default: random]")
@click.option("--timeout", type=click.IntRange(1, 86400), default=600, show_default=True, help="Seconds.")
def emulate(gpu: str, family: str | None, parameters: str | None, seed: int | None, timeout: int, **flags: Any) -> None:
    """Run a generated kernel on the CPU, for a small problem with random inputs.

    The source that a GPU would get is compiled by the C++ compiler at hand, run thread by thread, and compared with
    float64. Races, missing waits, and accesses out of bounds are reported with the lines of the templates.

    \b
    Examples:
      flashtune emulate --seqlen 130 --heads 2 --head-dim 64 --causal
      flashtune emulate --seqlen-q 33 --seqlen-k 257 --heads 4 --heads-kv 2 --head-dim 128 \\
                        --config block_m=64,block_n=32,num_stages=2 --seed 7
    """
    problem = problem_from(take_problem(flags))
    _run(problem, gpu, family, parameters, secrets.randbits(32) if seed is None else seed, timeout)


def _run(
    problem: Problem, gpu_name: str, family_name: str | None, parameters: str | None, seed: int, timeout: int
) -> None:
    import numpy as np

    from flashtune.codegen.gpu.table import gpu_by_alias
    from flashtune.codegen.problem.reference import rounded
    from flashtune.codegen.problem.tolerance import attention_tolerances
    from flashtune.emulator import emulate as run

    from .show import asked_config

    gpu = gpu_by_alias(gpu_name)
    config = asked_config(problem, gpu, family_name, parameters)
    draw = np.random.default_rng(seed)
    q, k, v = (rounded(draw.standard_normal(shape, dtype=np.float32), problem.dtype) for shape in problem.shapes[:3])
    click.echo(f"{problem}: {config}, seed {seed}")
    result = run(problem, config, q, k, v, seed=seed, gpu=gpu, processes=os.cpu_count() or 1, timeout=timeout)
    click.echo(f"built in {result.build_seconds:.2f} s, ran in {result.run_seconds:.2f} s")
    allowed = attention_tolerances(q, k, v, causal=problem.causal, dtype=problem.dtype)
    verdicts = [tolerance.judge(ours) for tolerance, ours in zip(allowed, (result.out, result.lse), strict=True)]
    for name, verdict in zip(("out", "LSE"), verdicts, strict=True):
        click.echo(f"{name}: {verdict}")
    if not all(verdicts):
        raise click.exceptions.Exit(1)
