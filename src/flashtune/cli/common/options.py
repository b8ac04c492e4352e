"""Options that several commands share, and how they become values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashtune import settings
from flashtune.errors import InvalidInput
from flashtune.files import shown_path
from flashtune.tuner.results.budget import EFFORTS

if TYPE_CHECKING:
    from flashtune.codegen.gpu.gpu import Gpu
    from flashtune.codegen.problem.problem import Problem

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = ("float16", "bfloat16", "float32")
_REQUIRED = ("head_dim", "heads")


STDIN = Path("/dev/stdin")


class FileName(click.Path):
    """A file that a user names; for ``-`` the stream ``dash``, if that is given."""

    def __init__(self, *, exists: bool = False, dash: Path | None = None) -> None:
        super().__init__(exists=exists, dir_okay=False, path_type=Path)
        self._dash = dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value).strip():
            self.fail("must be the path of a file, and is empty", param, ctx)
        if settings.may_hold_password(str(value)):
            self.fail(
                "must be the path of a file, not the address of a server (a path like one: from / on)", param, ctx
            )
        if value == "-" and self._dash:
            return self._dash
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        return path


def _database(context: click.Context, option: click.Parameter, given: str | None) -> Path | None:
    if given is None:
        return None
    if not given.strip() or settings.may_hold_password(given):
        raise click.BadParameter("must be a path of a file system", context, option)
    return Path(given)


def _existing(context: click.Context, option: click.Parameter, given: str | None) -> Path | None:
    path = _database(context, option, given)
    return None if path is None else existing_database(path)


def existing_database(path: Path | None) -> Path:
    """``path``, or the default where it is None; `InvalidInput` where nothing is there."""
    path = path or settings.database_path()
    if not path.exists():
        raise InvalidInput(f"there is no tuning database at {shown_path(path)} yet; flashtune tune makes one")
    return path


def _database_option(check: Callable[..., Path | None]) -> Callable[[F], F]:
    kind = click.Path(dir_okay=False)
    return click.option(
        "--db", "database", type=kind, callback=check, help="Tuning database. [default: $FLASHTUNE_DB, see info]"
    )


new_database_option = _database_option(_database)
database_option = _database_option(_existing)
gpu_option = click.option("--gpu", help="GPU such as h100, a100 or rtx-4090; it need not be here. [default: the first]")


def _device_numbers(context: click.Context, option: click.Parameter, given: str) -> list[int] | None:
    if given.strip().lower() == "all":
        return None
    numbers = [each.strip() for each in given.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", each, re.ASCII) for each in numbers):
        raise click.BadParameter("must be all, or device numbers such as 0,1", context, option)
    return [int(each) for each in numbers]


devices_option = click.option(
    "--devices",
    default="all",
    show_default=True,
    metavar="0,1|all",
    callback=_device_numbers,
    help="CUDA devices that measure, each its share of the problems: all that are the GPU, or those named.",
)


ray_option = click.option(
    "--ray",
    metavar="auto|HOST:PORT",
    help="Measure on a Ray cluster instead: on all free GPUs that Ray has of the model --gpu, each its share of the "
    "problems. auto is the cluster that this machine is part of (ray start), or that RAY_ADDRESS names. Kernels are "
    "compiled here and results stored here; a node that is lost costs time alone. Each node needs flashtune: "
    'pip install "flashtune[cuda13,ray]".',
)


DEFAULT_EFFORT = "normal"


def budget_options(command: F) -> F:
    """``--effort`` and ``--budget``: how long the search goes on."""
    meanings = ", ".join(f"{name} ({text})" for name, text in EFFORTS.items())
    effort = click.option(
        "--effort",
        type=click.Choice(list(EFFORTS)),
        help=f"How long to search, by name: {meanings}, shared by the problems. --budget wins. "
        f"[default: {DEFAULT_EFFORT}]",
    )
    budget = click.option(
        "--budget", help="How long to search, exactly: a time (90s, 10m, 1h) or a number of trials (200)."
    )
    return effort(budget(command))


def chosen_budget(budget: str | None, effort: str | None) -> str:
    """The budget that the two options name."""
    return budget if budget is not None else EFFORTS[effort or DEFAULT_EFFORT]


def problem_options(command: F) -> F:
    """The flags that describe one problem, as keyword arguments of ``command``."""
    options = [
        click.option("--dtype", type=click.Choice(DTYPES), help="Of q, k, v and the output. [default: bfloat16]"),
        click.option("--head-dim", type=int, help="Columns of q and k: a multiple of 8 from 8 to 256."),
        click.option("--head-dim-v", type=int, help="Columns of v and the output, likewise. [default: as --head-dim]"),
        click.option("--batch", type=int, help="[default: 1]"),
        click.option("--seqlen", type=int, help="Queries and keys."),
        click.option("--seqlen-q", type=int, help="Queries, where they differ from keys."),
        click.option("--seqlen-k", type=int, help="Keys."),
        click.option("--heads", type=int, help="Query heads."),
        click.option("--heads-kv", type=int, help="Key and value heads. [default: as --heads]"),
        click.option("--causal/--full", default=None, help="Causal mask, aligned bottom-right. [default: full]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


PROBLEM_FLAGS = (
    "dtype", "head_dim", "head_dim_v", "batch", "seqlen", "seqlen_q", "seqlen_k", "heads", "heads_kv", "causal",
)  # fmt: skip


def take_problem(flags: dict[str, Any]) -> dict[str, Any]:
    """Removes the problem flags from ``flags``; those that were given."""
    taken = {name: flags.pop(name) for name in PROBLEM_FLAGS}
    return {name: value for name, value in taken.items() if value is not None}


def problem_from(given: dict[str, Any]) -> Problem:
    """The problem that the given flags describe."""
    from flashtune.codegen.problem.problem import Problem

    if {"seqlen", "seqlen_q", "seqlen_k"} <= given.keys():
        raise click.UsageError(
            "--seqlen is given beside both --seqlen-q and --seqlen-k: at most two of them are allowed"
        )
    if given.get("head_dim_v") == 0:  # a Problem takes it for the width of k; attention() refuses it
        raise click.UsageError("--head-dim-v 0 must be at least 8; leave it out where it is --head-dim")
    seqlen_q = given.get("seqlen_q", given.get("seqlen"))
    seqlen_k = given.get("seqlen_k", given.get("seqlen"))
    missing = [name for name in _REQUIRED if name not in given]
    if seqlen_q is None and seqlen_k is None:
        missing.append("seqlen")
    elif seqlen_q is None or seqlen_k is None:
        missing.append("seqlen_q" if seqlen_q is None else "seqlen_k")
    if missing or seqlen_q is None or seqlen_k is None:
        raise click.UsageError("the problem needs " + ", ".join("--" + name for name in missing).replace("_", "-"))
    return Problem(
        dtype=given.get("dtype", "bfloat16"),
        head_dim=given["head_dim"],
        batch=given.get("batch", 1),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=given["heads"],
        num_heads_kv=given.get("heads_kv", given["heads"]),
        causal=given.get("causal", False),
        head_dim_v=given.get("head_dim_v", 0),
    )


def gpu_from(name: str | None) -> Gpu:
    """The named GPU, or the first CUDA device."""
    from flashtune.codegen.gpu.devices import require_device
    from flashtune.codegen.gpu.table import gpu_by_alias

    return gpu_by_alias(name) if name is not None else require_device()
