"""Generated kernels on the CPU: the text that NVRTC compiles, built by a C++ compiler and checked as it runs.

For tests and ``flashtune emulate``; `attention()` never uses it. See docs/emulator.md.
"""

from __future__ import annotations

from .job import run_kernel
from .run import Emulation, emulate

__all__ = ["Emulation", "emulate", "run_kernel"]
