"""Which problems `flashtune tune` is for: a preset, the flags of one problem, a file, or what was captured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.common.options import STDIN, F, FileName, problem_from, take_problem

if TYPE_CHECKING:
    from flashtune.codegen.problem.problem import Problem

DEFAULT_PRESET = "quick"


def source_options(command: F) -> F:
    """The options that say which problems are tuned, besides the flags of one."""
    options = [
        click.option(
            "--preset",
            help="Set of problems: quick, grid, wide, llm or models. [default: quick, if nothing else is named]",
        ),
        click.option(
            "--problems",
            "problem_file",
            type=FileName(exists=True, dash=STDIN),
            metavar="FILE",
            help='Problems from a JSON file, [{"seqlen": 4096, "heads": 32, "head_dim": 128}, ...], with the names of '
            "the flags below (head_dim for --head-dim) and their defaults; or from .yaml, if PyYAML is installed. "
            "- is standard input.",
        ),
        click.option(
            "--captured",
            is_flag=True,
            help="Problems that attention() had no tuned config for, as recorded where FLASHTUNE_CAPTURE=1 is set.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def asked_problems(
    flags: dict[str, Any], preset_name: str | None, problem_file: Path | None, captured: bool
) -> Sequence[Problem] | None:
    """The problems that the options name; None for the captured ones, which depend on the GPU.

    Takes the problem flags out of ``flags``. Two sources at once are a usage error.
    """
    given = take_problem(flags)
    named = {
        "--preset": preset_name is not None,
        "--problems": problem_file is not None,
        "--captured": captured,
        "the flags of one problem": bool(given),
    }
    both = [name for name, is_given in named.items() if is_given]
    if len(both) > 1:
        raise click.UsageError(
            f"give {' or '.join(both)}, not both" if len(both) == 2 else f"give one of {', '.join(both)}"
        )
    if captured:
        return None
    if given:
        return [problem_from(given)]
    if problem_file is not None:
        from flashtune.tuner.tune.problem_file import read_problem_file

        return read_problem_file(problem_file)
    from flashtune.tuner.tune.presets import preset

    return preset(DEFAULT_PRESET if preset_name is None else preset_name)
