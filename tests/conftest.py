"""Options and fixtures for all tests. What is left out where it can't run: tiers.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("", "tuned_db", "gpu"))  # for what tests share
from postgres_server import Cluster
from tiers import (  # noqa: F401 - hooks, which pytest finds here
    add_option,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

if TYPE_CHECKING:
    from fake_tuner import Tuner

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests press Ctrl-C

with suppress(ImportError):  # tests on a GPU do without hypothesis
    from hypothesis import HealthCheck, settings

    # A process may get no core for a while, and that is no fault of what is tested.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden generated sources")
    add_option(parser)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all tests of a run, in all of its processes, and not that of the user, which may be of no use.

    What several tests start from is built once.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHTUNE_CACHE_DIR", str(shared / "cache"))
        yield


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the rows that ship, to be copied."""
    from flashtune.tuned_db.sharing.merge import add_file
    from flashtune.tuned_db.store.store import Store

    path = tmp_path_factory.mktemp("sound") / "tuned.db"
    add_file(Store.open(path), Path(__file__).parents[1] / "tuned_db" / "bundled" / "h200.jsonl")
    return path


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL server of our own; tests that need one are left out where there can be none."""
    from flashtune.tuned_db.sharing.team import create_team

    with Cluster() as cluster:
        create_team(cluster.create("made"))
        yield cluster


@pytest.fixture
def empty_url(cluster: Cluster) -> str:
    """Address of a database without tables."""
    return cluster.create()


@pytest.fixture
def team_url(cluster: Cluster) -> str:
    """Address of a team's database without rows."""
    return cluster.create(template="made")


@pytest.fixture
def key(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a private key."""
    pytest.importorskip("cryptography", reason="needs the extra sign")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def make(name: str, password: bytes | None = None, kind: Any = Ed25519PrivateKey) -> Path:
        path = tmp_path / f"{name}.pem"
        lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        path.write_bytes(kind.generate().private_bytes(*form, lock))
        return path

    return make


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    """In place of the real one, beside a database and a cache of the test's own."""
    from fake_tuner import Tuner

    from flashtune.tuner.tune import session

    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHTUNE_CAPTURE", raising=False)
    made = Tuner()
    monkeypatch.setattr(session, "tune", made)
    return made
