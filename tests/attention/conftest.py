"""Array libraries and a device without a GPU: a test that asks for `fakes` runs with each of two libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashtune import _arrays

sys.path.append(str(Path(__file__).parent))  # fake_arrays.py, fake_layer.py, fake_calls.py
from fake_arrays import Fakes


@pytest.fixture(params=["torch", "cupy"])
def fakes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Each fake library in turn, with an empty tuning database."""
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    made = Fakes(request.param)
    _arrays.register(made.kind)
    yield made
    _arrays.unregister(made.kind)
