"""A compiler that takes its time over some sources, for compile processes, which import this file."""

from __future__ import annotations

import time

from flashtune.codegen.render import Source
from flashtune.tuner.build import Built


def build(source: Source, arch: str) -> Built:
    """Takes the seconds that the name of ``source`` says."""
    time.sleep(float(source.name))
    return Built(digest=source.digest)
