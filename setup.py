"""Refuses to build without the folders that the links under src/flashtune point to. The rest is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

LINKED = ("codegen", "emulator", "templates", "tuned_db", "tuner")


def missing_folders(root: Path) -> list[str]:
    """A sentence for each linked package that a build at ``root`` would leave out."""
    problems = []
    for name in LINKED:
        package = root / "src" / "flashtune" / name
        if package.is_file():
            problems.append(f"src/flashtune/{name} is a plain file")
        elif not package.is_dir():
            problems.append(
                f"src/flashtune/{name} leads nowhere" if package.is_symlink() else f"src/flashtune/{name} is missing"
            )
        elif not (package / "__init__.py").is_file():
            problems.append(f"src/flashtune/{name} has no __init__.py")
    return problems


def check_folders(root: Path) -> None:
    """Stops the build with what is wrong and what to do; setuptools would make a package without these folders."""
    if problems := missing_folders(root):
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise SystemExit(
            f"flashtune can't be built from this copy:{listed}\n"
            "These must be symbolic links to the folders at the root. A zip download or a checkout without symbolic "
            "links turns them into text files.\n"
            "Clone with git (on Windows: git clone -c core.symlinks=true), or install from the wheel or the sdist."
        )


if __name__ == "__main__":
    check_folders(Path(__file__).resolve().parent)
    from setuptools import setup  # behind the check: it would fail on the same copy less clearly

    setup()
