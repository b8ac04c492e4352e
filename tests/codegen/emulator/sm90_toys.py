"""Small kernels for sm_90: the same texts run on the CPU (emulator) and on a GPU, to the same expectations.

Here is what all of them share. Those of toys/ have a file each: toy_gemm.py, toy_ring.py, toy_attention.py, toy_box.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flashtune.codegen.compiler.render import Source, Templates
from flashtune.emulator import run_kernel
from flashtune.emulator.job import Argument

Array = NDArray[Any]

ENTRY = "toy"
MAIN = "toy.cu.jinja"
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
BARRIERS = 1024
"""Bytes before the tiles, for mbarriers: tiles start on a multiple of 1024."""

HEAD = """
#include "lib/types.cuh"
#include "lib/ptx.cuh"
#include "lib/ptx_sm90.cuh"
#include "lib/descriptor.cuh"
#include "lib/wgmma.cuh"
using Element = {{element}};
"""
"""What all begin with."""


def one_step(*widths: int) -> dict[str, object]:
    """Names of lib/wgmma.cuh.jinja for products of N in ``widths``, a step at a time."""
    shapes = [(n, 1) for n in widths]
    return {"shared_products": shapes, "register_products": shapes}


def text_of(name: str) -> str:
    return (Path(__file__).parent / "toys" / f"{name}.cu.jinja").read_text(encoding="utf-8")


def device_source(text: str, names: Mapping[str, object]) -> Source:
    """What NVRTC compiles."""
    return Templates({MAIN: text}).render(MAIN, names)


def run_toy(
    text: str, names: Mapping[str, object], arguments: Sequence[Argument], threads: int, shared: int, **options: Any
) -> dict[str, Array]:
    """On the CPU: what the outputs hold, by name."""
    return run_kernel(
        MAIN, {MAIN: text}, names, ENTRY, arguments, threads=threads, shared_memory=shared, timeout=30, **options
    )
