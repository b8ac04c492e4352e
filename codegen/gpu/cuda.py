"""What flashtune uses of CuPy, which is imported here and nowhere else: ``from .cuda import runtime``.

While CuPy is imported it makes the folder of a kernel cache of its own, and fails where it can't. flashtune keeps
nothing there, so a home directory that can't be used must not matter to it. Whoever uses CuPy beside flashtune in one
process must find their kernels where they always are. So CuPy is left alone where CUPY_CACHE_DIR names a folder, and
where ~/.cupy/kernel_cache is there or can be made, which costs an empty folder as any other import of CuPy does. Only
elsewhere is it given another folder. A process that is flashtune's own, the command line or a worker, runs no kernel of
CuPy's; there it is given a folder that exists, and the home directory stays as it is.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flashtune
from flashtune.errors import INSTALL, InvalidInput, MissingDependency
from flashtune.values import printable

VARIABLE = "CUPY_CACHE_DIR"
DEFAULT = "~/.cupy/kernel_cache"

cupy: Any
driver: Any
nvrtc: Any
runtime: Any
Module: Any
OutOfMemoryError: Any

_PLACES = {
    "cupy": "",
    "driver": "cuda.driver",
    "nvrtc": "cuda.nvrtc",
    "runtime": "cuda.runtime",
    "Module": "cuda.function.Module",
    "OutOfMemoryError": "cuda.memory.OutOfMemoryError",
}

_own_process = False
_failure = ""
"""Why CuPy could not be imported: a second attempt in the same process fails with something else."""
_importing = threading.RLock()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import()
    return operator.attrgetter(_PLACES[name])(module) if _PLACES[name] else module


def own_process() -> None:
    """Says that nobody else uses CuPy in this process."""
    global _own_process
    _own_process = True


def _import() -> Any:
    """CuPy. Whatever goes wrong is one :class:`MissingDependency`."""
    global _failure
    with _importing:
        if _failure:
            raise MissingDependency(_failure)
        try:
            with _usable_cache():
                return importlib.import_module("cupy")
        except ImportError as error:
            said = f"This needs CuPy, which can't be imported ({printable(str(error))}): {INSTALL}"
            if error.name != "cupy":  # it is installed
                _failure = said
            raise MissingDependency(said) from error
        except Exception as error:
            _failure = f"This needs CuPy, whose import fails ({printable(f'{type(error).__name__}: {error}')}). "
            given = os.environ.get(VARIABLE, "")
            if isinstance(error, OSError) and error.filename and given.startswith(str(error.filename)):
                _failure += f"{VARIABLE}={printable(given)} must be a folder, or the name of one that can be made"
            else:
                _failure += "python -c 'import cupy' shows all of it"
            raise MissingDependency(_failure) from error


@contextmanager
def _usable_cache() -> Iterator[None]:
    """CuPy looks at the variable while it is imported; afterwards it is again as the user left it."""
    before = os.environ.get(VARIABLE)
    if "cupy" in sys.modules or before or (folder := _folder()) is None:
        yield
        return
    os.environ[VARIABLE] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _folder() -> str | None:
    """The folder to give CuPy; None to leave it the default."""
    default = os.path.expanduser(DEFAULT)
    named = os.path.isabs(default)  # without a home directory it would be a folder called ~ in the working directory
    if named and os.path.isdir(default):
        return default
    package = Path(flashtune.__file__).parent
    if _own_process and package.is_dir():
        return str(package)
    try:
        if named:
            os.makedirs(default, exist_ok=True)
            return default
    except OSError:
        pass
    from flashtune.codegen.cache.cache_folder import CUPY, folder_for

    try:
        return str(folder_for(CUPY))
    except (OSError, InvalidInput):
        return None  # CuPy says what is wrong
