"""Where a look-up finds rows: a protocol that `Store` meets, and the measurements that ship with flashtune."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import parse_line, read_header, read_lines
from flashtune.tuned_db.policy.blocklist import TELLING, Failure, barred
from flashtune.tuned_db.records.measurement import Measurement, Prediction, Variant, capability
from flashtune.tuned_db.records.parse import measurement_from_json, problem_from_text

BUNDLED = Path(__file__).parents[1] / "bundled"

_log = logging.getLogger("flashtune")


class RowSource(Protocol):
    """What a look-up asks."""

    label: str

    def measurements(self, *, problem: Problem, gpu_key: str, status: str, stage: str) -> list[Measurement]: ...

    def predictions(self, *, problem: Problem, gpu_key: str) -> list[Prediction]: ...

    def problems(self, *, spec: Spec, gpu_key: str) -> list[Problem]:
        """Those with an ``ok`` measurement on that device model, in the order of their keys."""

    def gpu_keys(self, *, capability: str) -> list[str]:
        """Device models with measurements, sorted."""

    def rejected(self, spec: Spec, gpu_key: str) -> frozenset[Variant]:
        """Variants that are barred on that device model; see `blocklist.py`."""


class Shipped:
    """The rows of files for one compute capability. A process needs few of them, so of each line only the place is read
    at first, and the rest is read and checked when it is asked for.

    A row that this version can't take (its kernel family changed) is passed over.
    """

    label = "bundled"

    def __init__(self, lines: Iterable[bytes], wanted: str) -> None:
        self._lines: dict[tuple[Problem, str], list[bytes]] = defaultdict(list)
        self._checked: dict[tuple[Problem, str], list[Measurement]] = {}
        self._failures: dict[Spec, list[Failure]] = {}
        self._listed: dict[tuple[Spec | None, str], list[Problem]] = {}
        for line in lines:
            try:
                problem, gpu_key = _problem_and_gpu(line)
            except InvalidInput as error:
                _log.debug("passed over: %s", error)
                continue
            if capability(gpu_key) == wanted:
                self._lines[problem, gpu_key].append(line)

    def measurements(self, *, problem: Problem, gpu_key: str, status: str, stage: str) -> list[Measurement]:
        return [each for each in self._measured(problem, gpu_key) if (each.status, each.stage) == (status, stage)]

    def all_measurements(self) -> list[Measurement]:
        return [each for place in self._lines for each in self._measured(*place)]

    def predictions(self, *, problem: Problem, gpu_key: str) -> list[Prediction]:
        """None: predictions do not travel."""
        return []

    def problems(self, *, spec: Spec | None = None, gpu_key: str) -> list[Problem]:
        asked = spec, gpu_key
        if asked not in self._listed:
            found = [
                problem
                for (problem, key), lines in self._lines.items()
                if key == gpu_key and spec in (None, problem.spec) and _mentions(lines, ["ok"])
            ]
            self._listed[asked] = sorted(found, key=lambda each: each.key)
        return self._listed[asked]

    def gpu_keys(self, *, capability: str) -> list[str]:
        return sorted({key for _, key in self._lines if key.partition("/")[0] == capability})

    def rejected(self, spec: Spec, gpu_key: str) -> frozenset[Variant]:
        if spec not in self._failures:
            suspects = [
                place for place, lines in self._lines.items() if place[0].spec == spec and _mentions(lines, TELLING)
            ]
            rows = (row for place in suspects for row in self._measured(*place))
            self._failures[spec] = [Failure.of(row) for row in rows if row.status in TELLING]
        return barred(self._failures[spec], gpu_key)

    def _measured(self, problem: Problem, gpu_key: str) -> list[Measurement]:
        place = problem, gpu_key
        if place not in self._checked:
            found = []
            for line in self._lines.get(place, ()):
                try:
                    row = measurement_from_json(parse_line(line))
                except InvalidInput as error:
                    _log.debug("passed over: %s", error)
                    continue
                if (row.problem, row.gpu_key) == place:
                    found.append(row)
            self._checked[place] = found
        return self._checked[place]


_GPU_KEY = re.compile(rb'"gpu_key":"([^"\\]+)"')
_PROBLEM = b'"problem":'
_decoder = json.JSONDecoder()


def _problem_and_gpu(line: bytes) -> tuple[Problem, str]:
    """Problem and device model of a row, as `write_export` spells it. To parse all of each line takes several times as
    long, for some hundred of which a process needs a few; those are held to what is found here."""
    key, at = _GPU_KEY.search(line), line.find(_PROBLEM)
    if key is None or at < 0:
        raise InvalidInput(f"no measurement: {line[:40]!r}")
    text = line[at + len(_PROBLEM) :].decode("utf-8", "replace")
    try:
        _, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"no measurement: {line[:40]!r}: {error}") from error
    return problem_from_text(text[:end]), key[1].decode("ascii", "replace")


def _mentions(lines: Iterable[bytes], statuses: Iterable[str]) -> bool:
    """Whether a line may have one of these statuses: which ones do shows when they are read."""
    wanted = [f'"status":"{each}"'.encode() for each in statuses]
    return any(each in line for line in lines for each in wanted)


@functools.cache
def bundled(wanted: str) -> Shipped:
    """What ships for GPUs of the capability ``wanted``, e.g. ``9.0a``. Read once per process.

    A file that does not match its header is passed over.
    """
    lines: list[bytes] = []
    for path in sorted(BUNDLED.glob("*.jsonl")):
        try:
            if any(capability(key) == wanted for key in read_header(path).gpu_keys):
                lines += read_lines(path)[1]
        except Exception as error:  # a call of attention() never fails for want of them
            _log.error("bundled measurements can't be used, reinstall flashtune: %s", error)
    return Shipped(lines, wanted)
