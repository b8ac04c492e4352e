"""Exact attention kernels that are generated, compiled and tuned where they run.

Importing this costs nothing: each name is loaded when it is first used, and no CUDA context is made before the first
call with arrays in device memory.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, which is not imported: the command line can't catch a Ctrl-C before this has run
if TYPE_CHECKING:
    from typing import Any

    from flashtune import errors as errors
    from flashtune.call.attention import attention as attention
    from flashtune.codegen.problem.problem import Problem as Problem

    from .api import choices_digest as choices_digest
    from .api import compile as compile
    from .api import explain as explain
    from .api import plan as plan
    from .api import tune as tune

    __version__: str

__all__ = ["Problem", "__version__", "attention", "choices_digest", "compile", "errors", "explain", "plan", "tune"]

_HOMES = {
    "Problem": "flashtune.codegen.problem.problem",
    "attention": "flashtune.call.attention",
    "choices_digest": "flashtune.api",
    "compile": "flashtune.api",
    "explain": "flashtune.api",
    "plan": "flashtune.api",
    "tune": "flashtune.api",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("flashtune.errors")
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            found: Any = version("flashtune")
        except PackageNotFoundError:  # a checkout on the path, not installed
            found = "0+unknown"
    elif name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'flashtune' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
