"""What a signature covers, and that what can't be read is no signature, key or list that is not there."""

from __future__ import annotations

import functools
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from signed_exports import stored, trusted

from flashtune.tuned_db.exchange.export_file import read_header, write_export
from flashtune.tuned_db.exchange.signing import SIZE_LIMIT, read_trusted, signature_path
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

call = functools.partial(run, "db")


@pytest.fixture
def rows(measurement: Make) -> list[Measurement]:
    return [measurement(median_us=time) for time in (80.0, 81.0)]


HEADER: dict[str, Callable[[dict[str, Any]], object]] = {
    "origin": lambda header: header.update(origin="00000000-dead-beef-0000-000000000000"),
    "device models": lambda header: header.update(gpu_keys=["7.5/potato"]),
    "schema": lambda header: header.update(schema="flashtune-measurements/2"),
}


def change_header(export: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The rows stay as they are, so that the export is sound by itself."""
    pack, unpack = (gzip.compress, gzip.decompress) if export.suffix == ".gz" else (bytes, bytes)
    first, newline, body = unpack(export.read_bytes()).partition(b"\n")
    header = json.loads(first)
    change(header)
    export.write_bytes(pack(json.dumps(header).encode() + newline + body))


@pytest.mark.parametrize("what", HEADER)
def test_where_rows_are_from_is_signed_too(signed: Path, tmp_path: Path, what: str) -> None:
    """m6: with another origin in line 1 the log named a database that nobody had signed, "signed by node 7"."""
    change_header(signed, HEADER[what])
    said = call("import", signed, "--db", tmp_path / "new.db", "--trusted", trusted(tmp_path, "mine"), code=1)
    assert "one of them was changed" in said.output
    assert not stored(tmp_path / "new.db")


@pytest.mark.parametrize("changed", [False, True])
def test_a_signature_of_the_first_schema_is_of_the_rows_alone(
    signed: Path, tmp_path: Path, rows: list[Measurement], changed: bool
) -> None:
    """m6: it is still read, for what it covers, and who made it is not named for what it doesn't."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key: Any = load_pem_private_key((tmp_path / "mine.pem").read_bytes(), None)
    message = f'{{"rows":"{read_header(signed).digest}","schema":"flashtune-signature/1"}}'
    data = json.loads(signature_path(signed).read_text()) | {"schema": "flashtune-signature/1"}
    assert "one of them was changed" in refused_with(signed, data, tmp_path)
    data["signature"] = key.sign(message.encode()).hex()
    signature_path(signed).write_text(json.dumps(data))
    if changed:
        change_header(signed, HEADER["origin"])
    new = tmp_path / "new.db"
    said = call("import", signed, "--db", new, "--trusted", trusted(tmp_path, "mine"), "--require-signature")
    assert "its rows are signed by 'mine of the team', by flashtune-signature/1, which does not cover" in said.stderr
    assert {each.id for each in stored(new)} == {each.id for each in rows}
    log = call("log", "--db", new).output
    assert read_header(signed).origin in log
    assert "mine" not in log
    call(
        "import", signed, "--db", tmp_path / "other.db", "--trusted", untrusted(tmp_path), "--require-signature", code=1
    )


def refused_with(export: Path, data: object, tmp_path: Path) -> str:
    signature_path(export).write_text(json.dumps(data))
    return call("import", export, "--db", tmp_path / "new.db", code=1).output


def untrusted(tmp_path: Path) -> Path:
    (tmp_path / "others.keys").write_text(f"{'0' * 64} somebody\n")
    return tmp_path / "others.keys"


def test_a_signature_that_holds_is_named_in_the_log(signed: Path, store: Store, tmp_path: Path) -> None:
    call("import", signed, "--db", tmp_path / "new.db", "--trusted", trusted(tmp_path, "mine"))
    assert f"new from {store.origin}, signed by mine of the team" in call("log", "--db", tmp_path / "new.db").output


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing", "link in a circle"])
def test_a_signature_that_can_not_be_read_is_not_taken_for_none(
    rows: list[Measurement], store: Store, tmp_path: Path, kind: str
) -> None:
    """m6: it counted as "not signed"."""
    export = tmp_path / "rows.jsonl"
    write_export(rows, export, origin="somebody")
    match kind:
        case "folder":
            signature_path(export).mkdir()
        case "pipe":
            os.mkfifo(signature_path(export))
        case "link to nothing":
            signature_path(export).symlink_to("nothing")
        case _:
            signature_path(export).symlink_to(signature_path(export).name)
    store.add(rows)
    for words in (["import", export, "--db", tmp_path / "new.db"], ["export", export, "--db", store.path]):
        said = call(*words, code=1)
        assert "rows.jsonl.sig" in said.output
        assert "not signed" not in said.output
        assert said.output.splitlines()[-1].startswith("Error: ")
    assert not stored(tmp_path / "new.db")


@pytest.mark.parametrize("option", ["--trusted", "--sign"])
@pytest.mark.parametrize("kind", ["pipe", "device", "long"])
def test_keys_are_read_from_files_of_a_certain_size(
    rows: list[Measurement], store: Store, tmp_path: Path, option: str, kind: str
) -> None:
    """m3: a pipe that nobody writes to was waited for."""
    store.add(rows)
    export, keys = tmp_path / "rows.jsonl", Path("/dev/zero") if kind == "device" else tmp_path / "keys"
    write_export(rows, export, origin="somebody")
    before = export.read_bytes()
    if kind == "pipe":
        os.mkfifo(keys)
    elif kind == "long":
        keys.write_bytes(bytes(SIZE_LIMIT + 1))
    words = (
        ["import", export, "--db", tmp_path / "new.db"]
        if option == "--trusted"
        else ["export", export, "--db", store.path]
    )
    said = call(*words, option, keys, code=1)
    why = f"has more than {SIZE_LIMIT} bytes" if kind == "long" else f"is a {kind}, not a file"
    assert said.output == f"Error: {'list of keys' if option == '--trusted' else 'key'} {keys} {why}\n"
    assert export.read_bytes() == before


def test_a_list_of_keys_may_be_from_windows(tmp_path: Path) -> None:
    """F12."""
    (tmp_path / "team.keys").write_bytes(b"\xef\xbb\xbf" + b"0" * 64 + b" one\r\n" + b"1" * 64 + b" two\r\n")
    assert read_trusted(tmp_path / "team.keys") == {"0" * 64: "one", "1" * 64: "two"}


def test_other_line_ends_break_no_signature(signed: Path, tmp_path: Path) -> None:
    """F12: of the export, and of the signature itself."""
    for path in (signed, signature_path(signed)):
        if path.suffix != ".gz":
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    said = call(
        "import", signed, "--db", tmp_path / "new.db", "--trusted", trusted(tmp_path, "mine"), "--require-signature"
    )
    assert "signed by 'mine of the team'" in said.stderr
