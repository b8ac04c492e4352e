"""What tests of signed exports share: lists of keys, and what got into a database."""

from __future__ import annotations

from pathlib import Path

from flashtune.tuned_db.exchange.signing import Signer
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store


def stored(path: Path) -> list[Measurement]:
    if not path.exists():
        return []
    with Store.open(path, readonly=True) as store:
        return store.measurements()


def trusted(tmp_path: Path, *names: str) -> Path:
    path = tmp_path / "team.keys"
    lines = [f"{Signer.read(tmp_path / f'{name}.pem').public} {name} of the team  # since May" for name in names]
    path.write_text("# the team\n\n" + "\n".join(lines) + "\n")
    return path
