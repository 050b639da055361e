"""Sessions on SQLite and PostgreSQL: what is committed is there, whole, and only for its principal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import func, select

from agentserve.config import StoreConfig
from agentserve.errors import ServerError, TurnFailure
from agentserve.interfaces import LISTED_LINEAGE, StoredResponse
from agentserve.protocol.responses import ErrorDetail, ResponseBody
from agentserve.session import background, rows, tables
from agentserve.session import store as store_module
from agentserve.session.store import SqlStore
from agentserve.text.aliases import Alias
from tests.agentserve.text.play import answer, call, output, thought, user

_numbers = itertools.count()


@asynccontextmanager
async def opened(url: str, server: str = "") -> AsyncIterator[SqlStore]:
    store = SqlStore(StoreConfig(url=url), server)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def ids(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def response(**changes: Any) -> StoredResponse:
    n = next(_numbers)
    fields: dict[str, Any] = {
        "id": f"resp_{n}",
        "principal": "alice",
        "session": "ses_1",
        "parent": None,
        "model": "demo",
        "status": "completed",
        "created_at": 1000.0 + n,
        "completed_at": 1001.0 + n,
        "instructions": "Be brief.\x00 é",
        "tools": b"[]",
        "input": (user("Hello\u0000"), output("c0", "x")),
        "output": (thought("Hm"), answer("Hi 🙂"), call("c1", "f", '{"a": 1}')),
        "body": b'{"id": "r", "usage": {"input_tokens_details": {"cached_tokens": 7}}}',
        "prompt_ids": ids(1, 2, 3),
        "generated_ids": ids(4, 5),
    }
    return StoredResponse(**{**fields, **changes})


def child(parent: StoredResponse, *more: int, **changes: Any) -> StoredResponse:
    prompt = parent.prompt_ids + parent.generated_ids + ids(*more)
    return response(parent=parent.id, session=parent.session, prompt_ids=prompt, **changes)


async def test_a_committed_turn_survives_a_restart(database_url: str):
    first = response(idempotency_key="key", request_digest=b"d" * 32)
    async with opened(database_url) as store:
        await store.commit(first)
        assert await store.get("alice", first.id) == msgspec.structs.replace(first, idempotency_key=None)
    async with opened(database_url) as store:
        assert await store.get("alice", first.id) == msgspec.structs.replace(first, idempotency_key=None)
        found = await store.by_idempotency_key("alice", "key")
        assert found is not None
        assert (found.id, found.request_digest, found.idempotency_key) == (first.id, b"d" * 32, "key")


async def test_foreign_ids_look_unknown(database_url: str):
    first = response(idempotency_key="key")
    async with opened(database_url) as store:
        await store.commit(first)
        for who in ("mallory", ""):
            assert await store.get(who, first.id) is None
            assert await store.chain(who, first.id) is None
            assert await store.by_idempotency_key(who, "key") is None
            assert await store.session(who, first.session) is None
            assert await store.sessions(who, 10, None) == ()
            assert await store.delete(who, first.id) is False
            assert await store.delete_session(who, first.session) is False
        assert await store.get("alice", first.id) is not None
        assert await store.chain("alice", "unknown") is None


async def test_a_session_cannot_be_taken_over(database_url: str):
    async with opened(database_url) as store:
        await store.commit(response())
        with pytest.raises(TurnFailure, match="PermissionError"):
            await store.commit(response(principal="mallory"))
        assert await store.sessions("mallory", 10, None) == ()
        row = await store.session("alice", "ses_1")
        assert row is not None
        assert row.turns == 1


async def test_chains_fork_and_come_back_in_order(database_url: str):
    root = response()
    left, right = child(root, 8), child(root, 9)
    leaf = child(left, 10)
    async with opened(database_url) as store:
        for r in (root, left, right, leaf):
            await store.commit(r)
        for reader in (store, None):
            async with opened(database_url) if reader is None else _given(store) as each:
                line = await each.chain("alice", leaf.id)
                assert line is not None
                assert [r.id for r in line] == [root.id, left.id, leaf.id]
                assert line[1].input == left.input
                assert line[2].output == leaf.output
                other = await each.chain("alice", right.id)
                assert other is not None
                assert [r.id for r in other] == [root.id, right.id]


@asynccontextmanager
async def _given(store: SqlStore) -> AsyncIterator[SqlStore]:
    yield store


async def test_prompts_are_told_as_differences_and_come_back_whole(database_url: str):
    chance = random.Random(5)
    line = [response(prompt_ids=ids(*range(1000)))]
    for i in range(2 * rows.MAX_BASES):
        if i % 7 == 3:  # the client edited its context: only a part of the parent's ids is shared
            whole = line[-1].prompt_ids[: 4 * chance.randrange(0, 900)] + ids(*(chance.randrange(9) for _ in range(20)))
            line.append(response(parent=line[-1].id, prompt_ids=whole))
        else:
            line.append(child(line[-1], *(chance.randrange(9) for _ in range(10))))
    async with opened(database_url) as store:
        for r in line:
            await store.commit(r)
        with store._engine.connect() as connection:
            stored = connection.execute(select(func.sum(func.length(tables.responses.c.prompt_ids)))).scalar_one()
        assert stored < sum(len(r.prompt_ids) for r in line) / 4
    async with opened(database_url) as store:
        for r in line:
            found = await store.get("alice", r.id)
            assert found is not None
            assert found.prompt_ids == r.prompt_ids


async def test_deleting_a_response_keeps_its_children_readable(database_url: str):
    root = response()
    left, right = child(root, 8), child(root, 9)
    async with opened(database_url) as store:
        for r in (root, left, right):
            await store.commit(r)
        assert await store.delete("alice", root.id) is True
        assert await store.delete("alice", root.id) is False
        for r in (left, right):
            found = await store.get("alice", r.id)
            assert found is not None
            assert found.prompt_ids == r.prompt_ids
            assert await store.chain("alice", r.id) is None
        row = await store.session("alice", "ses_1")
        assert row is not None
        assert (row.turns, row.last_response) == (2, right.id)
        assert await store.delete("alice", left.id)
        assert await store.delete("alice", right.id)
        assert await store.session("alice", "ses_1") is None
        with store._engine.connect() as connection:
            assert connection.execute(select(func.count()).select_from(tables.items)).scalar_one() == 0


async def test_a_child_of_a_response_deleted_meanwhile_is_stored_whole(database_url: str):
    root = response()
    async with opened(database_url) as store:
        await store.commit(root)
        kept = store._contexts.get(root.id)
        assert kept is not None
        await store.delete("alice", root.id)
        store._contexts.put(root.id, kept, 1)  # as if the commit had looked just before
        late = child(root, 8)
        await store.commit(late)
        found = await store.get("alice", late.id)
        assert found is not None
        assert found.prompt_ids == late.prompt_ids


async def test_sessions_are_listed_last_used_first(database_url: str):
    async with opened(database_url) as store:
        made = [response(session=f"ses_{i}") for i in range(5)]
        for r in made:
            await store.commit(r)
        second = child(made[0], 8)
        await store.commit(second)
        page = await store.sessions("alice", 2, None)
        assert [row.id for row in page] == ["ses_0", "ses_4"]
        assert page[0].lineage == (made[0].id, second.id)
        assert (type(page[0].created_at), page[0].created_at) == (int, int(made[0].created_at))
        assert (page[0].turns, page[0].context_tokens, page[0].reused_tokens) == (2, 8, 14)
        rest = await store.sessions("alice", 10, page[-1].id)
        named = [row.id for row in (*page, *rest)]
        assert await store.kept_sessions("alice", [*named, "ses_unknown", "a\0b"]) == set(named)
        assert not await store.kept_sessions("mallory", named)
        assert [row.id for row in rest] == ["ses_3", "ses_2", "ses_1"]
        assert await store.delete_session("alice", "ses_0") is True
        assert await store.get("alice", second.id) is None
        assert await store.chain("alice", second.id) is None


async def test_a_failed_commit_leaves_nothing(database_url: str):
    root = response()
    again = response(id=root.id, generated_ids=ids(6))
    async with opened(database_url) as store:
        await store.commit(root)
        store.aliases.add([(b"k" * 16, Alias(ids=ids(6)))], again.generated_ids)
        with pytest.raises(TurnFailure) as failure:
            await store.commit(again)
        assert failure.value.code == "server_error"
        assert "Hello" not in str(failure.value)
        row = await store.session("alice", "ses_1")
        assert row is not None
        assert row.turns == 1
        found = await store.get("alice", root.id)
        assert found is not None
        assert found.generated_ids == root.generated_ids


async def test_many_commits_at_once(database_url: str):
    async with opened(database_url) as store:
        root = response()
        await store.commit(root)
        children = [child(root, i) for i in range(30)]
        await asyncio.gather(*(store.commit(c) for c in children))
        row = await store.session("alice", "ses_1")
        assert row is not None
        assert row.turns == 31


async def test_aliases_are_committed_with_their_turn(database_url: str):
    turn = response()
    unstored = ids(9, 9)
    async with opened(database_url) as store:
        store.aliases.add([(b"a" * 16, Alias(ids=ids(1), context=b"c" * 16, lead="\n", claim=b"x"))], turn.generated_ids)
        store.aliases.add([(b"b" * 16, Alias(ids=ids(2)))], unstored)
        await store.commit(turn)
    async with opened(database_url) as store:
        found = store.aliases.find([b"a" * 16, b"b" * 16, b"c" * 16])
        assert dict(found) == {b"a" * 16: (Alias(ids=ids(1), context=b"c" * 16, lead="\n", claim=b"x"),)}


async def test_what_was_said_is_deleted_with_its_response(database_url: str):
    one, two = response(), response(session="ses_2")
    async with opened(database_url) as store:
        for turn, key in ((one, b"a" * 16), (two, b"b" * 16)):
            store.aliases.add([(key, Alias(ids=ids(1)))], turn.generated_ids)
            await store.commit(turn)
        await store.delete("mallory", one.id)
        assert len(store.aliases.find([b"a" * 16, b"b" * 16])) == 2
        await store.delete("alice", one.id)
        assert list(store.aliases.find([b"a" * 16, b"b" * 16])) == [b"b" * 16]
        await store.delete_session("alice", "ses_2")
        assert store.aliases.find([b"a" * 16, b"b" * 16]) == {}
        with store._engine.connect() as connection:
            assert connection.execute(select(func.count()).select_from(tables.aliases)).scalar_one() == 0


async def test_a_used_idempotency_key_stays_with_its_first_response(database_url: str):
    first, second = response(idempotency_key="k"), response(idempotency_key="k")
    async with opened(database_url) as store:
        await store.commit(first)
        await store.commit(second)
        found = await store.by_idempotency_key("alice", "k")
        assert found is not None
        assert found.id == first.id


@pytest.mark.postgres
async def test_a_dead_database_is_a_clear_error_and_comes_back(postgres: Any):
    url = postgres.new_database()
    async with opened(url) as store:
        first = response()
        await store.commit(first)
        postgres.stop()
        try:
            late = child(first, 8)
            with pytest.raises(TurnFailure, match="did not take this turn") as failure:
                await store.commit(late)
            assert failure.value.code == "server_error"
            with pytest.raises(ServerError, match="cannot be used now"):
                await store.get("alice", first.id)
            assert store.aliases.find([b"z" * 16]) == {}
            assert await store.chain("alice", first.id) is not None  # known, so the running session can go on
        finally:
            postgres.start()
        await store.commit(late)
        found = await store.get("alice", late.id)
        assert found is not None
        assert found.prompt_ids == late.prompt_ids


async def test_a_locked_sqlite_is_a_clear_error(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentserve.session.database.BUSY_TIMEOUT_MS", 50)
    async with opened(f"sqlite:///{tmp_path}/s.db") as store:
        with store._writer.begin():
            with pytest.raises(TurnFailure, match="OperationalError"):
                await store.commit(response())
            assert await store.sessions("alice", 10, None) == ()  # reading goes on
        await store.commit(response())


def resent(items: int, *tokens: int, **changes: Any) -> StoredResponse:
    """A turn whose client sent its whole context again: its first three tokens are the head and the first user message."""
    return response(prompt_ids=ids(*tokens), context_items=items, own_tokens=3, **changes)


async def lineage(store: SqlStore) -> tuple[str, ...]:
    session = await store.session("alice", "ses_1")
    assert session is not None
    return session.lineage


async def test_resent_contexts_are_linked_by_their_longest_match(database_url: str):
    first = resent(1, 1, 2, 3)
    async with opened(database_url) as store:
        await store.commit(first)
        again = resent(1, 1, 2, 3)
        await store.commit(again)
        assert await lineage(store) == (again.id,), "another try of a turn does not go on from the first one"
        second = resent(3, *(1, 2, 3, 4, 5, 6), generated_ids=ids(7))
        await store.commit(second)
        aside = resent(4, *(1, 2, 9, 9, 9, 9))
        await store.commit(aside)
        assert await lineage(store) == (aside.id,), "a context of other first words begins a branch"
    async with opened(database_url) as store:  # nothing of it is in memory now
        third = resent(5, *(1, 2, 3, 4, 5, 6, 8, 8))  # its answer came back otherwise than it was sampled
        await store.commit(third)
        assert (await lineage(store))[1:] == (second.id, third.id)
        assert (await lineage(store))[0] in (first.id, again.id)
        stored = await store.get("alice", third.id)
        assert stored is not None
        assert (stored.parent, stored.follows, stored.prompt_ids) == (None, second.id, third.prompt_ids)
        assert len(await store.chain("alice", third.id) or ()) == 1, "what it follows is no part of its context"


async def test_another_principals_turns_are_no_candidates(database_url: str):
    async with opened(database_url) as store:
        await store.commit(resent(1, 1, 2, 3, principal="bob", session="ses_b"))
        mine = resent(3, 1, 2, 3, 4, 5, session="ses_a")
        await store.commit(mine)
        stored = await store.get("alice", mine.id)
        assert stored is not None
        assert stored.follows is None


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
async def test_nothing_is_said_to_be_kept_in_a_file_that_is_gone(tmp_path, replaced: bool) -> None:
    path = tmp_path / "s.db"
    async with opened(f"sqlite:///{path}") as store:
        first = response()
        await store.commit(first)
        path.rename(tmp_path / "away.db")
        if replaced:
            path.write_bytes(b"")
        with pytest.raises(TurnFailure, match="file was deleted or replaced"):
            await store.commit(response())
        with pytest.raises(ServerError, match="file was deleted or replaced"):
            await store.conversations.create("alice", {}, ())
        (tmp_path / "away.db").rename(path)
        await store.commit(later := response())
        assert await store.get("alice", later.id) is not None


# ── in the background ────────────────────────────────────────────────────────────────────────────────────────────


def begun(response_id: str) -> ResponseBody:
    return ResponseBody(id=response_id, created_at=1, status="in_progress", model="demo", background=True)


async def test_what_ran_in_the_background_has_failed_after_a_restart(database_url: str):
    stored, failed, lost = response(), begun("resp_failed"), begun("resp_lost")
    async with opened(database_url) as store:
        for body in (begun(stored.id), failed, lost):
            await store.begin_background("alice", body)
        assert await store.in_background("alice", lost.id) == lost
        assert await store.in_background("bob", lost.id) is None
        assert not await store.delete("alice", lost.id), "it runs"
        await store.commit(stored)
        assert await store.in_background("alice", stored.id) is None
        error = ErrorDetail(code="deadline_exceeded", message="late", type="invalid_request_error", param=None)
        failed = msgspec.structs.replace(failed, status="failed", error=error)
        await store.fail_background(failed)
        assert await store.stored_bytes("alice") > len(stored.body) + 200
    async with opened(database_url) as store:
        assert await store.in_background("alice", failed.id) == failed
        left = await store.in_background("alice", lost.id)
        assert left is not None
        assert (left.status, left.error and left.error.code) == ("failed", "server_error")
        assert left.error is not None
        assert "retry" in left.error.message
        assert await store.get("alice", stored.id) is not None
        assert not await store.delete("bob", lost.id)
        assert await store.delete("alice", lost.id)
        assert await store.in_background("alice", lost.id) is None


async def test_a_failed_background_response_is_forgotten_after_a_month(database_url: str):
    async with opened(database_url) as store:
        await store.begin_background("alice", begun("resp_old"))
        await store.begin_background("alice", begun("resp_new"))
        old = tables.background.update().where(tables.background.c.id == "resp_old")
        with store._writer.begin() as connection:
            connection.execute(old.values(created_at=tables.background.c.created_at - 31 * 86_400))
    async with opened(database_url) as store:
        assert await store.in_background("alice", "resp_old") is None
        assert await store.in_background("alice", "resp_new") is not None


async def test_a_server_that_starts_leaves_alone_what_another_one_runs(database_url: str, monkeypatch: pytest.MonkeyPatch):
    """Two state directories, one database."""
    mine, others = begun("resp_mine"), begun("resp_others")
    clock = [1_000_000.0]
    monkeypatch.setattr(store_module.time, "time", lambda: clock[0])
    async with opened(database_url, "one") as one:
        await one.begin_background("alice", others)
        async with opened(database_url, "two") as two:
            await two.begin_background("alice", mine)
            assert await two.in_background("alice", others.id) == others
            assert not await two.delete("alice", others.id)
        async with opened(database_url, "two") as two:
            assert await one.in_background("alice", others.id) == others
            assert (await two.in_background("alice", mine.id)).status == "failed"  # type: ignore[union-attr]
            clock[0] += background.STALE_S - 1
            assert await two.in_background("alice", others.id) == others
            await one._write(lambda c: background.seen(c, "one", clock[0]))
            clock[0] += background.STALE_S - 1
            assert await two.in_background("alice", others.id) == others


@pytest.mark.parametrize("seen_by", ["a start", "a look", "a delete"])
async def test_what_a_server_that_never_came_back_ran_has_failed(
    database_url: str, monkeypatch: pytest.MonkeyPatch, seen_by: str
):
    clock = [1_000_000.0]
    monkeypatch.setattr(store_module.time, "time", lambda: clock[0])
    async with opened(database_url, "dead") as dead:
        await dead.begin_background("alice", begun("resp_lost"))
    async with opened(database_url, "two") as two:
        clock[0] += background.STALE_S + 1
        if seen_by == "a delete":
            assert await two.delete("alice", "resp_lost")
            return
        if seen_by == "a look":
            found = await two.in_background("alice", "resp_lost")
            assert found is not None
            assert (found.status, found.error and found.error.code) == ("failed", "server_error")
            return
    async with opened(database_url, "three") as three:
        with three._engine.connect() as connection:
            assert connection.execute(select(tables.background.c.status)).scalars().all() == ["failed"]


async def test_a_server_says_that_it_lives_while_it_runs_some(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "SEEN_S", 0.001)
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(background, "seen", lambda c, server, now: loop.call_soon_threadsafe(seen.set))
    async with opened(f"sqlite:///{tmp_path}/s.db", "one") as store:
        for _ in range(10):
            await asyncio.sleep(0.002)
        assert not seen.is_set(), "it runs none"
        await store.begin_background("alice", begun("resp_1"))
        await asyncio.wait_for(seen.wait(), 60)


# ── items of resent contexts ─────────────────────────────────────────────────────────────────────────────────────


def sent_again(before: StoredResponse, *more: Any, **changes: Any) -> StoredResponse:
    items = (*before.input, *before.output, *more)
    return response(follows=before.id, session=before.session, input=items, context_items=len(items), **changes)


def item_rows(store: SqlStore) -> int:
    with store._engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(tables.items)).scalar_one()


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_resent_context_adds_its_new_items_alone(database_url: str, restarts: bool):
    turns = [response()]
    for n in range(9):
        turns.append(sent_again(turns[-1], user(f"more {n}")))
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(database_url))
        for n, turn in enumerate(turns):
            await store.commit(turn)
            if restarts and n % 3 == 2:
                await stack.aclose()
                store = await stack.enter_async_context(opened(database_url))
        # Each: what the one before said, and a new message; and what it says itself.
        assert item_rows(store) == 2 + 3 + 9 * (3 + 1 + 3)
    async with opened(database_url) as store:
        for turn in turns:
            assert await store.get("alice", turn.id) == turn


async def test_a_context_that_was_edited_shares_what_comes_before_the_edit(database_url: str):
    first = response(input=tuple(user(f"word {n}") for n in range(10)))
    edited = response(
        follows=first.id, input=(*first.input[:4], user("another"), *first.input[5:]), context_items=10, output=first.output
    )
    shorter = response(follows=edited.id, input=edited.input[:6], context_items=6, output=first.output)
    async with opened(database_url) as store:
        for turn in (first, edited, shorter):
            await store.commit(turn)
        assert item_rows(store) == 10 + 6 + 0 + 3 * len(first.output)
        assert [await store.get("alice", turn.id) for turn in (first, edited, shorter)] == [first, edited, shorter]


@pytest.mark.parametrize("gone", list(itertools.permutations(range(3))))
async def test_deleted_turns_leave_others_their_items(database_url: str, gone: tuple[int, ...]):
    a = response(input=tuple(user(f"word {n}") for n in range(6)))
    b = sent_again(a, user("b"))
    c = response(follows=b.id, input=(*a.input[:4], user("c")), context_items=5)
    d = sent_again(b, user("d"))
    left = {0: a, 1: b, 2: c}
    async with opened(database_url) as store:
        for turn in (a, b, c, d):
            await store.commit(turn)
        for number in gone:
            assert await store.delete("alice", left.pop(number).id)
            for turn in (*left.values(), d):
                assert await store.get("alice", turn.id) == turn
        alone = await store.stored_bytes("alice")
        await store.commit(other := response(session="ses_2", input=d.input, context_items=d.context_items))
        assert await store.stored_bytes("alice") == pytest.approx(2 * alone, rel=0.01), "what it got counts for it"
        assert await store.delete("alice", other.id)


async def test_another_session_shares_no_items(database_url: str):
    first = response()
    other = msgspec.structs.replace(sent_again(first, user("more")), session="ses_2")
    async with opened(database_url) as store:
        await store.commit(first)
        await store.commit(other)
        assert await store.delete_session("alice", first.session)
        assert await store.get("alice", other.id) == other


async def test_a_list_names_the_last_of_a_lineage_and_says_that_there_are_more(
    database_url: str, monkeypatch: pytest.MonkeyPatch
):
    line = [response()]
    for _ in range(LISTED_LINEAGE + 1):
        line.append(child(line[-1]))
    names = tuple(r.id for r in line)
    async with opened(database_url) as store:
        for r in line[:LISTED_LINEAGE]:
            await store.commit(r)
        (whole,) = await store.sessions("alice", 10, None)
        assert (whole.lineage, whole.lineage_has_more) == (names[:LISTED_LINEAGE], False)
        for r in line[LISTED_LINEAGE:]:
            await store.commit(r)
        (listed,) = await store.sessions("alice", 10, None)
        assert (listed.lineage, listed.lineage_has_more) == (names[-LISTED_LINEAGE:], True)
        one = await store.session("alice", "ses_1")
        assert one is not None
        assert (one.lineage, one.lineage_has_more) == (names, False)
        monkeypatch.setattr("agentserve.session.listing.LINEAGE", len(names) - 1)
        bounded = await store.session("alice", "ses_1")
        assert bounded is not None
        assert (bounded.lineage, bounded.lineage_has_more) == (names[1:], True)
        await store.delete("alice", names[-2])
        (cut,) = await store.sessions("alice", 10, None)
        assert (cut.lineage, cut.lineage_has_more) == (names[-1:], False), "what was deleted ends the line"
