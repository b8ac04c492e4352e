"""What the report says at the end of a run: speed-up with interval, ties, share of the card's limit, and why."""

from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path

import pytest
from rich.console import Console
from tuner_fakes import FAMILY, GPU, FakeBench, FakeBuilder, landscape, problem, run

from flashtune.cli.common.tables import print_report, speed_up
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.gpu.roofline import limit
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.report import Report, Row
from flashtune.tuner.search.space import make_space
from flashtune.tuner.trial.outcome import Outcome

PROBLEM = problem()
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)


def tuned(path: Path, bench: FakeBench, trials: int = 9) -> Report:
    return run(path / "tuned.db", [PROBLEM], trials, bench=bench)


def test_a_clear_winner_is_called_one(tmp_path: Path) -> None:
    (row,) = tuned(tmp_path, FakeBench()).rows
    assert row.why.startswith("clearly the fastest; ")
    assert "TFLOP/s" in row.why
    assert row.tied == 1


def test_a_tie_says_with_how_many_and_what_decided(tmp_path: Path) -> None:
    draw = random.Random(2)
    bench = FakeBench(
        lambda config: 1.2e-3 if config == DEFAULT else 1e-3,
        final=lambda config: (1.2e-3 if config == DEFAULT else 1e-3) * draw.gauss(1, 0.01),
    )
    (row,) = tuned(tmp_path, bench).rows
    assert row.tied == 8
    assert row.why.startswith("not told apart from 7 others, needs least (96 registers, ")
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    assert row.ratio_low < 1 / 1.2 < row.ratio_high


def test_a_default_that_stays_says_so(tmp_path: Path) -> None:
    bench = FakeBench(lambda config: 1e-3 if config == DEFAULT else 2e-3)
    (row,) = tuned(tmp_path, bench).rows
    assert row.config == DEFAULT
    assert row.why.startswith("the default: nothing is clearly faster; ")


def test_without_a_default_there_is_no_claim(tmp_path: Path) -> None:
    bench = FakeBench(final=lambda config: float("nan") if config == DEFAULT else landscape(config))
    (row,) = tuned(tmp_path, bench).rows
    assert "no final with the default" in row.why
    assert speed_up(row) == "-"


H200 = gpu_by_alias("h200")


def square(batch: int, seqlen: int, heads: int) -> Problem:
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads": heads, "num_heads_kv": heads}
    return Problem(dtype="bfloat16", head_dim=128, **sizes)


# 4 b h s^2 d = 4.4e12 at 989 TFLOP/s; one query: (k + v) of 2 * 8192 * 8 * 128 * 2 bytes and 16 kB at 4800 GB/s.
@pytest.mark.parametrize(
    ("asked", "by", "seconds"),
    [
        (square(4, 16384, 8), "tensor rate", 4.447e-3),
        (dataclasses.replace(square(1, 8192, 32), seqlen_q=1, num_heads_kv=8), "bandwidth", 6.994e-6),
        (dataclasses.replace(square(1, 4096, 8), dtype="float32"), "float32 rate", None),
    ],
)
def test_the_limit_is_the_slower_of_arithmetic_and_memory(asked: Problem, by: str, seconds: float | None) -> None:
    found = limit(asked, H200)
    assert found.by == by
    assert found.seconds == pytest.approx(seconds or asked.flops / (H200.fp32_tflops * 1e12), rel=1e-3)
    assert found.reached(2 * found.seconds) == pytest.approx(0.5)


def test_a_card_without_tensor_cores_has_a_limit_too() -> None:
    found = limit(PROBLEM, dataclasses.replace(GPU, tensor_tflops=0.0))
    assert found.by == "float32 rate"
    assert found.seconds > 0


def test_the_share_of_the_limit_is_that_of_the_winner(tmp_path: Path) -> None:
    (row,) = tuned(tmp_path, FakeBench()).rows
    assert row.seconds is not None
    assert row.reached == pytest.approx(PROBLEM.flops / (GPU.tensor_tflops * 1e12) / row.seconds)
    assert row.limited_by == "tensor rate"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "text"),
    [
        (0.8, 0.78125, 0.82, "1.250 [1.220, 1.280]"),
        (0.8, None, None, "1.250"),
        (1.0, 1.0, 1.0, "1.000"),
        (None, None, None, "-"),
    ],
)
def test_speed_ups_are_inverse_ratios(ratio: float | None, low: float | None, high: float | None, text: str) -> None:
    assert speed_up(Row(problem=PROBLEM, ratio=ratio, ratio_low=low, ratio_high=high)) == text


def test_the_table_shows_all_of_it(tmp_path: Path) -> None:
    report = tuned(tmp_path, FakeBench())
    report.flagged["another process had the card open"] = 3
    out = Console(width=300, record=True, file=io.StringIO())
    print_report(out, report, "tuned.db")
    said = out.export_text()
    (row,) = report.rows
    for text in ("speed-up", "of limit", speed_up(row), f"{100 * (row.reached or 0):.0f} % of tensor rate", row.why):
        assert text in said
    assert "3 x another process had the card open" in said


def test_configs_whose_facts_differ_are_chosen_by_them(tmp_path: Path) -> None:
    """Registers that the compiler reports decide between equals."""

    def facts(source: Source) -> Built:
        return Built(digest=source.digest, registers=64 if int(source.digest[:4], 16) % 3 == 0 else 128)

    draw = random.Random(4)

    def noisy(config: Config) -> float:
        return (1.2e-3 if config == DEFAULT else 1e-3) * draw.gauss(1, 0.005)

    bench = FakeBench(lambda config: 1.2e-3 if config == DEFAULT else 1e-3, final=noisy)
    report = run(tmp_path / "tuned.db", [PROBLEM], 9, bench=bench, builder=FakeBuilder(facts))
    assert "needs least (64 registers" in report.rows[0].why


def test_what_another_card_does_not_reproduce_is_named(tmp_path: Path) -> None:
    other = next(each for each in make_space(PROBLEM, GPU, FAMILY).configs if each != DEFAULT)

    def tuned_at(unit: str, seconds: float, trials: int) -> Row:
        bench = FakeBench(lambda each: {DEFAULT: 1.2e-3, other: seconds}.get(each, 1e-3), unit=unit)
        return run(tmp_path / "tuned.db", [PROBLEM], trials, bench=bench, first=[other]).rows[0]

    assert tuned_at("GPU-one", 0.9e-3, 6).config == other
    row = tuned_at("GPU-two", 0.93e-3, 1)
    assert row.config not in (other, DEFAULT)
    assert "; 1 that claimed to be faster is disputed; " in row.why


def test_a_disputed_winner_says_so(tmp_path: Path) -> None:
    """There is none but it and the default, over which it wins on either card."""
    other = next(each for each in make_space(PROBLEM, GPU, FAMILY).configs if each != DEFAULT)

    def tuned_at(unit: str, seconds: float) -> Row:
        bench = FakeBench(lambda each: 1.2e-3 if each == DEFAULT else seconds, unit=unit)
        bench.outcome = lambda each, number: None if each in (DEFAULT, other) else Outcome(status="spills")
        return run(tmp_path / "tuned.db", [PROBLEM], 2, bench=bench, first=[other]).rows[0]

    assert tuned_at("GPU-one", 1e-3).why.startswith("clearly the fastest")
    row = tuned_at("GPU-two", 1.03e-3)
    assert row.config == other
    assert "; disputed: its sessions don't say the same; " in row.why
