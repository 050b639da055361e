"""Servers that share a database and change the same rows at the same moment."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Connection, update

from agentserve.session import store as store_module
from agentserve.session import tables
from agentserve.text.aliases import Alias
from tests.agentserve.session.test_store import ids, opened, response, sent_again, user

ROUNDS = 12


@pytest.mark.parametrize("whole_session", [False, True])
async def test_turns_that_are_added_while_what_they_go_on_from_is_deleted_are_stored(
    database_url: str, monkeypatch: pytest.MonkeyPatch, whole_session: bool
) -> None:
    """Both take a session's row before those of its responses, so that neither waits for the other in turn."""
    monkeypatch.setattr(store_module, "MOST_TRIES", 1)
    async with opened(database_url, "one") as one, opened(database_url, "two") as two:
        for number in range(ROUNDS):
            base = response(session=f"ses_{number}")
            await one.commit(base)
            added = [sent_again(base, user(text)) for text in ("more", "else")]
            deletes = [two.delete("alice", base.id)]
            if whole_session:
                deletes.append(one.delete_session("alice", base.session))
            await asyncio.gather(one.commit(added[0]), two.commit(added[1]), *deletes)
            assert await two.get("alice", base.id) is None
            row = await one.session("alice", base.session)
            assert row is None if whole_session and row is None else row is not None
            for turn in added:
                stored = await two.get("alice", turn.id)
                assert stored == turn or (whole_session and stored is None)


async def test_turns_that_said_the_same_are_stored_together(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_TRIES", 1)
    said = [(bytes([number]) * 16, Alias(ids=ids(number))) for number in range(40)]
    async with opened(database_url, "one") as one, opened(database_url, "two") as two:
        for number in range(ROUNDS):
            turns = []
            for store, entries in ((one, said), (two, said[::-1])):
                turns.append((store, response(session=f"{number}-{len(turns)}", generated_ids=ids(number, len(turns)))))
                store.aliases.add(entries, turns[-1][1].generated_ids)
            await asyncio.gather(*(store.commit(turn) for store, turn in turns))


@pytest.mark.postgres
async def test_of_two_that_wait_for_each_other_the_one_that_is_ended_begins_again(postgres: Any) -> None:
    url = postgres.new_database()
    async with opened(url, "one") as one, opened(url, "two") as two:
        for name in ("a", "b"):
            await one.commit(response(session=name))
        gate, tries = threading.Barrier(2), Counter[str]()

        def both(connection: Connection, first: str, second: str) -> None:
            tries[first] += 1
            connection.execute(update(tables.sessions).where(tables.sessions.c.id == first).values(turns=7))
            if tries[first] == 1:
                gate.wait()
            connection.execute(update(tables.sessions).where(tables.sessions.c.id == second).values(turns=7))

        await asyncio.gather(one._write(lambda c: both(c, "a", "b")), two._write(lambda c: both(c, "b", "a")))
        assert sorted(tries.values()) == [1, 2]
