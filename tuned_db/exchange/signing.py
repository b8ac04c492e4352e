"""Signatures of exports: who wrote a file. Ed25519, by the package ``cryptography`` (extra ``sign``).

A signature is a file of its own beside the export, ``FILE.sig``: a line of JSON with the public key and the signature.
It signs the header of the export, which names the database that the rows are from and has their SHA-256; that the rows
are those is checked whenever an export is read. Keys are known by their 64 hexadecimal digits.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashtune.errors import InvalidInput, MissingDependency
from flashtune.files import SHARED, read_given, read_regular, shown_path, write_whole
from flashtune.tuned_db.records.measurement import canonical
from flashtune.values import plain, shown

from .export_file import ExportHeader

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA = "flashtune-signature/2"
ROWS_ALONE = "flashtune-signature/1"
"""It covers the digest of the rows, and nothing else of the header: not where they are from."""
READABLE = (ROWS_ALONE, SCHEMA)
SUFFIX = ".sig"
INSTALL_SIGN = 'pip install "flashtune[sign]"'
MAKE_KEY = "openssl genpkey -algorithm ed25519 -out KEYFILE"
SIZE_LIMIT = 65536
"""Bytes of a key, a signature or a list of keys."""
_KEY = re.compile("[0-9a-f]{64}")
_FORMS = {"key": (_KEY, 64), "signature": (re.compile("[0-9a-f]{128}"), 128)}


@dataclass(frozen=True, slots=True)
class Signature:
    """What a ``.sig`` file holds, in hexadecimal digits."""

    key: str
    signature: str
    schema: str = SCHEMA


class Signer:
    """A private key that signs; see :meth:`read`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()
        """The public key, as a list of trusted keys has it."""

    @classmethod
    def read(cls, path: Path) -> Signer:
        """From a PEM file without a password. `InvalidInput` where it holds no Ed25519 key."""
        needed()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        content = read_given(path, SIZE_LIMIT, "key")
        try:
            key = load_pem_private_key(content, password=None)
        except (TypeError, ValueError) as error:  # TypeError: it needs a password; the text of neither is shown
            raise InvalidInput(
                f"{shown_path(path)} is no private key in PEM without a password. To make one: {MAKE_KEY}"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidInput(f"{shown_path(path)} holds a key of another kind than Ed25519. To make one: {MAKE_KEY}")
        return cls(key)

    def write(self, export: Path, header: ExportHeader) -> Path:
        """Signs the export at ``export``, which has this header; replaces an earlier signature of it."""
        path = signature_path(export)
        signature = self._key.sign(_message(header, SCHEMA)).hex()
        line = canonical({"key": self.public, "schema": SCHEMA, "signature": signature}) + "\n"
        write_whole(path, line.encode(), mode=SHARED)
        return path


def signature_path(export: Path) -> Path:
    return export.with_name(export.name + SUFFIX)


def read_signature(export: Path) -> Signature | None:
    """The signature beside ``export``, or None where there is no such file. `InvalidInput` if it is not one."""
    path = signature_path(export)
    shown_name = shown_path(path)
    try:
        content = read_regular(path, SIZE_LIMIT, "signature")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG or (error.errno == errno.ENOENT and not os.path.lexists(path)):
            return None
        raise
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{shown_name} is no signature: not JSON") from error
    names = {"key", "schema", "signature"}
    if not isinstance(data, dict) or set(data) != names or data["schema"] not in READABLE:
        wanted = f"it needs {', '.join(sorted(names))}, and {' or '.join(READABLE)}"
        raise InvalidInput(f"{shown_name} is no signature of this version: {wanted}")
    for name, (form, digits) in _FORMS.items():
        if not isinstance(data[name], str) or not form.fullmatch(data[name]):
            raise InvalidInput(f"{shown_name}: {name}={shown(data[name])} must be {digits} hexadecimal digits")
    return Signature(data["key"], data["signature"], data["schema"])


def read_trusted(path: Path) -> dict[str, str]:
    """Names of trusted keys, from lines of a public key and a name; ``#`` begins a comment."""
    trusted: dict[str, str] = {}
    content, shown_name = read_given(path, SIZE_LIMIT, "list of keys"), shown_path(path)
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{shown_name} is no list of keys: not UTF-8") from error
    for number, line in enumerate(lines, start=1):
        key, _, rest = line.partition("#")[0].strip().partition(" ")
        if not key:
            continue
        name = rest.strip()
        if not _KEY.fullmatch(key) or not name or plain(name) is not name:  # it goes into the log of imports
            raise InvalidInput(
                f"{shown_name}, line {number}: {shown(line)} must be a key of 64 hexadecimal digits and a name of at "
                "most 200 printable characters"
            )
        if trusted.setdefault(key, name) != name:
            raise InvalidInput(f"{shown_name}, line {number}: the key is there twice, with different names")
    if not trusted:
        raise InvalidInput(f"{shown_name} lists no key. A line is a key of 64 hexadecimal digits and a name")
    return trusted


@dataclass(frozen=True, slots=True)
class Checked:
    """What :func:`check_signature` found."""

    signer: str
    """Name of the trusted key that has signed the rows and where they are from; empty where none has."""
    sentence: str
    """For people."""


def check_signature(export: Path, header: ExportHeader, trusted: Mapping[str, str], *, required: bool) -> Checked:
    """Who signed the export at ``export``, which was read and has this header.

    A signature that is not of it raises `InvalidInput`, whoever made it. So does anything but one by a key of
    ``trusted``, if one is ``required``.
    """
    found, path = read_signature(export), shown_path(signature_path(export))
    if found is None:
        if required:
            raise InvalidInput(f"{shown_path(export)} is not signed: there is no {path}. Nothing of it was added")
        return Checked("", "not signed")
    if not _matches(found, header):
        raise InvalidInput(
            f"{shown_path(export)} is not what {path} signs: one of them was changed. Nothing of it was added"
        )
    name = trusted.get(found.key)
    if name is None and required:
        raise InvalidInput(
            f"{shown_path(export)} is signed by {found.key}, a key that is not trusted. Nothing of it was added"
        )
    signer = f"{found.key}, a key that is not trusted" if name is None else shown(name)
    if found.schema == ROWS_ALONE:
        return Checked(
            "", f"its rows are signed by {signer}, by {ROWS_ALONE}, which does not cover where they are from"
        )
    return Checked(name or "", f"signed by {signer}")


def needed() -> None:
    """:class:`MissingDependency` says how to get ``cryptography`` where it is missing."""
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"Signatures need cryptography, which can't be imported ({error}): {INSTALL_SIGN}"
        ) from error


def _matches(found: Signature, header: ExportHeader) -> bool:
    needed()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(found.key))
        key.verify(bytes.fromhex(found.signature), _message(header, found.schema))
    except (InvalidSignature, ValueError):  # ValueError: no point of the curve
        return False
    return True


def _message(header: ExportHeader, schema: str) -> bytes:
    """What is signed: no other thing that this key may sign looks like it."""
    if schema == ROWS_ALONE:
        return canonical({"rows": header.digest, "schema": schema}).encode()
    return canonical({"header": dataclasses.asdict(header), "schema": schema}).encode()
