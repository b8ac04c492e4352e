"""Compares a candidate's output with a float64 reference on the device: full-size results need not come to the host."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.compiler.render import Source, templates
from flashtune.codegen.gpu.cuda import Module, driver, runtime
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Spec

from .memory import Arena, download

ROW_TOLERANCE = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 2.0**-12}
"""Largest error of a row relative to its size, as norms: 16 times the rounding error of the output dtype, and for
float32 what exponentials in hardware may cost. A row that belongs elsewhere, or misses keys, is far beyond. The
strict rule is applied to the samples; this one looks for what only the full size shows."""
LSE_TOLERANCE = 1e-3
"""Relative to the LSE, or absolute where that is below 1."""

_ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float"}
_ARGUMENTS = struct.Struct("<5Q5q2d")
_COUNTS = struct.Struct("<3Q")
_THREADS, _BLOCKS_SM = 256, 8


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Rows of the output and entries of the LSE that disagree; the largest relative error of a row."""

    bad_rows: int
    bad_lse: int
    worst: float

    @property
    def ok(self) -> bool:
        return not self.bad_rows and not self.bad_lse


def compare_source(spec: Spec) -> Source:
    """The source of the comparison kernel for results of ``spec``."""
    return templates().render("compare.cu.jinja", {"element": _ELEMENTS[spec.output], "head_dim": spec.value_dim})


class Comparer:
    """The comparison kernel of one dtype and width of the output, loaded on the current device."""

    def __init__(self, spec: Spec, gpu: Gpu) -> None:
        self._module = Module()
        self._module.load(compiled(compare_source(spec), gpu.arch).cubin)
        self._function: Any = self._module.get_function("compare")
        self._blocks = gpu.num_sms * _BLOCKS_SM
        self._tolerance = ROW_TOLERANCE[spec.output]

    def compare(
        self,
        arena: Arena,
        *,
        out: int,
        reference: int,
        lse: int,
        reference_lse: int,
        total_rows: int,
        first_row: int,
        lse_count: int,
        lse_length: int,
        lse_stride: int,
        stream: int,
    ) -> OutputDifference:
        """Compares; see templates/compare.cu.jinja for the layout."""
        counts = arena.address("counts", _COUNTS.size)
        runtime.memsetAsync(counts, 0, _COUNTS.size, stream)
        arguments = ctypes.create_string_buffer(
            _ARGUMENTS.pack(
                out, reference, lse, reference_lse, counts,
                total_rows, first_row, lse_count, lse_length, lse_stride,
                self._tolerance, LSE_TOLERANCE,
            )
        )  # fmt: skip
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        driver.launchKernel(
            self._function.ptr, self._blocks, 1, 1, _THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0
        )
        runtime.streamSynchronize(stream)
        result = np.empty(_COUNTS.size, np.uint8)
        download(counts, result)
        bad_rows, bad_lse, bits = _COUNTS.unpack(result.tobytes())
        return OutputDifference(bad_rows, bad_lse, struct.unpack("<d", struct.pack("<Q", bits))[0])
