"""Databases for store tests: a SQLite file per test, and one private PostgreSQL server per run with a database per test."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text


def _binary(name: str) -> str:
    found = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    return found[-1] if found else shutil.which(name) or name


def _as_someone_else() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class PostgresServer:
    """A private server on a Unix socket. stop and start for tests of a dead database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._identity = _as_someone_else()
        if self._identity:
            os.chown(folder, self._identity["user"], self._identity["group"])
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(folder)}
        self._common: dict[str, Any] = {"cwd": folder, "env": environment, **self._identity}
        command = [_binary("initdb"), "-D", str(folder / "data"), "-U", "test", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(command, check=True, capture_output=True, **self._common)
        self.process: subprocess.Popen[Any] | None = None
        self.start()

    def start(self) -> None:
        command = [_binary("postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder), "-h", "", "-F"]
        with (self.folder / "log").open("ab") as log:
            process = self.process = subprocess.Popen(command, stdout=log, stderr=log, **self._common)
        deadline = time.monotonic() + 60
        engine = create_engine(self.url("postgres"))
        while True:
            try:
                with engine.connect():
                    break
            except Exception:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.1)
        engine.dispose()

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)  # SIGTERM would wait for clients to leave, pools among them
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGQUIT)
                self.process.wait(60)
            self.process = None

    def crash(self) -> None:
        """Gone at once, with every connection."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(60)
            self.process = None

    def url(self, database: str) -> str:
        return f"postgresql://test@/{database}?host={self.folder}"

    def new_database(self) -> str:
        name = f"t{uuid.uuid4().hex}"
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self.url(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="agentserve-pg-"))
    server = PostgresServer(folder)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'sessions.db'}"
    return request.getfixturevalue("postgres").new_database()
