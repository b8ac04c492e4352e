"""A kernel family: its config, what it supports, which configs are legal, and how it is launched."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from flashtune.codegen.compiler.render import Source, templates
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.plan.plan import Kernel, Plan, TensorBox
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import IllegalConfig, UnsupportedProblem

from .counts import Work
from .model import CONSTANTS, CompilerFacts, Constants, Estimate, predict_by_counts
from .resources import Resources

MAX_GRID_X = 2**31 - 1
MAX_HEAD_DIM = 256


C = TypeVar("C", bound=Config)


class Family(ABC, Generic[C]):
    """One kernel family, with configs of the type ``C``. Its stem names the template, the rules, tests and goldens.

    Whether it serves something is three questions, each of which holds the one before: :meth:`refuses` a spec,
    :meth:`refuses_config` for a spec, :meth:`unusable` for a problem with its sizes. A family answers its part of them
    by :meth:`unsupported`, :meth:`illegal` and :meth:`unfit`, which nobody else calls.
    """

    name: str
    last_resort: bool = False
    """Whether it is for what no other family serves."""
    config_type: type[C]
    ops: tuple[str, ...] = ("forward",)
    constants: Constants = CONSTANTS
    """Of the performance model, fitted for the family."""
    entry: str
    """Name of the kernel's ``extern "C"`` function."""

    @abstractmethod
    def unsupported(self, spec: Spec, gpu: Gpu) -> str | None:
        """Why this family can't serve ``spec`` on ``gpu`` with any config, or None."""

    @abstractmethod
    def illegal(self, config: C, spec: Spec, gpu: Gpu) -> str | None:
        """Why ``config`` can't be used, or None; ``spec`` is one that the family serves."""

    def refuses(self, spec: Spec, gpu: Gpu) -> str | None:
        """Why no config of this family can serve ``spec`` on ``gpu``, or None."""
        if spec.op not in self.ops:
            return f"op={spec.op} is not supported. Supported: {', '.join(self.ops)}"
        return self.unsupported(spec, gpu)

    def refuses_config(self, config: C, spec: Spec, gpu: Gpu) -> str | None:
        """Why ``config`` can't serve ``spec`` on ``gpu``, whatever the sizes, or None."""
        return self.refuses(spec, gpu) or self.illegal(config, spec, gpu)

    def unusable(self, config: C, problem: Problem, gpu: Gpu) -> str | None:
        """Why ``config`` can't serve ``problem`` on ``gpu``, or None."""
        return self.refuses_config(config, problem.spec, gpu) or self.unfit(config, problem, gpu)

    @abstractmethod
    def default(self, spec: Spec, gpu: Gpu) -> C:
        """A config that is legal and decent everywhere the family is supported."""

    @abstractmethod
    def resources(self, config: C, spec: Spec) -> Resources: ...

    @abstractmethod
    def names(self, config: C, spec: Spec) -> Mapping[str, object]:
        """Template variables beyond ``config`` and ``spec``."""

    def source(self, config: C, spec: Spec) -> Source:
        """The CUDA source of ``config`` for ``spec``: a pure function of both and the templates."""
        names = {"spec": spec, "config": config, **self.names(config, spec)}
        return templates().render(f"{self.name}.cu.jinja", names)

    @abstractmethod
    def tiles(self, config: C, problem: Problem) -> int:
        """Tiles of queries: thread blocks of the launch where each takes all keys of its tile."""

    def num_splits(self, config: C, problem: Problem, gpu: Gpu) -> int:
        """Thread blocks that share the keys of one tile."""
        return 1

    def blocks(self, config: C, problem: Problem, gpu: Gpu) -> int:
        """Thread blocks of the launch."""
        return self.tiles(config, problem) * self.num_splits(config, problem, gpu)

    def heads_per_section(self, config: C) -> int:
        """Heads whose tiles are listed together; of use where thread blocks take several tiles."""
        return 1

    def tensor_boxes(self, config: C, spec: Spec) -> Sequence[TensorBox]:
        """What the kernel copies by TMA, in the order of its tensor maps."""
        return ()

    def workspace(self, config: C, problem: Problem, num_splits: int) -> tuple[int, int]:
        """Bytes of device memory that a launch needs for itself, and how many of them, from the start, must be 0."""
        return 0, 0

    def unfit(self, config: C, problem: Problem, gpu: Gpu) -> str | None:
        """Why ``config``, which is legal for the problem's `Spec`, can't serve its sizes, or None."""
        blocks = self.tiles(config, problem) * self.num_splits(config, problem, gpu)
        if blocks > MAX_GRID_X:
            return f"{blocks} thread blocks, a launch takes at most {MAX_GRID_X}"
        return None

    def fitted(self, config: C, problem: Problem, gpu: Gpu) -> C:
        """``config``, which was chosen for another problem, as it may pay for this one."""
        return config

    def default_for(self, problem: Problem, gpu: Gpu) -> C:
        """:meth:`default`, or what serves ``problem`` better where its lengths and heads are far from the usual."""
        return self.default(problem.spec, gpu)

    def variants(self, config: C, problem: Problem, gpu: Gpu) -> Sequence[C]:
        """``config`` with each setting of the parameters whose use depends on the problem that may pay for this one."""
        return (config,)

    def work(self, config: C, problem: Problem, gpu: Gpu) -> Work:
        """Counts of what a launch does, from which :meth:`predict` goes; not for a family that overrides that."""
        raise NotImplementedError(f"{self.name} gives no counts to the performance model")

    def predict(self, config: C, problem: Problem, gpu: Gpu, compiled: CompilerFacts | None = None) -> Estimate:
        """The expected time of ``config``, which must be usable. ``compiled`` has real registers and spills for the
        expected ones."""
        work, needs = self.work(config, problem, gpu), self.resources(config, problem.spec)
        return predict_by_counts(problem, gpu, work, needs, compiled, self.constants)

    def check(self, config: C, spec: Spec, gpu: Gpu) -> None:
        """Raises :class:`UnsupportedProblem` or :class:`IllegalConfig` with the reason."""
        if reason := self.refuses(spec, gpu):
            raise UnsupportedProblem(f"{self.name}: {reason}")
        if reason := self.illegal(config, spec, gpu):
            raise IllegalConfig(f"{config}: {reason}")

    def plan(self, problem: Problem, config: C, gpu: Gpu) -> Plan:
        """The plan that launches ``config`` for ``problem``; illegal input raises before anything is rendered."""
        spec = problem.spec
        self.check(config, spec, gpu)
        num_splits = self.num_splits(config, problem, gpu)
        blocks = self.blocks(config, problem, gpu)
        if reason := self.unfit(config, problem, gpu):
            too_many = self.tiles(config, problem) * num_splits > MAX_GRID_X
            kind = UnsupportedProblem if too_many else IllegalConfig
            raise kind(f"{config} for {problem}: {reason}")
        needs = self.resources(config, spec)
        source = self.source(config, spec)
        boxes = tuple(self.tensor_boxes(config, spec))
        kernel = Kernel(source, self.entry, (blocks, 1, 1), needs.threads, needs.shared_memory, boxes)
        workspace, zeroed = self.workspace(config, problem, num_splits)
        section = self.heads_per_section(config)
        return Plan(problem, config, gpu, (kernel,), num_splits, workspace, zeroed, section)

    def enumerate(self, spec: Spec, gpu: Gpu) -> tuple[list[C], Counter[str]]:
        """All legal configs of the searched parameters in a fixed order, and how often each reason rejected one.

        Parameters that are searched by problem are neutral; :meth:`variants` sets them. Reasons that differ in their
        numbers alone count as one.
        """
        if reason := self.refuses(spec, gpu):
            return [], Counter({reason: 1})
        parameters = self.config_type.parameters()
        ranges = [
            tuple(choice for choice in each.choices if choice not in each.left_out)
            if each.searched and not each.by_problem
            else (each.neutral,)
            for each in parameters
        ]
        legal: list[C] = []
        reasons: Counter[str] = Counter()
        for point in itertools.product(*ranges):
            values: dict[str, Any] = dict(zip((each.name for each in parameters), point, strict=True))
            config = self.config_type(**values)
            reason = self.illegal(config, spec, gpu)
            if reason is None:
                legal.append(config)
            else:
                reasons[_kind(reason)] += 1
        return legal, reasons


AnyFamily = Family[Config]
"""A family whose type of configs is not known where it is used: a config that is passed to it must be of that type."""


def unsupported_width(spec: Spec) -> str | None:
    """Why kernels that hold whole rows in chunks of 8 can't serve the widths of ``spec``, or None."""
    for name, width in (("head_dim", spec.head_dim), ("head_dim_v", spec.value_dim)):
        if width % 8 or not 8 <= width <= MAX_HEAD_DIM:
            return f"{name}={width} is not supported. Supported: multiples of 8 from 8 to {MAX_HEAD_DIM}"
    return None


def _kind(reason: str) -> str:
    return re.sub(r"\b\d+\b", "#", reason)  # names such as h100 stay whole
