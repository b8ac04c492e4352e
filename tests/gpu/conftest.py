"""What GPU tests need: a device, kernels that are compiled already, a database of their own, and each array library."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from libraries import Cupy, Library, Torch

import flashtune
from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.families.fma_fwd import FmaFwd
from flashtune.codegen.gpu.devices import missing_device, require_device
from flashtune.codegen.plan.plan import Plan
from flashtune.codegen.problem.problem import ITEM_BYTES, VECTOR_ALIGNMENT

DTYPES = ("float16", "bfloat16", "float32")
WIDTHS = ((192, 128), (128, 64), (64, 128), (72, 40))
"""Columns of q and k, and of v where they are others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    if not any(item.get_closest_marker("gpu") for item in mine):
        return
    reason = missing_device()
    if reason is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {reason}"))


def grid() -> list[Plan]:
    """What `test_attention_grid` and the cases of other widths launch; most of it serves the other tests too."""
    gpu, portable, plans = require_device(), FmaFwd(), []
    widths = (*((head_dim, 0) for head_dim in range(8, 257, 8)), *WIDTHS)
    cases = itertools.product(widths, DTYPES, (False, True), Library.SHAPES, (True, False))
    for (head_dim, head_dim_v), dtype, causal, shape, aligned in cases:
        batch, seqlen_q, seqlen_k, num_heads, num_heads_kv = shape
        problem = flashtune.Problem(
            dtype=dtype,
            head_dim=head_dim,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            causal=causal,
            alignment=VECTOR_ALIGNMENT if aligned else ITEM_BYTES[dtype],
            head_dim_v=head_dim_v,
        )
        if aligned or head_dim_v or head_dim in (8, 40, 64, 128, 136, 256):
            plans.append(flashtune.plan(problem, gpu))
        if aligned and (head_dim_v or head_dim in (8, 72, 256)):
            for accumulate in ("float32", "float64"):
                config = replace(portable.default(problem.spec, gpu), accumulate=accumulate)
                if portable.illegal(config, problem.spec, gpu) is None:
                    plans.append(portable.plan(problem, config, gpu))
    return plans


@pytest.fixture(scope="session")
def kernels(_own_database: None) -> None:
    """Puts what most tests launch into the disk cache, by all cores: NVRTC compiles one at a time in a process."""
    plans = grid()
    sources = {kernel.source.text: kernel.source for plan in plans for kernel in plan.kernels}
    workers = min(len(os.sched_getaffinity(0)), 16)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        arch = plans[0].gpu.arch
        for built in [pool.submit(compiled, source, arch) for source in sources.values()]:
            built.result()


@pytest.fixture(autouse=True, scope="session")
def _own_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is launched is the default or the bundled winner, whatever the user has tuned."""
    before = os.environ.get("FLASHTUNE_DB")
    os.environ["FLASHTUNE_DB"] = str(tmp_path_factory.mktemp("database") / "tuned.db")
    yield
    if before is None:
        del os.environ["FLASHTUNE_DB"]
    else:
        os.environ["FLASHTUNE_DB"] = before


@pytest.fixture
def memory(library: Library) -> Iterator[None]:
    """Gives back what both libraries keep, before and after a test that needs much."""

    def release() -> None:
        from flashtune.codegen.gpu.cuda import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    release()
    yield
    release()


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest) -> Library:
    """Each array library in turn."""
    return Cupy() if request.param == "cupy" else Torch()


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest, library: Library) -> str:
    library.dtype(request.param)
    name: str = request.param
    return name
