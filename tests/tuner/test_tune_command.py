"""`flashtune tune` from the command to its exit code, with worker processes whose device is a fake one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_worker import FakeUnit
from tuner_fakes import FAMILY, GPU, FakeBuilder, problem

from flashtune.cli.main import main
from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.search.space import make_space
from flashtune.tuner.tune import session

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

PROBLEM = problem()
FLAGS = "--dtype float16 --batch 2 --seqlen 1024 --heads 8 --head-dim 64 --family sm80_fwd --sampler exhaustive"
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)
BEST = [config for config in make_space(PROBLEM, GPU, FAMILY).configs if config != DEFAULT]

Tune = Callable[[FakeUnit, Path], Result]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Tune:
    """The command with a budget of ten trials, on that unit alone and into that database."""
    monkeypatch.setattr(session, "ProcessBuilder", lambda *_: FakeBuilder())

    def tune(unit: FakeUnit, path: Path) -> Result:
        monkeypatch.setattr(session, "locate", lambda *_: (GPU, [unit], ""))
        return CliRunner().invoke(main, ["tune", "--gpu", "a100", *FLAGS.split(), "--budget", "10", "--db", str(path)])

    return tune


def trials(path: Path) -> dict[Config, Measurement]:
    with Store.open(path, readonly=True) as store:
        return {each.config: each for each in store.measurements() if each.stage != "final"}


@pytest.mark.parametrize("deed", ["lose", "kill"])
def test_an_illegal_access_of_the_third_candidate_leaves_the_other_nine_as_they_are(
    tune: Tune, tmp_path: Path, deed: str
) -> None:
    """D61. The sticky error of a context, or the end of the process that has it."""
    culprit = BEST[1]
    sound, broken = tmp_path / "sound.db", tmp_path / "broken.db"
    assert tune(FakeUnit("one", tmp_path / "sound"), sound).exit_code == 0
    done = tune(FakeUnit("one", tmp_path / "broken", {culprit.key: deed}), broken)
    assert done.exit_code == 0, done.output
    assert "Tried and failed: 1 x illegal_access" in done.output

    wanted, got = trials(sound), trials(broken)
    assert list(wanted)[2] == culprit
    assert len(wanted) == 10
    assert set(got) == set(wanted)
    assert got.pop(culprit).status == "illegal_access"
    assert all((each.status, each.median_us) == ("ok", wanted[config].median_us) for config, each in got.items())
