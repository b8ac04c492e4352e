"""Somebody who renames while the cache is used: what was checked is what is read, and what is run."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import pytest

from flashtune.codegen.cache.cache_folder import EMULATOR, TEMPLATES, open_entry, read_entry, write_entry
from flashtune.emulator.program import EXECUTABLE, runnable

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX"),
    pytest.mark.usefixtures("root"),
]


def exchange(a: Path, b: Path) -> None:
    """Swaps two names in one step."""
    flag = 2  # RENAME_EXCHANGE
    if ctypes.CDLL(None, use_errno=True).renameat2(-100, os.fsencode(a), -100, os.fsencode(b), flag):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
@pytest.mark.parametrize("swapped", ["root", "kind", "entry"])
def test_a_folder_that_is_swapped_meanwhile_gives_nothing_foreign(root: Path, tmp_path: Path, swapped: str) -> None:
    """C2: names were looked at, and then looked up once more to be read."""
    write_entry(TEMPLATES, "a", b"mine")
    other = tmp_path / "other"
    twin = {"root": other, "kind": root / "other", "entry": root / TEMPLATES / "other"}[swapped]
    original = {"root": root, "kind": root / TEMPLATES, "entry": root / TEMPLATES / "a"}[swapped]

    def plant() -> None:
        """The entry in it is as good as one of this user; the folder is open to all."""
        if swapped == "entry":
            twin.write_bytes(b"evil")
            twin.chmod(0o666)
            return
        entry = twin / (f"{TEMPLATES}/a" if swapped == "root" else "a")
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(b"evil")
        entry.chmod(0o600)
        (twin / TEMPLATES if swapped == "root" else twin).chmod(0o700)
        twin.chmod(0o777)

    plant()
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            try:
                exchange(original, twin)
            except FileNotFoundError:  # an entry that was found to be foreign is removed
                plant()

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        found = {read_entry(TEMPLATES, "a") for _ in range(20_000)}
    finally:
        stop.set()
        swapper.join()
    assert found <= {b"mine", None}


def test_what_runs_is_what_was_opened(root: Path, tmp_path: Path) -> None:
    """C2: emulator programs were run by name, whoever had written them."""
    script = "#!/bin/sh\necho {}\n"
    write_entry(EMULATOR, "program", script.format("mine").encode(), mode=EXECUTABLE)
    opened = open_entry(EMULATOR, "program")
    assert opened is not None
    foreign = tmp_path / "foreign"
    foreign.write_text(script.format("foreign"))
    foreign.chmod(0o777)
    foreign.replace(root / EMULATOR / "program")
    with runnable(opened) as program:
        assert program.run([program.path], 60).stdout == "mine\n"
    assert open_entry(EMULATOR, "program") is None


def test_what_runs_without_proc_is_a_copy_of_what_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry(EMULATOR, "program", b"#!/bin/sh\necho mine\n", mode=EXECUTABLE)
    opened = open_entry(EMULATOR, "program")
    assert opened is not None
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with runnable(opened) as program:
        assert not program.path.startswith("/proc")
        assert program.run([program.path], 60).stdout == "mine\n"


def test_threads_that_write_and_run_programs_are_not_in_each_others_way() -> None:
    """A program can't be started while any process has it open for writing, as one that is being started may."""
    failed: list[OSError] = []

    def work(number: int) -> None:
        for turn in range(20):
            write_entry(EMULATOR, f"{number}-{turn}", b"#!/bin/sh\n", mode=EXECUTABLE)
            opened = open_entry(EMULATOR, f"{number}-{turn}")
            assert opened is not None
            with runnable(opened) as program:
                try:
                    program.run([program.path], 60)
                except OSError as error:
                    failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
