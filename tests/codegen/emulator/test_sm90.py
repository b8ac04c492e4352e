"""TMA and wgmma: what the emulator computes and what it reports, on the kernels of toys/."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sm90_toys import run_toy
from toy_attention import ATTENTION, ATTENTION_ERROR, ATTENTIONS, Attention
from toy_box import BOX, BOXES, MISUSES, Box, Misuse
from toy_gemm import GEMM, GEMMS, Gemm, gemm_inputs, gemm_product
from toy_ring import RING, RINGS, Ring

from flashtune.codegen.problem.bits import to_memory
from flashtune.emulator.faults import Fault
from flashtune.emulator.job import Argument
from flashtune.emulator.tensors import Mapped, Tensor, output_tensor, plain_tensor
from flashtune.errors import EmulationError, InvalidInput

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
SEEDS = range(2)
SHORT = Attention(rows=100, keys=256, heads=2, blocks=1)


def run_gemm(gemm: Gemm, text: str = GEMM, seed: int = 0) -> Array:
    a, b = gemm_inputs(gemm)
    inputs = plain_tensor("a", a, gemm.dtype), plain_tensor("b", b, gemm.dtype)
    tensors = (*inputs, output_tensor("c", "float32", (64, gemm.n)))
    arguments: list[Argument] = [Mapped(tensor, gemm.maps()[tensor.name]) for tensor in tensors]
    return run_toy(text, gemm.names(), arguments, 128, gemm.shared_memory, seed=seed)["c"]


def run_ring(ring: Ring, text: str = RING, seed: int = 0, processes: int = 1) -> Array:
    a, b = ring.inputs()
    inputs = plain_tensor("a", a, ring.dtype), plain_tensor("b", b, ring.dtype)
    tensors = (*inputs, output_tensor("c", ring.dtype, (ring.rows, 64)))
    arguments: list[Argument] = [
        *(Mapped(tensor, ring.maps()[tensor.name]) for tensor in tensors),
        np.int32(ring.tiles),
    ]
    grid = (ring.blocks, 1, 1)
    return run_toy(text, ring.names(), arguments, 256, ring.shared_memory, seed=seed, grid=grid, processes=processes)[
        "c"
    ]


def run_attention(case: Attention, text: str = ATTENTION, seed: int = 0) -> float:
    """The error."""
    values = case.inputs()
    inputs = [plain_tensor(name, each, case.dtype) for name, each in zip("qkv", values, strict=True)]
    tensors = [*inputs, output_tensor("o", case.dtype, (case.heads, case.rows, 64))]
    arguments: list[Argument] = [*(Mapped(tensor, case.maps()[tensor.name]) for tensor in tensors), *case.numbers()]
    grid = (case.blocks, 1, 1)
    found = run_toy(text, case.names(), arguments, 384, case.shared_memory, seed=seed, grid=grid)["o"]
    return case.error(found, case.expected(*values))


def bits_tensor(name: str, memory: Array, *, writable: bool) -> Tensor:
    """A row of 16-bit numbers, in bfloat16's clothes."""
    return Tensor(name, "bfloat16", memory.shape, (1,), memory.copy(), 0, writable)


def run_box(box: Box, seed: int = 0) -> str:
    """The outcome."""
    count = box.map().box_bytes // 2
    first = bits_tensor("first", box.memory(), writable=False)
    second = bits_tensor("second", box.target(), writable=True)
    seen = bits_tensor("seen", np.zeros(count, np.uint16), writable=True)
    arguments: list[Argument] = [Mapped(first, box.map()), Mapped(second, box.map()), seen, *box.numbers()]
    found = run_toy(BOX, box.names(), arguments, 32, box.shared_memory, seed=seed)
    return box.outcome(*(to_memory(found[name], "bfloat16") for name in ("seen", "second")))


@pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS)
def test_products_through_tma_and_wgmma_are_exact(gemm: Gemm) -> None:
    expected = gemm_product(gemm, *gemm_inputs(gemm))
    for seed in SEEDS:
        np.testing.assert_array_equal(run_gemm(gemm, seed=seed), expected, err_msg=f"seed {seed}")


@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS)
def test_a_producer_and_consumers_share_a_ring_of_tiles(ring: Ring) -> None:
    expected = to_memory(ring.product(*ring.inputs()).astype(np.float32), ring.dtype)
    for seed in range(8):
        found = to_memory(run_ring(ring, seed=seed), ring.dtype)
        np.testing.assert_array_equal(found, expected, err_msg=f"seed {seed}")


@pytest.mark.parametrize("case", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_in_a_pipeline(case: Attention) -> None:
    for seed in range(6):
        assert run_attention(case, seed=seed) < ATTENTION_ERROR[case.dtype], f"seed {seed}"


def test_a_warp_may_write_over_rows_of_a_that_are_its_own() -> None:
    barrier = "      named_barrier_sync(1 + group, 128);  // all of the warpgroup have read Q\n"
    assert ATTENTION.count(barrier) == 1
    for seed in SEEDS:
        assert run_attention(SHORT, ATTENTION.replace(barrier, ""), seed) < ATTENTION_ERROR[SHORT.dtype]


SHARED_P = replace(SHORT, p_shared=True)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("  fence_proxy_async();\n", "", "wgmma reads A from .* no fence.proxy.async"),
        ("          __syncwarp();\n", "", "wgmma reads A from .* no barrier orders the two"),
        (
            "        wgmma_wait<0>();\n        release(bar.v_empty",
            "        release(bar.v_empty",
            "still to be read|in flight|yet",
        ),
    ],
)
def test_p_in_shared_memory_needs_its_fences(old: str, new: str, text: str) -> None:
    assert ATTENTION.count(old) == 1
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=text):
            run_attention(SHARED_P, ATTENTION.replace(old, new), seed)


def test_blocks_may_run_in_several_processes() -> None:
    ring = Ring(rows=250, columns=130)
    np.testing.assert_array_equal(run_ring(ring, processes=2), run_ring(ring))


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_tiles_at_the_edges_of_tensors(box: Box) -> None:
    assert run_box(box) == "right"


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_tiles_that_hardware_refuses_or_stores_elsewhere_are_reported(misuse: Misuse) -> None:
    with pytest.raises(EmulationError, match=re.escape(misuse.report)):
        run_box(misuse.box)


@dataclass(frozen=True)
class Wrong:
    """An entry of mutations/sm90_toys.toml."""

    what: str
    old: str
    new: str
    shows: str
    toy: str = "ring"
    gemm: Mapping[str, Any] | None = None
    also: Sequence[str] = ()

    def text(self) -> str:
        text = {"ring": RING, "attention": ATTENTION}[self.toy] if self.gemm is None else GEMM
        for old, new in ((self.old, self.new), *([self.also] if self.also else [])):
            assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
            text = text.replace(old, new)
        return text

    def outcome(self, seed: int) -> str:
        """The report, "wrong" or "right"."""
        try:
            if self.toy == "attention":
                error = run_attention(SHORT, self.text(), seed)
                return "right" if error < ATTENTION_ERROR[SHORT.dtype] else "wrong"
            if self.gemm is None:
                ring = RINGS["two stages"]
                found, expected = run_ring(ring, self.text(), seed), ring.product(*ring.inputs())
                return "right" if np.allclose(found, expected, rtol=2**-8, atol=0) else "wrong"
            gemm = Gemm(**self.gemm)
            found, expected = run_gemm(gemm, self.text(), seed), gemm_product(gemm, *gemm_inputs(gemm))
            return "right" if np.array_equal(found, expected) else "wrong"
        except EmulationError as report:
            return report.fault.text if isinstance(report.fault, Fault) else str(report)


FAULTS = tomllib.loads((Path(__file__).parent / "mutations" / "sm90_toys.toml").read_text(encoding="utf-8"))["fault"]


@pytest.mark.parametrize("fault", [Wrong(**each) for each in FAULTS], ids=[each["what"] for each in FAULTS])
def test_a_fault_is_reported(fault: Wrong) -> None:
    for seed in SEEDS:
        found = fault.outcome(seed)
        assert re.search(fault.shows, found), f"seed {seed}: {found}"


def test_what_tma_does_with_short_swizzled_rows_is_not_modelled() -> None:
    with pytest.raises(InvalidInput, match="the emulator needs rows of 128 bytes for this swizzle, not 32"):
        run_box(Box((64, 8, 1, 1), (16, 8, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), swizzle=128))
