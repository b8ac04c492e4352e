"""What tests of codegen share: fixtures of the cache, and folders on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# What several test files start from: sm90_points.py, fake_runtime.py.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which need not exist, in a process that has said nothing of it yet."""
    from flashtune.codegen.cache import cache_folder

    monkeypatch.setattr(cache_folder, "_warned", False)
    monkeypatch.setattr(cache_folder, "_stand_in", None)
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
