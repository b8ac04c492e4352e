"""Signed exports: who signed, what was changed, and what is refused before anything is added."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from signed_exports import stored, trusted

from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import read_header, write_export
from flashtune.tuned_db.exchange.signing import SCHEMA, SIZE_LIMIT, check_signature, read_trusted, signature_path
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

call = functools.partial(run, "db")


@pytest.fixture
def rows(measurement: Make) -> list[Measurement]:
    return [measurement(median_us=time) for time in (80.0, 81.0)]


def test_a_trusted_signature_is_named_and_the_rows_are_added(
    signed: Path, rows: list[Measurement], tmp_path: Path
) -> None:
    keys = trusted(tmp_path, "mine")
    said = call("import", signed, "--db", tmp_path / "new.db", "--trusted", keys, "--require-signature")
    assert "signed by 'mine of the team'" in said.stderr
    assert {each.id for each in stored(tmp_path / "new.db")} == {each.id for each in rows}


def test_the_same_rows_and_key_give_the_same_signature(signed: Path, store: Store, tmp_path: Path) -> None:
    before = signature_path(signed).read_bytes()
    call("export", signed, "--db", store.path, "--sign", tmp_path / "mine.pem")
    assert signature_path(signed).read_bytes() == before


@pytest.mark.parametrize("listed", [True, False], ids=["trusted", "not trusted"])
def test_what_was_changed_is_refused_whoever_signed_it(
    signed: Path, rows: list[Measurement], tmp_path: Path, listed: bool, measurement: Make
) -> None:
    """The export is sound by its own digest: somebody wrote another one in its place."""
    write_export([*rows, measurement(median_us=1.0)], signed, origin="somebody")
    more = ["--trusted", trusted(tmp_path, "mine")] if listed else []
    said = call("import", signed, "--db", tmp_path / "new.db", *more, code=1)
    assert "one of them was changed" in said.output
    assert not stored(tmp_path / "new.db")


@pytest.mark.parametrize("name", ["key", "signature"])
def test_a_changed_signature_is_refused(signed: Path, tmp_path: Path, name: str) -> None:
    path = signature_path(signed)
    data = json.loads(path.read_text())
    for place in (0, len(data[name]) - 1):
        digit = "0" if data[name][place] != "0" else "1"
        changed = data | {name: data[name][:place] + digit + data[name][place + 1 :]}
        path.write_text(json.dumps(changed))
        with pytest.raises(InvalidInput, match="one of them was changed"):
            check_signature(signed, read_header(signed), {}, required=False)


def test_a_key_that_is_not_trusted_is_a_notice_or_an_error(
    signed: Path, key: Callable[[str], Path], rows: list[Measurement], tmp_path: Path
) -> None:
    key("other")
    keys = trusted(tmp_path, "other")
    new = tmp_path / "new.db"
    refused = call("import", signed, "--db", new, "--trusted", keys, "--require-signature", code=1)
    assert "a key that is not trusted. Nothing of it was added" in refused.output
    assert not stored(new)
    assert "a key that is not trusted" in call("import", signed, "--db", new, "--trusted", keys).stderr
    assert len(stored(new)) == len(rows)


def test_what_is_not_signed_is_a_notice_or_an_error(rows: list[Measurement], tmp_path: Path) -> None:
    export, new, keys = tmp_path / "rows.jsonl", tmp_path / "new.db", tmp_path / "team.keys"
    write_export(rows, export, origin="somebody")
    keys.write_text(f"{'0' * 64} somebody\n")
    refused = call("import", export, "--db", new, "--trusted", keys, "--require-signature", code=1)
    assert "is not signed" in refused.output
    assert not stored(new)
    assert f"{export}: not signed" in call("import", export, "--db", new).stderr
    assert len(stored(new)) == len(rows)
    assert "--trusted" in call("import", export, "--require-signature", code=2).output


def test_an_export_without_a_signature_leaves_no_stale_one(signed: Path, store: Store, tmp_path: Path) -> None:
    before = signed.read_bytes()
    said = call("export", signed, "--db", store.path, code=1)
    assert "give --sign, remove it, or choose another name" in said.output
    assert signed.read_bytes() == before


def test_a_bad_key_is_refused_before_anything_is_written(
    store: Store, rows: list[Measurement], key: Make, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey

    store.add(rows)
    text = tmp_path / "notes.txt"
    text.write_text("my secret\n")
    for bad, why in (
        (text, "no private key"),
        (key("locked", password=b"secret"), "without a password"),
        (key("kind", kind=Ed448PrivateKey), "another kind than Ed25519"),
    ):
        said = call("export", tmp_path / "rows.jsonl", "--db", store.path, "--sign", bad, code=1)
        assert why in said.output
        assert "openssl genpkey" in said.output
        assert "secret" not in said.output
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        "{}",
        json.dumps({"key": "0" * 64, "schema": "flashtune-signature/3", "signature": "0" * 128}),
        json.dumps({"key": "0" * 63, "schema": SCHEMA, "signature": "0" * 128}),
        json.dumps({"key": "0" * 64, "schema": SCHEMA, "signature": 7}),
        json.dumps({"key": "0" * 64, "schema": SCHEMA, "signature": "0" * 128, "more": 1}),
        " " * (SIZE_LIMIT + 1),
    ],
    ids=["text", "list", "empty", "later", "short", "number", "more", "long"],
)
def test_what_is_no_signature_is_refused(rows: list[Measurement], tmp_path: Path, text: str) -> None:
    export = tmp_path / "rows.jsonl"
    write_export(rows, export, origin="somebody")
    signature_path(export).write_text(text)
    said = call("import", export, "--db", tmp_path / "new.db", code=1)
    assert "rows.jsonl.sig" in said.output
    assert not stored(tmp_path / "new.db")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{'0' * 63} name", "line 1"),
        (f"{'g' * 64} name", "line 1"),
        (f"# keys\n{'0' * 64}", "line 2"),
        (f"{'0' * 64} {'x' * 201}", "line 1: .* at most 200"),
        (f"{'0' * 64} one\n{'0' * 64} two", "twice"),
        ("# none yet\n", "lists no key"),
    ],
    ids=["short", "not hexadecimal", "no name", "long name", "twice", "empty"],
)
def test_a_bad_list_of_keys_names_its_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "team.keys"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=why):
        read_trusted(path)


def test_without_the_extra_a_signature_is_not_passed_over(
    rows: list[Measurement], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = tmp_path / "rows.jsonl"
    write_export(rows, export, origin="somebody")
    data = {"key": "0" * 64, "schema": SCHEMA, "signature": "0" * 128}
    signature_path(export).write_text(json.dumps(data))
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for name in [each for each in sys.modules if each.startswith("cryptography.")]:
        monkeypatch.delitem(sys.modules, name)
    said = call("import", export, "--db", tmp_path / "new.db", code=1)
    assert 'pip install "flashtune[sign]"' in said.output
    assert not stored(tmp_path / "new.db")
