"""Signatures of exports: who wrote the rows of a file. Ed25519, by the package ``cryptography`` (extra ``sign``).

A signature is a file of its own beside the export, ``FILE.sig``: a line of JSON with the public key and the signature.
It signs the digest that the header of the export gives, which is the SHA-256 of its rows, all of them in their one
spelling; that the rows are those is checked whenever an export is read. Keys are known by their 64 hexadecimal digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashtune.codegen.value import shown
from flashtune.errors import InvalidInput, MissingDependency

from .records import canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA = "flashtune-signature/1"
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

        try:
            key = load_pem_private_key(_read(path), password=None)
        except (TypeError, ValueError) as error:  # TypeError: it needs a password; the text of neither is shown
            raise InvalidInput(
                f"{path} is no private key in PEM without a password. To make one: {MAKE_KEY}"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidInput(f"{path} holds a key of another kind than Ed25519. To make one: {MAKE_KEY}")
        return cls(key)

    def write(self, export: Path, digest: str) -> Path:
        """Signs the export at ``export``, whose rows have ``digest``; replaces an earlier signature of it."""
        path = signature_path(export)
        data = {"key": self.public, "schema": SCHEMA, "signature": self._key.sign(_message(digest)).hex()}
        unfinished = path.with_name(f".{path.name}.tmp")
        unfinished.write_text(canonical(data) + "\n", encoding="utf-8")
        unfinished.replace(path)
        return path


def signature_path(export: Path) -> Path:
    return export.with_name(export.name + SUFFIX)


def read_signature(export: Path) -> Signature | None:
    """The signature beside ``export``, or None where there is no such file. `InvalidInput` if it is not one."""
    path = signature_path(export)
    if not path.is_file():
        return None
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is no signature: not JSON") from error
    names = {"key", "schema", "signature"}
    if not isinstance(data, dict) or set(data) != names or data["schema"] != SCHEMA:
        raise InvalidInput(f"{path} is no signature of this version: it needs {', '.join(sorted(names))}, and {SCHEMA}")
    for name, (form, digits) in _FORMS.items():
        if not isinstance(data[name], str) or not form.fullmatch(data[name]):
            raise InvalidInput(f"{path}: {name}={shown(data[name])} must be {digits} hexadecimal digits")
    return Signature(data["key"], data["signature"])


def read_trusted(path: Path) -> dict[str, str]:
    """Names of trusted keys, from lines of a public key and a name; ``#`` begins a comment."""
    trusted: dict[str, str] = {}
    try:
        lines = _read(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is no list of keys: not UTF-8") from error
    for number, line in enumerate(lines, start=1):
        key, _, name = line.partition("#")[0].strip().partition(" ")
        if not key:
            continue
        if not _KEY.fullmatch(key) or not name.strip().isprintable() or not name.strip():
            raise InvalidInput(
                f"{path}, line {number}: {shown(line)} must be a key of 64 hexadecimal digits and a name"
            )
        if trusted.setdefault(key, name.strip()) != name.strip():
            raise InvalidInput(f"{path}, line {number}: the key is there twice, with different names")
    if not trusted:
        raise InvalidInput(f"{path} lists no key. A line is a key of 64 hexadecimal digits and a name")
    return trusted


@dataclass(frozen=True, slots=True)
class Checked:
    """What :func:`check_signature` found."""

    signer: str
    """Name of the trusted key; empty where none has signed."""
    sentence: str
    """For people."""


def check_signature(export: Path, digest: str, trusted: Mapping[str, str], *, required: bool) -> Checked:
    """Who signed the export at ``export``, whose rows have ``digest``.

    A signature that is not of these rows raises `InvalidInput`, whoever made it. So does anything but one by a key of
    ``trusted``, if one is ``required``.
    """
    found = read_signature(export)
    if found is None:
        if required:
            raise InvalidInput(f"{export} is not signed: there is no {signature_path(export)}. Nothing of it was added")
        return Checked("", "not signed")
    if not _matches(found, digest):
        path = signature_path(export)
        raise InvalidInput(f"{export} is not what {path} signs: one of them was changed. Nothing of it was added")
    name = trusted.get(found.key)
    if name is not None:
        return Checked(name, f"signed by {shown(name)}")
    if required:
        raise InvalidInput(f"{export} is signed by {found.key}, a key that is not trusted. Nothing of it was added")
    return Checked("", f"signed by {found.key}, a key that is not trusted")


def needed() -> None:
    """:class:`MissingDependency` says how to get ``cryptography`` where it is missing."""
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"Signatures need cryptography, which can't be imported ({error}): {INSTALL_SIGN}"
        ) from error


def _matches(found: Signature, digest: str) -> bool:
    needed()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(found.key))
        key.verify(bytes.fromhex(found.signature), _message(digest))
    except (InvalidSignature, ValueError):  # ValueError: no point of the curve
        return False
    return True


def _message(digest: str) -> bytes:
    """What is signed: no other thing that this key may sign looks like it."""
    return canonical({"rows": digest, "schema": SCHEMA}).encode()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(SIZE_LIMIT + 1)
    if len(data) > SIZE_LIMIT:
        raise InvalidInput(f"{path} has more than {SIZE_LIMIT} bytes: it is no key, signature or list of keys")
    return data
