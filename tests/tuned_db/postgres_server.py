"""A PostgreSQL server for tests: on the loopback device, with data of its own, gone when they end."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import pytest

on_both = pytest.mark.parametrize("store", ["file", "server"], indirect=True)
"""Runs a test of a store on an SQLite file, and on a PostgreSQL server where there can be one."""

USER = "tuner"
GUARDED = "guarded"
"""A user that has to give a password; others just say who they are."""
PASSWORD = "correct-horse"
_HBA = f"""
host all {GUARDED} 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
local all all trust
"""


def _binaries() -> Path | None:
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((each for each in folders if (each / "initdb").exists() and (each / "postgres").exists()), None)


def missing() -> str:
    """Why there is no server for tests here; empty where there can be one."""
    if importlib.util.find_spec("psycopg") is None:
        return "they need psycopg: pip install 'psycopg[binary]'"
    if _binaries() is None:
        return "they need its server: apt-get install postgresql"
    return ""


def _server_user() -> str | None:
    """Whom the server runs as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    known = Path("/etc/passwd").read_text("utf-8")
    return next(name for name in ("postgres", "nobody") if f"\n{name}:" in f"\n{known}")


class Cluster:
    """A running server; as a context, it ends with the block."""

    def __init__(self) -> None:
        binaries = _binaries()
        assert binaries is not None
        self._binaries = binaries
        self._user = _server_user()
        # Not below pytest's folder, which only its owner can enter.
        self.folder = Path(tempfile.mkdtemp(prefix="flashtune-postgres-"))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._count = 0
        self._data = self.folder / "data"
        self._run("initdb", "-D", self._data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
        (self._data / "pg_hba.conf").write_text(_HBA, encoding="utf-8")

    def __enter__(self) -> Self:
        self.start()
        self.execute(f"CREATE ROLE {GUARDED} LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c max_connections=60 -c fsync=off"
        self._run("pg_ctl", "-D", self._data, "-l", self.folder / "log", "-w", "-o", options, "start")

    def stop(self) -> None:
        """At once, as if the power had gone."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def url(self, database: str, user: str = USER) -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def create(self, name: str = "", *, template: str = "template0", options: str = "") -> str:
        """Makes a database and returns its address."""
        self._count += 1
        name = name or f"tuned{self._count}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} {options}")
        return self.url(name)

    def execute(self, statement: str, url: str = "") -> list[tuple[Any, ...]]:
        """Runs one statement outside a transaction, and returns the rows that it gives."""
        import psycopg

        with psycopg.connect(url or self.url("postgres"), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def script(self, statements: str, url: str) -> None:
        """Runs statements in one transaction."""
        import psycopg

        with psycopg.connect(url) as connection:
            connection.execute(statements)  # type: ignore[call-overload]

    @property
    def pid(self) -> int:
        """Of the process that takes connections."""
        return int((self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()[0])

    def _run(self, program: str, *arguments: str | Path) -> None:
        with (self.folder.parent / f"{self.folder.name}.out").open("w+", encoding="utf-8") as output:
            Path(output.name).unlink()  # a file, not a pipe: the server that pg_ctl starts would keep a pipe open
            done = subprocess.run(
                [self._binaries / program, *arguments],
                user=self._user,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            output.seek(0)
            assert done.returncode == 0, f"{program}: {output.read()}"
