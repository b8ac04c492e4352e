"""Compilers that compile nothing, for compile processes, which import this file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from flashtune.codegen.compiler.render import Source
from flashtune.errors import MissingDependency
from flashtune.tuner.processes.compile_pool import Built


def build(source: Source, arch: str) -> Built:
    """Takes the seconds that the name of ``source`` says."""
    time.sleep(float(source.name))
    return Built(digest=source.digest)


def deadly(source: Source, arch: str) -> Built:
    """Dies as often as `deaths` says, of all processes together, then compiles ``source``. Each try leaves a file."""
    folder = Path(os.environ["TRIES"])
    tries = len(list(folder.glob(f"{source.digest}.*")))
    (folder / f"{source.digest}.{tries}.{os.getpid()}").touch()
    if tries < deaths(source):
        os.kill(os.getpid(), signal.SIGKILL)
    return Built(digest=source.digest, registers=96)


def deaths(source: Source) -> int:
    """What the name of ``source`` says, such as ``2 deaths``; of sources of real kernels one for every third."""
    count, _, word = source.name.partition(" ")
    return int(count) if word == "deaths" else int(source.digest[0], 16) % 3 == 0


def missing(source: Source, arch: str) -> Built:
    """Is not installed."""
    raise MissingDependency("no compiler is installed")


def closing(source: Source, arch: str) -> Built:
    """Ends its process in the middle of a compile, and never by a signal."""
    os._exit(7)
