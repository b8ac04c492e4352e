"""Checks that wheels and sdists hold every file they should: usage check_dist.py dist/*.whl dist/*.tar.gz."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("codegen", "emulator", "templates", "tuned_db", "tuner")


def tracked(*paths: str) -> set[str]:
    """Regular files under ``paths`` that git knows and that exist, relative to the root."""
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--", *paths],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = {name for name in listed.split("\0") if name}
    return {name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}


def expected_in_wheel() -> set[str]:
    """Every file of the public package and of the linked folders, as ``flashtune/...``."""
    linked = {f"flashtune/{name}" for name in tracked(*LINKED)}
    return linked | {name.removeprefix("src/") for name in tracked("src/flashtune")}


def expected_in_sdist() -> set[str]:
    """Every tracked file, and the linked folders a second time where the wheel is built from."""
    return tracked(".") | {f"src/{name}" for name in expected_in_wheel()}


def contents(archive: Path) -> set[str]:
    """Names of the files in a wheel or, without its top folder, in an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}


def missing(archive: Path) -> set[str]:
    """Files that should be in ``archive`` and are not."""
    expected = expected_in_wheel() if archive.suffix == ".whl" else expected_in_sdist()
    return expected - contents(archive)


if __name__ == "__main__":
    for archive in map(Path, sys.argv[1:]):
        if lost := missing(archive):
            raise SystemExit(f"{archive.name} lacks {len(lost)} files: {', '.join(sorted(lost))}")
        print(f"{archive.name}: {len(contents(archive))} files, {archive.stat().st_size} bytes, nothing is missing")
