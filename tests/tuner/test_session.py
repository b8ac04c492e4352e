"""Which GPU a run is for, and that refused runs touch nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tuner_fakes import problem

from flashtune.cli.main import main
from flashtune.cli.tune import command
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import (
    FlashtuneError,
    InvalidInput,
    InvalidType,
    NoGpu,
    UnknownGpu,
    UnsupportedProblem,
)
from flashtune.tuner.tune import session
from flashtune.tuner.tune.session import locate, tune
from flashtune.tuner.workers.cuda_device import CudaUnit

A100, H100 = gpu_by_alias("a100"), gpu_by_alias("h100")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """The GPUs of this machine, as the test fills it."""
    found: list[Gpu] = []
    monkeypatch.setattr(session, "visible_gpus", lambda: found)
    monkeypatch.setattr(session, "unit_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(session, "missing_device", lambda: NoGpu("No CUDA device can be used: no driver"))
    return found


def indices(gpu: Gpu, units: list[CudaUnit], _: str) -> tuple[Gpu, list[int]]:
    assert {each.gpu for each in units} <= {gpu}
    return gpu, [each.index for each in units]


@pytest.mark.parametrize("mode", ["auto", "measure"])
def test_the_device_that_is_the_asked_gpu_measures(devices: list[Gpu], mode: str) -> None:
    devices += [A100, H100]
    assert indices(*locate("h100", mode)) == (H100, [1])


def test_without_a_name_the_first_device_is_meant(devices: list[Gpu]) -> None:
    devices += [A100, H100]
    assert indices(*locate(None, "auto")) == (A100, [0])


@pytest.mark.parametrize("found", [[], [A100]], ids=["none", "another"])
def test_another_gpu_is_predicted_for_and_the_reason_lists_what_is_here(devices: list[Gpu], found: list[Gpu]) -> None:
    devices += found
    target, units, reason = locate("h100", "auto")
    assert (target, units) == (H100, [])
    assert (A100.name if found else "no driver") in reason


def test_asked_to_predict_a_device_at_hand_is_not_used(devices: list[Gpu]) -> None:
    devices += [H100]
    assert locate("h100", "predict")[:2] == (H100, [])


def test_all_devices_that_are_the_asked_gpu_measure(devices: list[Gpu]) -> None:
    devices += [H100, A100, H100]
    assert indices(*locate("h100", "auto")) == (H100, [0, 2])
    assert indices(*locate(None, "auto")) == (H100, [0, 2])


def test_named_devices_alone_measure_and_say_which_gpu_is_meant(devices: list[Gpu]) -> None:
    devices += [H100, A100, H100]
    assert indices(*locate("h100", "auto", [2])) == (H100, [2])
    assert indices(*locate(None, "auto", [1])) == (A100, [1])


@pytest.mark.parametrize(
    ("mode", "asked", "error", "message"),
    [
        ("auto", [3], InvalidInput, r"device 3 does not exist\. Devices here: 0 \(h100-sxm\), 1 \(a100"),
        ("auto", [-1], InvalidInput, "device -1 does not exist"),
        ("auto", [0, 1], InvalidInput, "device 1 is a100.*models are never mixed"),
        ("auto", [2, 2], InvalidInput, "device 2 is named twice"),
        ("auto", [], InvalidInput, "devices is empty"),
        ("auto", [True], InvalidType, "True is not a device number"),
        ("auto", "0", InvalidType, "must be a list of device numbers"),
        ("predict", [0], InvalidInput, "mode predict uses no device"),
    ],
    ids=str,
)
def test_devices_that_can_not_measure_together_are_refused(
    devices: list[Gpu], tmp_path: Path, mode: Any, asked: Any, error: type[FlashtuneError], message: str
) -> None:
    devices += [H100, A100, H100]
    path = tmp_path / "tuned.db"
    with pytest.raises(error, match=message):
        tune([problem()], "h100", mode=mode, devices=asked, database=path)
    assert not path.exists()


def test_devices_where_there_are_none_are_refused(devices: list[Gpu]) -> None:
    with pytest.raises(NoGpu, match="no driver"):
        locate("h100", "auto", [0])


def test_two_devices_that_are_one_card_are_refused(devices: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    devices += [H100, H100]
    monkeypatch.setattr(session, "unit_uuid", lambda index: "GPU-same")
    with pytest.raises(InvalidInput, match="devices 0 and 1 are one card, GPU-same"):
        locate("h100", "auto")
    monkeypatch.setattr(session, "unit_uuid", lambda index: "")  # not known, so not known to be equal
    assert indices(*locate("h100", "auto")) == (H100, [0, 1])


@pytest.mark.parametrize("found", [[], [A100]], ids=["none", "another"])
def test_measure_mode_refuses_lists_the_gpus_and_makes_no_database(
    devices: list[Gpu], found: list[Gpu], tmp_path: Path
) -> None:
    devices += found
    path = tmp_path / "tuned.db"
    with pytest.raises(NoGpu, match=A100.name if found else "none"):
        tune([problem()], "h100", mode="measure", database=path)
    assert not path.exists()


def test_no_name_and_no_device_is_one_clear_error(devices: list[Gpu]) -> None:
    with pytest.raises(NoGpu, match="Name a GPU to predict for"):
        locate(None, "auto")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gpu": "h1000"}, UnknownGpu, "h1000"),
        ({"mode": "guess"}, InvalidInput, "auto, measure, predict"),
        ({"budget": "soon"}, InvalidInput, "soon"),
        ({"budget": 200}, InvalidType, "budget is a int"),
        ({"gpu": 90}, InvalidType, "gpu is a int"),
        ({"seed": -1}, InvalidInput, "seed=-1"),
        ({"seed": True}, InvalidInput, "seed=True"),
        ({"families": "sm80_fwd"}, InvalidType, "collection of names"),
        ({"problems": []}, InvalidInput, "no problem"),
        ({"families": ["sm12_fwd"]}, InvalidInput, "sm12_fwd"),
        ({"gpu": "t4", "families": ["sm80_fwd"]}, UnsupportedProblem, "7.5"),
    ],
    ids=[
        "gpu",
        "mode",
        "budget",
        "budget-type",
        "gpu-type",
        "seed",
        "seed-type",
        "families-type",
        "problems",
        "family",
        "family-on-old-gpu",
    ],
)
def test_bad_input_is_refused_before_the_database_is_made(
    devices: list[Gpu], tmp_path: Path, changes: dict[str, Any], error: type[FlashtuneError], message: str
) -> None:
    path = tmp_path / "tuned.db"
    arguments: dict[str, Any] = {"problems": [problem()], "gpu": "h100", "database": path, **changes}
    with pytest.raises(error, match=message):
        tune(**arguments)
    assert not path.exists()


def test_an_author_that_is_no_name_is_refused_likewise(
    devices: list[Gpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_AUTHOR", "two\nlines")
    with pytest.raises(InvalidInput, match="FLASHTUNE_AUTHOR"):
        tune([problem()], gpu="h100", database=tmp_path / "tuned.db")
    assert not (tmp_path / "tuned.db").exists()


@pytest.mark.parametrize(
    ("given", "asked"), [(None, None), ("all", None), ("ALL", None), ("0", [0]), ("1, 0", [1, 0]), ("2,2", [2, 2])]
)
def test_the_option_devices_is_all_or_numbers(
    monkeypatch: pytest.MonkeyPatch, given: str | None, asked: list[int] | None
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(command, "run_tune", lambda *arguments, **options: seen.append(options["devices"]))
    options = [] if given is None else ["--devices", given]
    done = CliRunner().invoke(main, ["tune", "--gpu", "h100", *options])
    assert done.exit_code == 0, done.output
    assert seen == [asked]


@pytest.mark.parametrize("given", ["", "one", "-1", "0,", "0;1", "0-3", "\u0661", "99999"])
def test_other_devices_are_a_usage_error(given: str) -> None:
    done = CliRunner().invoke(main, ["tune", "--gpu", "h100", "--devices", given])
    assert done.exit_code == 2
    assert "must be all, or device numbers such as 0,1" in done.output


def test_devices_that_are_not_here_are_one_line_and_no_database(devices: list[Gpu], tmp_path: Path) -> None:
    devices += [H100]
    path = tmp_path / "tuned.db"
    done = CliRunner().invoke(main, ["tune", "--devices", "0,1", "--db", str(path)])
    assert done.exit_code == 1
    assert done.output == "Error: device 1 does not exist. Devices here: 0 (h100-sxm)\n"
    assert not path.exists()
