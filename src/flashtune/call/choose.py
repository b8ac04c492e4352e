"""From a problem to the plan that is launched: the caller's config, else what the look-up finds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from flashtune.codegen.families.registry import default_config, family, supporting
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.plan.plan import Plan
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import CompileError, ContextLost, IllegalConfig, InvalidType, LaunchError
from flashtune.tuned_db.lookup.captured import capture
from flashtune.tuned_db.lookup.lookup import find

T = TypeVar("T")


def explicit_plan(problem: Problem, gpu: Gpu, config: Config) -> Plan:
    """The plan of a config that the caller gave."""
    owner = family(config.family)
    if type(config) is not owner.config_type:
        raise InvalidType(f"config={config} is a {type(config).__qualname__}, not {owner.config_type.__qualname__}")
    return owner.plan(problem, config, gpu)


def chosen_plan(problem: Problem, gpu: Gpu) -> Plan:
    """The plan that ``attention()`` launches where the caller gives no config."""
    choice = find(problem, gpu)
    return family(choice.family).plan(problem, choice.config, gpu)


def plan_for(problem: Problem, gpu: Gpu, config: Config | None, load: Callable[[Plan], T]) -> T:
    """What ``load`` makes of the plan for a call.

    A tuned config that can't be used here gives way to the default, and a default to that of the next family, with one
    warning per process: tuning data never breaks a call. A config that the caller gave is used or refused. A problem
    that has no measured config of its own is captured, where the settings ask for that.
    """
    if config is not None:
        return load(explicit_plan(problem, gpu, config))
    choice = find(problem, gpu)
    if choice.level != "exact":
        capture(problem, gpu.key)
    wanted = choice.config
    kinds = supporting(problem.spec, gpu)
    while True:
        try:
            return load(family(wanted.family).plan(problem, wanted, gpu))
        except ContextLost:
            raise  # another config would fail alike
        except (IllegalConfig, CompileError, LaunchError) as error:
            if wanted == default_config(problem, gpu, kinds):  # then the next family's
                kinds = [each for each in kinds if each.name != wanted.family]
            if not kinds:
                raise
            failed, wanted = wanted, default_config(problem, gpu, kinds)
            _warn_once(f"{failed} can't be used for {problem} on {gpu}, the default {wanted} is: {error}")


_warned = False


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)
