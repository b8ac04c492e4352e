"""`Address`: where a team's PostgreSQL database is and what libpq is told besides, read from text that people type.

Such text holds a password, and what is typed wrongly can put it in any place. So an address that is not plainly well
formed is refused before anything of it goes to a name server or a database server, and only the parts that can be no
secret are shown: host, port and the database's name, each of a narrow form. The user is not: a password that is typed
alone stands in that place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn
from urllib.parse import unquote

from flashtune.errors import InvalidInput
from flashtune.values import printable

EXAMPLE = "postgresql://me@host/tuned"
SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
NAME_BYTES = 63
"""Of a user or a database. PostgreSQL cuts longer names and goes on with what is left."""

_PARTS = re.compile(r"([^/?]*)(?:/([^?]*))?(?:\?(.*))?", re.DOTALL)
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]+)?", re.ASCII)
"""A name or an address, without the brackets of IPv6."""
_PORT = re.compile(r"0*[1-9][0-9]{0,4}", re.ASCII)
_DATABASE = re.compile(r"[\w$.-]+")
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_WORDS = re.compile(r"\w{3,}")
"""Parts of a secret that are not shown either: a message may quote it with quotes or commas taken out."""
_PLACES = ("host", "hostaddr", "port")
"""Options that say where the server is, as the address itself does; the values of others are never shown."""


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """Where a team's database is; :func:`read_address` makes it. ``str()`` of it can be shown."""

    host: str
    """Empty for what libpq takes by itself: an option, an environment variable, a socket of this machine."""
    port: int | None
    database: str
    user: str = ""
    password: str = field(default="")
    options: tuple[tuple[str, str], ...] = ()
    """What follows ``?``, by libpq's names."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port else ""
        return f"postgresql://{host}{port}/{self.database}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def parameters(self, **defaults: str) -> dict[str, str]:
        """What libpq is told, by its names; ``defaults`` where the address doesn't say."""
        own = {"host": self.host, "port": str(self.port or ""), "user": self.user, "password": self.password}
        given = {name: text for name, text in own.items() if text}
        return {**defaults, **given, "dbname": self.database, **dict(self.options)}

    def cleaned(self, message: str) -> str:
        """A ``message`` of the driver or the server in a line, without what may be a secret.

        libpq quotes values that it can't use, and whatever is mistyped may be the password.
        """
        for secret in sorted(self._secrets(), key=len, reverse=True):
            message = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", message)
        return printable(message)

    def _secrets(self) -> set[str]:
        whole = {self.user, self.password, *(text for name, text in self.options if name not in _PLACES)}
        spelled = {repr(each)[1:-1] for each in whole}
        return (whole | spelled | {word for each in whole for word in _WORDS.findall(each)}) - {""}


def read_address(given: str) -> Address:
    """The address ``given``, such as ``postgresql://me@host/tuned``.

    Raises `InvalidInput`, which repeats nothing of it: there is no part that can't be the password.
    """
    scheme, separator, rest = given.partition("://")
    if not separator or scheme not in SCHEMES:
        raise InvalidInput(f"a team database needs an address such as {EXAMPLE}, which begins with postgresql://")
    parts = _PARTS.fullmatch(rest)
    assert parts is not None
    authority, path, query = (each or "" for each in parts.groups())
    login, at, place = authority.rpartition("@")
    if "@" in login or "@" in path:
        _refuse("it has more than one @ before its options")
    if "\0" in given or _ESCAPE.search(rest):
        _refuse("it holds a % that two hexadecimal digits don't follow, or a null character")
    user, _, password = login.partition(":")
    user, password = _decoded(user), _decoded(password)
    if at and len(user.encode()) > NAME_BYTES:
        _refuse(f"its user has more than {NAME_BYTES} bytes")
    host, port = _host_and_port(place)
    return Address(host, port, _database(path), user, password, _options(query))


def _refuse(why: str) -> NoReturn:
    raise InvalidInput(
        f"the address of the team database can't be read: {why}. It needs the form {EXAMPLE}; "
        "characters such as @ : / ? # % & in a password are written as %40 %3A %2F %3F %23 %25 %26"
    )


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        _refuse("what is written with % is not UTF-8")


def _host_and_port(place: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(?:\[([^]]*:[^]]*)\]|([^:\[\]]*))(?::(.*))?", place, re.DOTALL)
    if found is None:
        _refuse("what stands for the host is neither a name nor an address")
    host, port = found[1] or found[2], found[3]
    if host and not _is_host(host):
        _refuse("what stands for the host is neither a name nor an address")
    if port and not _is_port(port):
        _refuse("what stands for the port is not a number from 1 to 65535")
    return host, int(port) if port else None


def _is_host(text: str) -> bool:
    return len(text) <= 253 and _HOST.fullmatch(text) is not None


def _is_port(text: str) -> bool:
    return _PORT.fullmatch(text) is not None and int(text) < 65536


def _database(path: str) -> str:
    name = _decoded(path)
    if not name:
        _refuse("it names no database")
    if not _DATABASE.fullmatch(name) or len(name.encode()) > NAME_BYTES:
        _refuse(
            "what stands for the database, behind the first / that follows the host, is not a name of letters, digits, "
            f"_ $ . and - of at most {NAME_BYTES} bytes"
        )
    return name


def _options(query: str) -> tuple[tuple[str, str], ...]:
    """What follows ``?``. Whether libpq knows an option, and takes its value, shows when it is used."""
    found: dict[str, str] = {}
    for number, part in enumerate(query.split("&") if query else (), start=1):
        name, equals, text = part.partition("=")
        name, text = _decoded(name), _decoded(text)
        which = f"option {number} behind the ?"
        if not equals or not re.fullmatch("[a-z_]+", name, re.ASCII):
            _refuse(f"{which} is not of the form name=value")
        if name in found:
            _refuse(f"{which} was there already; several hosts are separated by commas")
        if name in ("user", "dbname"):
            _refuse(f"{which} is a user or a database, which stand before the ?")
        found[name] = text
    for name, fits in (("port", _is_port), ("host", _is_place), ("hostaddr", _is_host)):
        if not all(not each or fits(each) for each in found.get(name, "").split(",")):
            _refuse(f"the {name} behind the ? is none")
    return tuple(found.items())


def _is_place(text: str) -> bool:
    """A host, or the folder of a socket."""
    return _is_host(text) or (text.startswith("/") and text.isprintable())
