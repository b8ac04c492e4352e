"""Every environment variable that flashtune reads. A leaf: imports nothing of the project but errors.

A variable that is unset or empty leaves the choice to the XDG_* variables, and these to HOME. Relative paths count
from the directory in which the process started, so that a later ``chdir`` moves nothing. Nothing is created here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from .errors import InvalidInput

APPLICATION = "flashtune"
DATABASE_NAME = "tuned.db"
AUTHOR_LIMIT = 100
"""Characters."""
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_TEAM_SCHEME = re.compile(r"postgres(?:ql)?(?:\+psycopg)?://")
_LIKE_AN_ADDRESS = re.compile(
    r"""
    ://                                                        # a scheme
    | pass\w*\s*[=:]                                           # password=..., PGPASSWORD=...
    | ^\W*(?:jdbc:)?postgres\w*(?:\+\w+)?\s*:                 # a scheme without the slashes
    | ^//[^/]*@                                                # an address without its scheme
    | ^(?![~/\\]|[a-z]:[\\/])(?:                              # an absolute path may hold what follows
        [^/@]*:[^@]*@                                          # user:password@host
        | [^/@]*@[^/@]*@                                       # user@password@host
        | (?:.*[\s;&?,'"])?(?:user|host|hostaddr|port|dbname|sslmode|service)\s*=   # what libpq takes as well
    )
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable."""

    name: str
    type: str
    meaning: str
    default: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="FLASHTUNE_DB",
        type="path",
        meaning="The SQLite file with measurements and winners.",
        default=f"{DATABASE_NAME} in the user's data directory ($XDG_DATA_HOME/flashtune or ~/.local/share/flashtune)",
    ),
    Setting(
        name="FLASHTUNE_TEAM_DB",
        type="address",
        meaning="A team's PostgreSQL database, for flashtune db push and pull alone, such as "
        "postgresql://me@host/tuned. A password is better kept in ~/.pgpass. Needs the extra postgres.",
        default="None: nothing is shared.",
    ),
    Setting(
        name="FLASHTUNE_AUTHOR",
        type="text",
        meaning="A name that is stored with what is measured here and travels with it, so that a team knows whom to "
        "ask. The log of imports, merges, pulls and pushes has it too. At most 100 printable characters.",
        default="None: no name is stored.",
    ),
    Setting(
        name="FLASHTUNE_CACHE_DIR",
        type="path",
        meaning="Directory of compiled kernels and templates, and of sources that failed to compile. Safe to delete. "
        "What is in it runs: one that others can write to is not used.",
        default="The user's cache directory ($XDG_CACHE_HOME/flashtune or ~/.cache/flashtune)",
    ),
    Setting(
        name="FLASHTUNE_CAPTURE",
        type="1 or path",
        meaning="1: attention() records problems that it has no tuned config for, in a file beside the database; a "
        "path: in that file. Sizes and features only, no data. flashtune tune --captured tunes them.",
        default="Nothing is recorded.",
    ),
)


def _start_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # deleted, or not readable
        return None


_START = _start_directory()


def database_path() -> Path:
    """Absolute path of the tuning database. Neither it nor its directory needs to exist."""
    explicit = _path_setting("FLASHTUNE_DB")
    if explicit is not None and not explicit.name:
        raise InvalidInput(f"FLASHTUNE_DB={explicit} must be the path of a file, such as {explicit / DATABASE_NAME}")
    return explicit or _user_path(platformdirs.user_data_path, "XDG_DATA_HOME", "FLASHTUNE_DB") / DATABASE_NAME


def team_database() -> str:
    """Address of the team's database, not looked at yet. It may hold a password: see :func:`presentable`."""
    given = os.environ.get("FLASHTUNE_TEAM_DB", "").strip()
    if not given:
        raise InvalidInput(
            "no team database is named: set FLASHTUNE_TEAM_DB to its address, such as postgresql://me@host/tuned, "
            "or pass --team"
        )
    return given


def author() -> str:
    """The name to store with measurements, empty if none was chosen. `InvalidInput` for a long one, or one that can't
    be printed."""
    given = os.environ.get("FLASHTUNE_AUTHOR", "").strip()
    if may_hold_password(given):
        raise InvalidInput("FLASHTUNE_AUTHOR must be a name, not an address: it is stored with what is measured")
    if len(given) > AUTHOR_LIMIT or not given.isprintable():
        raise InvalidInput(f"FLASHTUNE_AUTHOR={given[:40]!r} must be at most {AUTHOR_LIMIT} printable characters")
    return given


def may_hold_password(text: str) -> bool:
    """Whether ``text`` looks like the address of a server, well formed or not. Then nothing shows or stores it.

    A file whose path looks like one can be named by its absolute path.
    """
    return _LIKE_AN_ADDRESS.search(text) is not None


def presentable(name: str) -> str:
    """What variable ``name`` holds, to be shown: nothing of an address, which may hold a password in any place."""
    given = os.environ.get(name, "")
    if name == "FLASHTUNE_TEAM_DB" and given:
        return "postgresql://..." if _TEAM_SCHEME.match(given.strip()) else "not an address"
    return "not shown: it looks like an address" if may_hold_password(given) else given


def cache_dir() -> Path:
    """Absolute path of the directory for what can be made again. It need not exist."""
    explicit = _path_setting("FLASHTUNE_CACHE_DIR")
    return explicit or _user_path(platformdirs.user_cache_path, "XDG_CACHE_HOME", "FLASHTUNE_CACHE_DIR")


def is_set(name: str) -> bool:
    """Whether variable ``name`` chooses anything: to be empty is to be unset."""
    return bool(os.environ.get(name, "").strip())


def capture_path() -> Path | None:
    """Absolute path of the file that gets problems without a tuned config; None where that is not asked for."""
    given = os.environ.get("FLASHTUNE_CAPTURE", "").strip().lower()
    if given in ("", *_OFF):
        return None
    return captured_problems_path() if given in _ON else _path_setting("FLASHTUNE_CAPTURE")


def captured_problems_path() -> Path:
    """Where captured problems are if no path was chosen for them: beside the tuning database."""
    database = database_path()
    return database.with_name(f"{database.stem}.captured.jsonl")


def _user_path(find: Callable[..., Path], variable: str, setting: str) -> Path:
    """A directory of the user's own. Users without a home directory are common in containers."""
    try:
        path = find(APPLICATION, appauthor=False)
    except RuntimeError:
        path = None
    if path is None or path.parts[0] == "~":  # older platformdirs leave the tilde as it is, newer ones raise
        raise InvalidInput(f"this user has no home directory: set HOME, {variable} or {setting}")
    return _absolute(path, variable)


def _path_setting(name: str) -> Path | None:
    """The path in variable ``name``, or None where it is unset or empty."""
    if not is_set(name):
        return None
    given = os.environ[name]
    if may_hold_password(given):
        raise InvalidInput(f"{name} must be a path of a file system, not an address such as postgresql://host/database")
    try:
        return _absolute(Path(given).expanduser(), name)
    except RuntimeError as error:
        raise InvalidInput(f"{name}={given[:200]!r}: the home directory it names is not known") from error


def _absolute(path: Path, name: str) -> Path:
    if path.is_absolute():
        return path
    if _START is None:
        raise InvalidInput(f"{name}={str(path)[:200]!r} is relative, and the working directory no longer exists")
    return _START / path
