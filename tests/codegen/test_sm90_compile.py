"""What the compiler makes of sm90_fwd: no complaints, no spills where none are promised, softmax beside products."""

from __future__ import annotations

import functools
import random
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sm90_points import FAMILY, H200, SPEC, config, default, source
from turns import by_turns

from flashtune.codegen.compiler.nvrtc import Compiled, compile_source
from flashtune.codegen.families.resources import register_cap
from flashtune.codegen.families.sm90_fwd import Sm90FwdConfig
from flashtune.codegen.problem.problem import Spec

pytestmark = pytest.mark.nvrtc

SPILL_LIMIT = 256
"""Bytes, stores and loads, that wide heads may spill outside of the loops."""
SAMPLES = 24
NVDISASM = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvdisasm")


def sample() -> Iterator[tuple[Spec, Sm90FwdConfig]]:
    """The same for everyone: legal configs that the tuner may try."""
    draw = random.Random("sm90_fwd")
    head_dims = [8, 40, 64, 72, 96, 128, 192, 256]
    for number in range(SAMPLES):
        spec = Spec(
            dtype=("float16", "bfloat16")[number // len(head_dims) % 2],
            head_dim=head_dims[number % len(head_dims)],
            causal=draw.random() < 0.5,
        )
        while True:
            values: dict[str, Any] = {
                each.name: draw.choice([choice for choice in each.choices if choice not in each.left_out])
                for each in Sm90FwdConfig.parameters()
            }
            if FAMILY.illegal(Sm90FwdConfig(**values), spec, H200) is None:
                break
        yield spec, Sm90FwdConfig(**values)


def name(value: object) -> str:
    return value.key if isinstance(value, (Spec, Sm90FwdConfig)) else str(value)


@functools.cache
def compiled(spec: Spec, chosen: Sm90FwdConfig) -> Compiled:
    return compile_source(source(spec, chosen), H200.arch)


def keeps_its_promise(spec: Spec, chosen: Sm90FwdConfig) -> None:
    """No complaint, no spills where that is said, no more registers than a block of its size has at the start."""
    needs = FAMILY.resources(chosen, spec)
    built = compiled(spec, chosen)
    assert not built.complaint
    assert built.spill_bytes <= (0 if needs.spill_free else SPILL_LIMIT)
    assert built.registers <= register_cap(needs.threads, chosen.blocks_per_sm)
    assert built.static_shared_bytes == 0


@pytest.mark.parametrize("sampled", by_turns(sample(), 2, name=lambda each: "-".join(map(name, each))))
def test_a_sample_compiles_as_promised(sampled: tuple[Spec, Sm90FwdConfig]) -> None:
    keeps_its_promise(*sampled)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 112, 160, 224])
def test_defaults_compile_as_promised(head_dim: int, causal: bool) -> None:
    spec = Spec(dtype="bfloat16", head_dim=head_dim, causal=causal)
    keeps_its_promise(spec, default(spec))


@pytest.mark.parametrize("widths", [(192, 128), (40, 128), (72, 24)], ids="{0[0]}/{0[1]}".format)
def test_values_of_another_width_compile_as_promised(widths: tuple[int, int]) -> None:
    spec = Spec(dtype="bfloat16", head_dim=widths[0], head_dim_v=widths[1], causal=True)
    keeps_its_promise(spec, default(spec))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (" __launch_bounds__(kThreads, kBlocksPerSm)", "", "'setmaxnreg' ignored"),
        ("wgmma_wait<1>();  // S is", "scores[0] += 1.0f;\nwgmma_wait<1>();  // S is", "instructions are serialized"),
    ],
)
def test_a_complaint_of_the_compiler_is_seen(old: str, new: str, complaint: str) -> None:
    spec = replace(SPEC, head_dim=64)
    whole = source(spec, config())
    assert whole.text.count(old) == 1
    built = compile_source(replace(whole, text=whole.text.replace(old, new)), H200.arch)
    assert complaint in built.complaint


def sass(built: Compiled, folder: Path) -> str:
    if not NVDISASM.exists():
        pytest.skip(f"there is no {NVDISASM}: pip install nvidia-cuda-nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(built.cubin)
    return subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("early_columns", [0, 32])
def test_early_columns_are_weighed_while_the_product_with_v_is_under_way(
    head_dim: int, early_columns: int, tmp_path: Path
) -> None:
    """Between the wait that leaves one product in flight and the next that leaves none; not in loops with a mask."""
    spec = Spec(dtype="bfloat16", head_dim=head_dim)
    chosen = replace(default(spec), early_columns=early_columns)
    text = sass(compiled(spec, chosen), tmp_path)
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1 ;(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0 ;", text, re.DOTALL)
    assert len(waits) == 3  # blocks without a mask, with one, half blocks
    exponentials = sorted(each.count("MUFU.EX2") for each in waits)
    moves = 2  # of references, where a score outgrows them
    started = 1  # of the other weights, behind the second wait for V
    assert exponentials[1] <= moves + started
    assert early_columns // 2 <= exponentials[2] <= early_columns // 2 + moves + started


@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_are_started_together(head_dim: int, tmp_path: Path) -> None:
    """Serialised ones would have a WARPGROUP.ARRIVE each."""
    spec = Spec(dtype="bfloat16", head_dim=head_dim)
    text = sass(compiled(spec, default(spec)), tmp_path)
    products, arrivals = (len(re.findall(rf"\b{each}\b", text)) for each in ("HGMMA", r"WARPGROUP\.ARRIVE"))
    assert 0 < 4 * arrivals <= products
