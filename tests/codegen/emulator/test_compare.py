"""The kernel that compares a candidate's results with the reference, on the CPU: it counts what NumPy counts."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashtune.codegen.problem.reference import rounded
from flashtune.emulator import run_kernel
from flashtune.emulator.tensors import Tensor, output_tensor, plain_tensor

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float"}
TOLERANCE, LSE_TOLERANCE = 2.0**-6, 1e-3


def held(name: str, values: Array) -> Tensor:
    """Numbers of 64 bits, which no tensor of attention has, as memory of that many doubles."""
    made = output_tensor(name, "float64", values.shape)
    made.memory[:] = values.ravel().view(np.float64)
    return made


def counted(dtype: str, ours: Array, reference: Array, lse: Array, reference_lse: Array) -> tuple[int, int, float]:
    """Bad rows, bad LSE values and the largest relative error. Of ``ours`` and ``lse`` the ends are compared."""
    results = run_kernel(
        "compare.cu.jinja",
        {},
        {"element": ELEMENTS[dtype], "head_dim": ours.shape[1]},
        "compare",
        [
            plain_tensor("ours", ours, dtype),
            held("reference", reference),
            plain_tensor("lse", lse, "float32"),
            held("reference_lse", reference_lse),
            held("counts", np.zeros(3, np.uint64)),
            *map(np.int64, (len(ours), len(ours) - len(reference), reference_lse.size, *reference_lse.shape[1:])),
            np.int64(lse.shape[1]),
            np.float64(TOLERANCE),
            np.float64(LSE_TOLERANCE),
        ],
        grid=(2, 1, 1),
        threads=256,
        shared_memory=0,
        seed=len(ours),
    )
    rows, values, worst = (int(each) for each in results["counts"].view(np.uint64))
    (relative,) = struct.unpack("<d", struct.pack("<Q", worst))
    return rows, values, relative


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows", "first"),
    [("float16", 8, 37, 0), ("bfloat16", 72, 40, 9), ("float32", 128, 21, 20), ("bfloat16", 256, 5, 0)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_counts_what_numpy_counts(dtype: str, head_dim: int, rows: int, first: int, seed: int) -> None:
    """Rows with errors about as large as is allowed, NaN and infinities in some, zeros in others."""
    draw = np.random.default_rng(seed)
    reference = draw.standard_normal((rows - first, head_dim)) * 10.0 ** draw.integers(-3, 4, (rows - first, 1))
    error = draw.standard_normal(reference.shape)
    error *= np.linalg.norm(reference, axis=1, keepdims=True) / np.linalg.norm(error, axis=1, keepdims=True)
    wanted = TOLERANCE * draw.choice([0.0, 0.5, 0.9, 1.1, 4.0], (rows - first, 1))
    exact = np.concatenate([draw.standard_normal((first, head_dim)), reference + wanted * error])
    ours = rounded(exact.astype(np.float32), dtype)
    for value in (np.nan, np.inf, -np.inf):
        ours[draw.integers(rows), draw.integers(head_dim)] = value
    ours[-1], reference[-1] = 0, 0  # a row that sees no key
    count, stride, length = 3, 19, 11
    lse = draw.standard_normal((count, stride)).astype(np.float32) * 5
    reference_lse = lse[:, stride - length :].astype(np.float64)
    reference_lse += LSE_TOLERANCE * draw.choice([0.0, 0.9, -1.1, 6.0], reference_lse.shape)
    lse[0, -1], reference_lse[0, -1] = -np.inf, -np.inf
    lse[1, -1], lse[2, -2], reference_lse[0, 0] = np.nan, np.inf, -np.inf
    lse[:, : stride - length] = np.nan  # nobody looks at them

    with np.errstate(all="ignore"):
        off = np.linalg.norm(ours[first:].astype(np.float64) - reference, axis=1)
        size = np.linalg.norm(reference, axis=1)
        bad = int((~(off <= TOLERANCE * size)).sum()) + int((~np.isfinite(ours[:first]).all(axis=1)).sum())
        seen = lse[:, stride - length :].astype(np.float64)
        near = np.abs(seen - reference_lse) <= LSE_TOLERANCE * np.maximum(1, np.abs(reference_lse))
        bad_lse = int((~(near | (seen == reference_lse))).sum())
        relative = off[size > 0] / size[size > 0]
    found = counted(dtype, ours, reference, lse, reference_lse)
    assert found[:2] == (bad, bad_lse)
    if np.isnan(relative).any():
        assert np.isnan(found[2])
    else:
        assert found[2] == pytest.approx(relative.max(initial=0.0))


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("column", [0, 31, 32, 71])
def test_a_single_wrong_element_makes_its_row_bad(dtype: str, column: int) -> None:
    ours = np.ones((9, 72), np.float32)
    reference, lse = np.ones((9, 72)), np.zeros((1, 9), np.float32)
    assert counted(dtype, ours, reference, lse, lse.astype(np.float64)) == (0, 0, 0.0)
    ours[4, column] = 3
    assert counted(dtype, ours, reference, lse, lse.astype(np.float64)) == (1, 0, pytest.approx(2 / 72**0.5))
