"""Every exception flashtune raises on purpose. A leaf: imports nothing of the project.

FlashtuneError
├── InvalidInput (ValueError)          an argument's value; nothing was launched or changed
├── InvalidType (TypeError)            an argument's type or dtype
├── UnsupportedProblem (ValueError)    a legal request that no kernel family serves on this GPU
├── IllegalConfig (ValueError)         a config that its family rejects, with the reason
├── UnknownGpu (ValueError)            a GPU name that is not in the table
├── MissingDependency (ImportError)    an extra that is not installed
├── NoGpu (RuntimeError)               no usable CUDA device or driver
├── CompileError (RuntimeError)        NVRTC refused the generated source
├── LaunchError (RuntimeError)         the driver refused to load or launch a kernel
│   └── ContextLost                    the GPU is lost to this process: only a new one can use it
├── EmulationError (RuntimeError)      a kernel on the CPU did what it must not
└── StoreError (RuntimeError)          a tuning database that can't be used
    ├── DatabaseDamaged                not a database, or fails its integrity check
    ├── DatabaseForeign                a healthy SQLite file that flashtune did not write
    ├── DatabaseTooNew                 written by a later flashtune
    └── DatabaseNotWritable            read-only place, or a full disk
"""

from __future__ import annotations

from pathlib import Path

INSTALL = 'pip install "flashtune[cuda13]"'
"""What to type where an extra is missing, for messages."""


class FlashtuneError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInput(FlashtuneError, ValueError):
    """An argument's value is outside what is allowed."""


class InvalidType(FlashtuneError, TypeError):
    """An argument has a type or dtype that is not accepted."""


class UnsupportedProblem(FlashtuneError, ValueError):
    """No kernel family serves this problem on this GPU."""


class IllegalConfig(FlashtuneError, ValueError):
    """A config that its family rejects for this problem and GPU."""


class UnknownGpu(FlashtuneError, ValueError):
    """A GPU alias that is not in the table."""


class MissingDependency(FlashtuneError, ImportError):
    """An optional dependency is needed and not installed."""


class NoGpu(FlashtuneError, RuntimeError):
    """No CUDA device can be used."""


class CompileError(FlashtuneError, RuntimeError):
    """NVRTC refused generated source.

    ``log`` is the compiler's log, whose lines name template files; ``source_path`` is where the
    generated source was saved, if it could be.
    """

    def __init__(self, message: str, *, log: str = "", source_path: Path | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.source_path = source_path


class LaunchError(FlashtuneError, RuntimeError):
    """The driver refused to load or launch a kernel, or what a launch needs."""

    @classmethod
    def of(cls, what: str, error: Exception) -> LaunchError:
        """The error for ``what``, which CUDA refused; a `ContextLost` where it will refuse all from now on.

        ``error`` is CuPy's or torch's.
        """
        said = str(error).partition("\n")[0]  # torch adds general advice
        if getattr(error, "status", getattr(error, "error_code", None)) not in STICKY:
            return LaunchError(f"{what}: {said}")
        return ContextLost(
            f"{what}: {said}. An earlier kernel, of flashtune or of other code, or the card itself has broken the "
            "CUDA context: nothing can run on the GPU in this process any more. Start a new process; "
            "compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, shows the kernel"
        )


class ContextLost(LaunchError):
    """The CUDA context of this process is lost: each later call fails alike, and only a new process can go on."""


STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Codes, those of the runtime and of the driver alike, that leave a process without CUDA: memory errors that can't be
corrected, and what stops a kernel (a bad address or instruction, an assertion, a time limit)."""


class EmulationError(FlashtuneError, RuntimeError):
    """A kernel that ran on the CPU did what it must not, or crashed.

    ``fault`` says where, if the emulator could tell: its block, thread and template lines.
    """

    def __init__(self, message: str, *, fault: object = None) -> None:
        super().__init__(message)
        self.fault = fault


class StoreError(FlashtuneError, RuntimeError):
    """A tuning database can't be used."""


class DatabaseDamaged(StoreError):
    """The file is not a database, or fails its integrity check."""


class DatabaseForeign(StoreError):
    """A healthy SQLite file that was not written by flashtune."""


class DatabaseTooNew(StoreError):
    """The database was written by a later version of flashtune."""


class DatabaseNotWritable(StoreError):
    """The database can't be written where it is."""
