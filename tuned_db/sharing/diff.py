"""How two sets of measurements differ, rows and winners: databases or exports, each read by what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import InvalidInput
from flashtune.files import shown_path
from flashtune.tuned_db.backends.sqlite.files import is_database
from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.policy.blocklist import TELLING, Failure, barred
from flashtune.tuned_db.policy.ranked import Ranked
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.records.measurement import Measurement, Variant
from flashtune.tuned_db.records.parse import Unreadable
from flashtune.tuned_db.store.queries import count_unreadable
from flashtune.tuned_db.store.store import Store


@dataclass(frozen=True, slots=True)
class Side:
    """The measurements of one file."""

    path: Path
    measurements: tuple[Measurement, ...]
    unreadable: Unreadable
    """Rows of a database that this version can't read; they take no part."""


@dataclass(frozen=True, slots=True)
class ChangedWinner:
    """A problem with winners that differ. A winner is None where nothing may win."""

    gpu_name: str
    problem: Problem
    first: Ranked | None
    second: Ranked | None


@dataclass(frozen=True, slots=True)
class Difference:
    """All by which two sides differ; false where they don't."""

    only_first: tuple[Measurement, ...]
    only_second: tuple[Measurement, ...]
    changed: tuple[tuple[Measurement, Measurement], ...]
    """Rows under one id with other values: one of them was tampered with."""
    winners: tuple[ChangedWinner, ...]

    def __bool__(self) -> bool:
        return bool(self.only_first or self.only_second or self.changed or self.winners)


def read_side(path: Path) -> Side:
    """The measurements of a database or an export, packed or not. Neither is changed.

    Raises what `Store.open` and `read_export` raise.
    """
    try:
        found = is_database(path)
    except FileNotFoundError as error:
        raise InvalidInput(f"there is no tuning database or export of one at {shown_path(path)}") from error
    with count_unreadable() as unreadable:
        if not found:
            return Side(path, read_export(path).measurements, unreadable)
        with Store.open(path, create=False, readonly=True) as store:
            return Side(path, tuple(store.measurements()), unreadable)


def compare(first: Iterable[Measurement], second: Iterable[Measurement]) -> Difference:
    """Rows by their ids, in the order of devices, problems and dates, and winners by family, config and source.

    Winners are those of the rows alone (`winners.py`), for the compiler here: neither today's templates nor what ships
    with flashtune count.
    """
    one, other = ({each.id: each for each in rows} for rows in (first, second))
    changed = [(one[name], other[name]) for name in one.keys() & other.keys() if one[name] != other[name]]
    winners, others = _winners(one.values()), _winners(other.values())
    places = []
    for place in sorted(winners.keys() | others.keys()):
        mine, theirs = winners.get(place), others.get(place)
        if _variant(mine) != _variant(theirs):
            known = mine or theirs
            assert known is not None
            places.append(ChangedWinner(known.measurement.gpu_name, known.measurement.problem, mine, theirs))
    return Difference(
        only_first=tuple(sorted((each for each in one.values() if each.id not in other), key=_order)),
        only_second=tuple(sorted((each for each in other.values() if each.id not in one), key=_order)),
        changed=tuple(sorted(changed, key=lambda pair: _order(pair[0]))),
        winners=tuple(places),
    )


def _winners(rows: Iterable[Measurement]) -> dict[tuple[str, str], Ranked]:
    """The winner by device and problem key, where there is one."""
    groups: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    failures: dict[Spec, list[Failure]] = defaultdict(list)
    for each in rows:
        groups[each.gpu_key, each.problem.key].append(each)
        if each.status in TELLING:
            failures[each.problem.spec].append(Failure.of(each))
    rankings: dict[tuple[str, str], Sequence[Ranked]] = {
        place: rank(found, barred(failures[found[0].problem.spec], place[0])) for place, found in groups.items()
    }
    return {place: ranking[0] for place, ranking in rankings.items() if ranking}


def _variant(best: Ranked | None) -> Variant | None:
    return None if best is None else best.variant


def _order(each: Measurement) -> tuple[str, ...]:
    return each.gpu_key, each.problem.key, each.created, each.id
