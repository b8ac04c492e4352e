"""`flashtune tune` without its tuner: what was asked is kept, and a report is given that depends on nothing."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from dataclasses import replace
from typing import Any

from command_line import run

from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.results.report import Progress, Report, Row
from flashtune.tuner.tune import session

H100 = gpu_by_alias("h100")
ONE = Problem(dtype="bfloat16", head_dim=64, batch=1, seqlen_q=256, seqlen_k=256, num_heads=4, num_heads_kv=4)
TWO = replace(ONE, seqlen_q=512, seqlen_k=512, causal=True)
SIGNATURE = inspect.signature(session.tune)
"""Of the real one, which takes nothing else."""


class Tuner:
    """Stands in for `tuner.session.tune`: keeps what it was asked, and reports the default for each problem."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.changes: dict[str, Any] = {}

    def __call__(self, problems: list[Problem], gpu: Any, **options: Any) -> Report:
        SIGNATURE.bind(problems, gpu, **options)
        self.asked.append({"problems": list(problems), **options})
        options["progress"](Progress(0.5, "half of it"))
        rows = tuple(
            Row(problem=each, config=default_config(each, H100), seconds=1e-3, ratio=0.9, tried=3) for each in problems
        )
        made = Report(gpu=H100, measured=True, rows=rows, session="s", seconds=2.0, rejected=Counter(big=7))
        return replace(made, **self.changes)

    @property
    def problems(self) -> list[Problem]:
        (once,) = self.asked
        return list(once["problems"])


call = functools.partial(run, "tune", "--gpu", "h100")
