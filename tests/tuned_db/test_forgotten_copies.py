"""The copy of what `flashtune db forget` removes: a new file, whatever is there or comes at the same time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import read_export, write_export
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing.merge import add_database
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep import forgetting
from flashtune.tuned_db.upkeep.forgetting import Which, forget


def test_a_copy_replaces_nothing(store: Store, other: tuple[Path, list[Measurement]], tmp_path: Path) -> None:
    add_database(store, other[0])
    write_export(other[1][:1], tmp_path / "rows.jsonl", origin="x")
    with pytest.raises(InvalidInput, match=r"rows\.jsonl exists and is left as it is"):
        forget(store, Which(arrival=1), copy=tmp_path / "rows.jsonl")
    assert store.count() == 8
    assert forget(store, Which(arrival=1), copy=tmp_path / "new.jsonl").copy == tmp_path / "new.jsonl"


@pytest.mark.parametrize("named", [True, False])
def test_a_copy_replaces_nothing_that_comes_at_the_same_time(
    store: Store, other: tuple[Path, list[Measurement]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """F7, the kind: two that forget within a second had one name for the rows that each of them removes."""
    add_database(store, other[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forgetting, "now", lambda: "2026-11-30T12:00:00.000Z")
    a_moment_ago = SimpleNamespace(path=SimpleNamespace(lexists=lambda path: False))
    monkeypatch.setattr(forgetting, "os", a_moment_ago)
    first = tmp_path / "rows.jsonl" if named else next(forgetting._new_files(store))
    first.write_text("of somebody else")
    if named:
        with pytest.raises(InvalidInput, match=r"rows\.jsonl exists and is left as it is"):
            forget(store, Which(arrival=1), copy=first)
        assert store.count() == 8
    else:
        copy = forget(store, Which(arrival=1)).copy
        assert copy == first.with_name(first.name.replace(".jsonl.gz", "-2.jsonl.gz"))
        assert len(read_export(copy).measurements) == 8
    assert first.read_text() == "of somebody else"
