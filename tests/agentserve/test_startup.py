"""What cannot be used at start is told in one line that names it, before anything runs; Host is read strictly."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentserve.app import compose
from agentserve.config import StoreConfig, is_loopback, load
from agentserve.errors import ConfigError
from agentserve.security import _host_name
from agentserve.session import database as database_module
from agentserve.session.database import connect as session_connect
from agentserve.session.database import upgrade
from agentserve.session.store import SqlStore
from statecache.index.connect import connect as index_connect

DEMO_MODEL = Path(__file__).parents[2] / "agentserve" / "demo_model"


def start(state: Path, **flags: Any) -> None:
    """Start a server as `serve` does; only ever called where it must refuse."""
    named = {name.replace("__", "."): value for name, value in flags.items()}
    config = load(flags={"state_dir": str(state), "server.port": 0, **named}, environ={"HOME": str(state)})
    asyncio.run(compose(config).serve())


def foreign_database(state: Path) -> None:
    with sqlite3.connect(state / "sessions.db") as connection:
        connection.execute("create table responses (x)")


def newer_database(state: Path) -> None:
    with sqlite3.connect(state / "sessions.db") as connection:
        connection.execute("create table alembic_agentserve (version_num varchar(32) primary key)")
        connection.execute("insert into alembic_agentserve values ('zzzz')")


def spoiled_database(state: Path) -> None:
    """Its first page is right."""
    upgrade(f"sqlite:///{state / 'sessions.db'}")
    whole = (state / "sessions.db").read_bytes()
    (state / "sessions.db").write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))


BAD_STATES: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda d: (d / "sessions.db").write_bytes(b"garbage" * 1000),
        "sessions.db cannot be used: file is not a database; put back a copy of it, or move it away",
    ),
    (spoiled_database, "sessions.db cannot be used: database disk image is malformed; put back a copy of it"),
    (lambda d: (d / "sessions.db").mkdir(), "unable to open database file"),
    (foreign_database, "already exists"),
    (newer_database, "zzzz"),
    (lambda d: (d / "token").write_text(" \n"), "is empty"),
    (lambda d: (d / "token").mkdir(), "Is a directory"),
    (lambda d: (d / "token").write_bytes(b"\xff\xfe\x00"), "cannot stand in a header"),
    (lambda d: (d / "token").write_text("two\nlines"), "cannot stand in a header"),
    (lambda d: (d / "token").write_text("pässword"), "cannot stand in a header"),
]


def test_an_unknown_dialect_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dialect: got 'klingon'; accepted: auto, hermes, qwen3_xml"):
        start(tmp_path, model__dialect="klingon")


@pytest.mark.parametrize(("spoil", "message"), BAD_STATES)
def test_an_unusable_state_directory_is_named(tmp_path: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(tmp_path)
    database = tmp_path / "sessions.db"
    before = database.read_bytes()[100:] if database.is_file() else None  # the head says whether a log is used
    with pytest.raises(ConfigError, match=message) as refusal:
        start(tmp_path)
    assert "\n" not in str(refusal.value)
    assert before is None or database.read_bytes()[100:] == before, "nothing is begun over it"


async def test_a_locked_database_is_told_after_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 1)
    path = tmp_path / "sessions.db"
    upgrade(f"sqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(ConfigError, match="database is locked; another process has held it for 0 s; end that one"):
        await asyncio.to_thread(start, tmp_path)
    other.execute("rollback")
    other.close()


@pytest.mark.parametrize("empty", [True, False])
async def test_a_database_that_begins_anew_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, empty: bool) -> None:
    path = tmp_path / "sessions.db"
    if empty:
        path.touch()
    caplog.set_level("INFO", database_module.__name__)
    news = [("WARNING", f"sessions database was an empty file and is begun anew file={path}")]
    for expected in (news if empty else [("INFO", f"sessions database is new file={path}")], []):
        store = SqlStore(StoreConfig(url=f"sqlite:///{path}"))
        await store.open()
        await store.close()
        assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == database_module.__name__] == expected
        caplog.clear()


@pytest.mark.parametrize("name", ["token", "seal.key"])
def test_a_disk_that_fills_up_leaves_no_half_of_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "seal.key":
        (tmp_path / "token").write_text("secret")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=f"{name}: No space left on device"):
            start(tmp_path)
    assert not list(tmp_path.glob(f"{name}*")), "the next start makes it"
    config = load(flags={"state_dir": str(tmp_path), "server.port": 0}, environ={"HOME": str(tmp_path)})
    compose(config).state.release()
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / name).read_bytes()) >= 32


BAD_FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"store__url": "garbage"}, "store.url"),
    ({"store__url": "mysql://x/y"}, "sqlite and postgresql are"),
    ({"store__url": "postgresql://u@h:notaport/x"}, "store.url"),
    ({"store__url": "postgresql://u@127.0.0.1:1/x", "store__password_file": "/nonexistent"}, "/nonexistent"),
    ({"store__url": "postgresql://u:hunter2@127.0.0.1:1/x"}, r"u:\*\*\*@127.0.0.1:1/x cannot be used: .*refused"),
    ({"state_dir": "/dev/null/x"}, "cannot make the state directory /dev/null/x: Not a directory"),
    ({"state_dir": os.fsdecode(b"/tmp/\xff")}, r"state_dir: is not UTF-8 \(character 5 of 6\)"),
    ({"model__dir": "a\0b"}, "model.dir: has a NUL character"),
    ({"server__host": "300.1.2.3"}, "server.host '300.1.2.3' has no address"),
    ({"server__host": "a" * 70}, "has no address"),
    ({"server__host": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
    ({"server__token": ""}, "token of 'default' is empty"),
    ({"server__tokens": {"guest": ""}}, "token of 'guest' is empty"),
    (
        {"server__allowed_hosts": ["fine", "a.example:80"]},
        r"server.allowed_hosts\[1\]: got 'a.example:80'; accepted: .*without a port",
    ),
    ({"server__allowed_hosts": ["http://a.example"]}, r"server.allowed_hosts\[0\]"),
    ({"server__allowed_origins": ["localhost:3000"]}, r"server.allowed_origins\[0\]: got 'localhost:3000'; accepted: a whole"),
    ({"server__allowed_origins": ["http://a.example/app"]}, r"server.allowed_origins\[0\]"),
    ({"server__allowed_origins": ["*"]}, r"server.allowed_origins\[0\]"),
    ({"turn__ttft_deadline_s": float("inf")}, "turn.ttft_deadline_s: .*, got inf"),
    ({"turn__keepalive_s": 1e300}, "turn.keepalive_s: .*, got 1e"),
    ({"model__ram_cache_bytes": 1 << 64}, "model.ram_cache_bytes: .*, got 18446744073709551616"),
    ({"model__engine": {"memory_bytes": 1 << 64}}, "model.engine"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_an_unusable_setting_is_named(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        start(tmp_path, **flags)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("name", ["sp ace ünï", "qu?est=1&x", "per%20cent", "hash#x", "co:l@n", "new\nline"])
def test_databases_lie_in_the_state_directory_whatever_its_name(tmp_path: Path, name: str) -> None:
    config = load(flags={"state_dir": str(tmp_path / name)}, environ={"HOME": "/nowhere"})
    for url, connect in (
        (config.store.url, session_connect),
        (config.model.checkpoints_url, index_connect),
    ):
        engine = connect(url)
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
        engine.dispose()
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["checkpoints.db", "sessions.db"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: Address already in use; choose another: --port"):
            start(tmp_path, server__port=port)
    assert not (tmp_path / "sessions.db").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"eos_token": 7, "chat_template": [{}]}'),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"added_tokens": [5]}'),
        ("chat_template.jinja", b"{% for x in %}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_misshapen_text_files_of_a_model_are_refused_with_its_directory(tmp_path: Path, name: str, content: bytes) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    if b"chat_template" in content:
        (model / "chat_template.jinja").unlink()
    (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"model {model}: "):
        start(tmp_path / "state", model__dir=str(model))


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "localhost:1", "127.0.0.1:8741", "127.1", "127.255.0.9", "[::1]", "[::1]:80"]
)
def test_loopback_hosts_are_known(host: str) -> None:
    assert is_loopback(_host_name(host))


@pytest.mark.parametrize(
    "host",
    [
        "[::1]evil.example",
        "[::1]:80:evil",
        "[::1",
        "::1",
        "localhost:80:evil",
        "localhost:80x",
        "localhost.evil.example",
        "user@localhost",
        "localhost/evil",
        "localhost..",
        "127.999.0.1",
        "127.\u00b2.1.1",
        "127.0.0.0.1",
        "127.0.0.1.evil.example",
        "",
        ":80",
    ],
)
def test_what_only_begins_like_a_loopback_host_is_none(host: str) -> None:
    assert not is_loopback(_host_name(host))
