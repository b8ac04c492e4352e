"""Where a look-up finds rows: a protocol that `Store` meets, and the measurements that ship with flashtune."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from flashtune.codegen.problem import Problem, Spec
from flashtune.errors import InvalidInput

from .exchange import read_export, read_header
from .records import REJECTING, Measurement, Prediction, Variant, capability

BUNDLED = Path(__file__).parent / "bundled"

_log = logging.getLogger("flashtune")


class Source(Protocol):
    """What a look-up asks."""

    label: str

    def measurements(self, *, problem: Problem, gpu_key: str, status: str, stage: str) -> list[Measurement]: ...

    def predictions(self, *, problem: Problem, gpu_key: str) -> list[Prediction]: ...

    def problems(self, *, spec: Spec, gpu_key: str) -> list[Problem]:
        """Those with an ``ok`` measurement on that device model, in the order of their keys."""

    def gpu_keys(self, *, capability: str) -> list[str]:
        """Device models with measurements, sorted."""

    def rejected(self, spec: Spec) -> frozenset[Variant]:
        """Variants that gave wrong results or crashed."""


class Memory:
    """A source over measurements in memory, e.g. those of a file."""

    def __init__(self, label: str, measurements: Iterable[Measurement]) -> None:
        self.label = label
        self._rows: dict[tuple[str, str, str, str], list[Measurement]] = defaultdict(list)
        self._problems: dict[tuple[str, str], dict[str, Problem]] = defaultdict(dict)
        self._gpu_keys: dict[str, set[str]] = defaultdict(set)
        self._rejected: dict[str, set[Variant]] = defaultdict(set)
        for each in measurements:
            spec_key, problem_key = each.problem.spec.key, each.problem.key
            self._rows[problem_key, each.gpu_key, each.status, each.stage].append(each)
            self._gpu_keys[capability(each.gpu_key)].add(each.gpu_key)
            if each.status == "ok":
                self._problems[spec_key, each.gpu_key][problem_key] = each.problem
            if each.status in REJECTING:
                self._rejected[spec_key].add(each.variant)

    def measurements(self, *, problem: Problem, gpu_key: str, status: str, stage: str) -> list[Measurement]:
        return list(self._rows.get((problem.key, gpu_key, status, stage), ()))

    def predictions(self, *, problem: Problem, gpu_key: str) -> list[Prediction]:
        """None: predictions do not travel."""
        return []

    def problems(self, *, spec: Spec, gpu_key: str) -> list[Problem]:
        found = self._problems.get((spec.key, gpu_key), {})
        return [found[key] for key in sorted(found)]

    def gpu_keys(self, *, capability: str) -> list[str]:
        return sorted(self._gpu_keys.get(capability, ()))

    def rejected(self, spec: Spec) -> frozenset[Variant]:
        return frozenset(self._rejected.get(spec.key, ()))


@functools.cache
def bundled(wanted: str) -> Memory:
    """What ships for GPUs of the capability ``wanted``, e.g. ``9.0a``. Read once per process.

    A row that this version can't take (its kernel family changed) is passed over, and so is a file that does not
    match its header.
    """
    rows: list[Measurement] = []
    for path in sorted(BUNDLED.glob("*.jsonl")):
        try:
            if any(capability(key) == wanted for key in read_header(path).gpu_keys):
                export = read_export(path, skip_invalid=True)
                rows += export.measurements
                for reason in export.refused:
                    _log.debug("passed over: %s", reason)
        except (InvalidInput, OSError) as error:
            _log.error("bundled measurements can't be used, reinstall flashtune: %s", error)
    return Memory("bundled", (each for each in rows if capability(each.gpu_key) == wanted))
