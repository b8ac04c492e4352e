"""What was measured of one problem on one GPU model, session by session. Pure functions over records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from flashtune.tuned_db.policy.ranked import Ranked
from flashtune.tuned_db.policy.winners import rank
from flashtune.tuned_db.records.measurement import Measurement, Variant


@dataclass(frozen=True, slots=True)
class Session:
    """What one tuning session found out about a problem."""

    session: str
    began: str
    """``created`` of its first and last measurement."""
    ended: str
    gpu_name: str
    units: tuple[str, ...]
    """UUIDs of the cards."""
    software: tuple[str, ...]
    """Versions of what compiled and ran the kernels, one text for each environment."""
    authors: tuple[str, ...]
    """Names that were given, sorted."""
    measurements: int
    statuses: Counter[str]
    best: Ranked | None
    """The winner by its own rows alone; None where none of them may win."""


def sessions(rows: Iterable[Measurement], barred: Collection[Variant] = ()) -> list[Session]:
    """The sessions in ``rows``, which are of one problem and one GPU model, the newest last.

    ``barred`` are variants that must not win, whatever a session says of them.
    """
    groups: dict[str, list[Measurement]] = defaultdict(list)
    for each in rows:
        groups[each.session].append(each)
    found = [_session(name, own, barred) for name, own in groups.items()]
    return sorted(found, key=lambda each: (each.began, each.session))


def _session(name: str, rows: list[Measurement], barred: Collection[Variant]) -> Session:
    ranking = rank(rows, barred)
    return Session(
        session=name,
        began=min(each.created for each in rows),
        ended=max(each.created for each in rows),
        gpu_name=rows[0].gpu_name,
        units=tuple(sorted({each.unit for each in rows if each.unit})),
        software=tuple(sorted({software(each) for each in rows})),
        authors=tuple(sorted({each.author for each in rows if each.author})),
        measurements=len(rows),
        statuses=Counter(each.status for each in rows),
        best=ranking[0] if ranking else None,
    )


def software(row: Measurement) -> str:
    """Versions of a measurement's environment; what is not known is left out."""
    versions = (("flashtune", row.flashtune), ("NVRTC", row.nvrtc), ("driver", row.driver), ("CuPy", row.cupy))
    return ", ".join(f"{name} {version}" for name, version in versions if version)
