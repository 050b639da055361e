"""What lists and commits read of a database does not grow with what a session or a conversation has."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from sqlalchemy import Connection, insert

from agentserve.interfaces import InConversation
from agentserve.session import listing, rows
from agentserve.session.conversations import SqlConversations, append_turn
from agentserve.session.database import connect, upgrade
from agentserve.session.tables import conversation_items, conversations, responses, sessions
from agentserve.session.unstored import Unstored
from tests.agentserve.session.test_store import response

T = TypeVar("T")
SESSIONS = 3
SEEN = InConversation(id="conv", version=0, last_response=None, new_items=1)


def fill(connection: Connection, turns: int) -> None:
    """Sessions of so many turns, and a conversation of so many items."""
    for session in range(SESSIONS):
        name, last = f"ses_{session}", f"r_{session}_{turns - 1}"
        row = {"id": name, "principal": "a", "created_at": 0.0, "updated_at": session, "turns": turns, "last_response": last}
        connection.execute(insert(sessions), {**row, "context_tokens": 1, "reused_tokens": 0})
        made = [
            {
                "id": f"r_{session}_{turn}",
                "session": name,
                "principal": "a",
                "parent": f"r_{session}_{turn - 1}" if turn else None,
                "model": "demo",
                "status": "completed",
                "created_at": turn,
                "completed_at": turn,
                "tools": b"[]",
                "body": b"{}",
                "prompt_kept": 0,
                "prompt_ids": b"",
                "generated_ids": b"",
                "context_items": 2 * turn + 1,
            }
            for turn in range(turns)
        ]
        connection.execute(insert(responses), made)
    talk = {"id": "conv", "principal": "a", "created_at": 0.0, "metadata": b"{}", "version": 0, "told": -1}
    connection.execute(insert(conversations), talk)
    body = b'{"type":"message","role":"user","content":[],"id":"i_%d"}'
    said = [{"conversation": "conv", "id": f"i_{i}", "position": i, "body": body % i} for i in range(turns)]
    connection.execute(insert(conversation_items), said)


class Work:
    """Steps of SQLite's machine, which are rows read and what is done with them."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.steps = 0
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_progress_handler(self._count, 1)

    def _count(self) -> int:
        self.steps += 1
        return 0

    async def run(self, function: Callable[[Connection], T], /) -> T:
        return function(self.connection)


async def steps(connection: Connection) -> dict[str, int]:
    """Of each of these questions."""
    work = Work(connection)
    talks = SqlConversations(work.run, work.run)
    new = response(principal="a", session="ses_1", context_items=1 << 20)
    done: dict[str, int] = {}

    def since(what: str) -> None:
        done[what] = work.steps - sum(done.values())

    assert len(listing.session_rows(work.connection, "a", limit=20)) == SESSIONS
    since("sessions")
    assert len(listing.kept_sessions(work.connection, "a", ["ses_0", "ses_1"])) == 2
    since("kept sessions")
    assert len(rows.before(work.connection, new, 16)) == 16
    since("candidates of a resent context")
    for ascending in (True, False):
        page = await talks.page("a", "conv", limit=5, after="i_20", ascending=ascending)
        assert page is not None
        assert [item.id for item in page] == [f"i_{20 + (1 if ascending else -1) * (n + 1)}" for n in range(5)]
    since("a page of items")
    assert await talks.item("a", "conv", "i_7") is not None
    since("an item")
    append_turn(work.connection, msgspec.structs.replace(new, in_conversation=SEEN))
    since("a turn's items are added")
    return done


async def test_what_is_read_does_not_grow_with_turns(tmp_path: Path) -> None:
    done: list[dict[str, int]] = []
    for turns in (40, 1600):
        engine = connect(f"sqlite:///{tmp_path}/{turns}.db")
        upgrade(engine)
        with engine.begin() as connection:
            fill(connection, turns)
            done.append(await steps(connection))
        engine.dispose()
    few, many = done
    assert min(few.values()) > 0
    assert {what: n for what, n in many.items() if n > 1.2 * few[what]} == {}, (few, many)


def test_an_unstored_session_names_the_last_of_its_lineage_too() -> None:
    unstored, last = Unstored(), None
    for n in range(5):
        turn = response(id=f"r{n}", parent=last)
        unstored.add(turn, 0)
        last = turn.id
    shown = {most: unstored.row("alice", "ses_1", most) for most in (3, 5)}
    assert [(row.lineage, row.lineage_has_more) for row in shown.values() if row is not None] == [
        (("r2", "r3", "r4"), True),
        (("r0", "r1", "r2", "r3", "r4"), False),
    ]
    assert unstored.names("alice") == ["ses_1"]
    assert unstored.names("bob") == []
