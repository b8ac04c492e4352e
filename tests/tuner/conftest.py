"""What tests of the tuner share: where a database and a log may be, a database with winners, a quick fake of ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# What stands in for devices and compilers must be found by worker processes too, which inherit this path.
sys.path.append(str(Path(__file__).parent))
from tuner_fakes import PROBLEMS, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's database may be made."""
    return tmp_path / "tuned.db"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where units of fake_worker.py write what they do."""
    return tmp_path / "log"


@pytest.fixture(scope="session")
def three_winners(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with a winner for each of `PROBLEMS`, all measured on one card."""
    path = tmp_path_factory.mktemp("tuned") / "tuned.db"
    run(path, PROBLEMS, 60)
    return path.read_bytes()


@pytest.fixture
def tuned(three_winners: bytes, tmp_path: Path) -> Path:
    """A copy of `three_winners` of the test's own."""
    made = tmp_path / "tuned.db"
    made.write_bytes(three_winners)
    return made


@pytest.fixture
def quick_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on the ray of fake_ray.py are looked after often."""
    from flashtune.tuner.cluster import ray_actor, ray_crew, ray_worker

    monkeypatch.setattr(ray_worker, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ray_crew, "LEAVE_SECONDS", 60.0)
    monkeypatch.setattr(ray_actor, "serve_only", lambda cubins: None)  # the actors are threads of this process
