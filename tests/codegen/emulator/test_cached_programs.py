"""Programs in the cache: built once, and run only if this user alone can have written them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashtune.codegen.cache.cache_folder import EMULATOR, write_entry
from flashtune.emulator import Emulation, build
from flashtune.errors import CompileError, EmulationError

pytestmark = pytest.mark.emulate

Toy = Callable[..., Emulation]


@pytest.fixture
def runtime() -> tuple[str, bytes]:
    """The object that all programs share, as all tests do, and its name."""
    compiler = build.find_compiler()
    name = build._runtime_name(compiler)
    return name, build._runtime(compiler, name)


@pytest.fixture
def folder(runtime: tuple[str, bytes], root: Path) -> Path:
    """Of programs, in a cache of the test's own."""
    write_entry(EMULATOR, *runtime)
    return root / EMULATOR


def right(toy: Toy) -> bool:
    out = toy("out[thread] = 2 * q[thread];").out.reshape(-1)
    return bool((out == 2 * np.arange(128)).all())


def test_programs_and_objects_of_somebody_else_are_neither_run_nor_linked(toy: Toy, folder: Path) -> None:
    """C2: what lay under the right name was run, whoever had written it."""
    assert right(toy)
    (kernel,) = folder.glob("kernel-*")
    (runtime,) = folder.glob("runtime-*.o")
    ran = folder.parent / "ran"
    for planted in (kernel, runtime):
        planted.unlink()
        planted.write_text(f"#!/bin/sh\ntouch {ran}\n")
        planted.chmod(0o777)
    assert right(toy)
    assert not ran.exists()
    assert (kernel.stat().st_mode & 0o777, runtime.stat().st_mode & 0o777) == (0o700, 0o600)
    assert sorted(each.name for each in folder.iterdir()) == sorted([kernel.name, runtime.name])


def test_without_a_cache_a_program_is_built_once_in_a_process(
    toy: Toy, folder: Path, runtime: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", "/dev/null/cache")
    write_entry(EMULATOR, *runtime)
    with pytest.raises(CompileError, match=r"It could not be kept: .*/dev/null") as caught:
        toy("nothing(1);")
    assert caught.value.source_path is None
    assert right(toy)
    monkeypatch.setattr(build.Compiler, "run", lambda *_: pytest.fail("built twice"))
    assert right(toy)


def test_a_program_that_may_not_be_run_is_one_error(toy: Toy, folder: Path) -> None:
    """As where the cache lies on a disk whose programs may not be run."""
    assert right(toy)
    (kernel,) = folder.glob("kernel-*")
    kernel.chmod(0o600)
    with pytest.raises(EmulationError, match=r"can't be started: .*cache directory"):
        right(toy)
