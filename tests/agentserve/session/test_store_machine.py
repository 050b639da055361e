"""Any order of commits, deletions and restarts, compared with a dict."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from agentserve.config import StoreConfig
from agentserve.interfaces import StoredResponse
from agentserve.session.store import SqlStore
from tests.agentserve.session.test_store import ids, response
from tests.agentserve.text.play import user
from tests.budget import examples


class StoreMachine(RuleBasedStateMachine):
    """model: what must be there, by id; alive: sessions in order of their last turn."""

    made = Bundle("made")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.model: dict[str, StoredResponse] = {}
        self.order: list[str] = []
        self._open()

    def _open(self) -> None:
        self.store = SqlStore(StoreConfig(url=f"sqlite:///{self.folder}/s.db"))
        self.loop.run_until_complete(self.store.open())

    def run(self, call):
        return self.loop.run_until_complete(call)

    def _commit(self, new: StoredResponse) -> StoredResponse:
        self.run(self.store.commit(new))
        self.model[new.id] = new
        self.order.append(new.id)
        return new

    @rule(target=made, session=st.integers(0, 2), prompt=st.lists(st.integers(0, 3), max_size=20))
    def root(self, session: int, prompt: list[int]) -> StoredResponse:
        return self._commit(response(session=f"ses_{session}", prompt_ids=ids(*prompt)))

    @rule(target=made, parent=made, kept=st.integers(0, 30), more=st.lists(st.integers(0, 3), max_size=9))
    def follow(self, parent: StoredResponse, kept: int, more: list[int]) -> StoredResponse:
        whole = parent.prompt_ids + parent.generated_ids
        chance = random.Random(len(more) + kept)
        generated = ids(*(chance.randrange(4) for _ in range(chance.randrange(5))))
        return self._commit(
            response(
                parent=parent.id,
                session=parent.session,
                prompt_ids=whole[: 4 * kept] + ids(*more),
                generated_ids=generated,
            )
        )

    @rule(target=made, before=made, kept=st.integers(0, 8), more=st.lists(st.integers(0, 2), max_size=4))
    def resend(self, before: StoredResponse, kept: int, more: list[int]) -> StoredResponse:
        """A context that begins as an earlier one did, or only seems to."""
        items = before.input[:kept] + tuple(user(f"word {n}") for n in more)
        return self._commit(response(session=before.session, follows=before.id, input=items, context_items=len(items)))

    @rule(gone=consumes(made))
    def delete(self, gone: StoredResponse) -> None:
        assert self.run(self.store.delete("alice", gone.id)) is (self.model.pop(gone.id, None) is not None)

    @rule(session=st.integers(0, 2))
    def delete_session(self, session: int) -> None:
        name = f"ses_{session}"
        gone = [r.id for r in self.model.values() if r.session == name]
        assert self.run(self.store.delete_session("alice", name)) is bool(gone)
        for response_id in gone:
            del self.model[response_id]

    @rule()
    def restart(self) -> None:
        self.run(self.store.close())
        self._open()

    @rule(asked=made)
    def get(self, asked: StoredResponse) -> None:
        assert self.run(self.store.get("alice", asked.id)) == self.model.get(asked.id)
        assert self.run(self.store.get("mallory", asked.id)) is None

    @rule(asked=made)
    def chain(self, asked: StoredResponse) -> None:
        expected: list[str] | None = []
        at: str | None = asked.id
        while at is not None and expected is not None:
            one = self.model.get(at)
            expected = None if one is None else [at, *expected]
            at = None if one is None else one.parent
        found = self.run(self.store.chain("alice", asked.id))
        assert (None if found is None else [r.id for r in found]) == expected

    @rule()
    def sessions(self) -> None:
        rows = self.run(self.store.sessions("alice", 10, None))
        expected: dict[str, int] = {}
        for one in self.model.values():
            expected[one.session] = expected.get(one.session, 0) + 1
        assert {row.id: row.turns for row in rows} == expected
        for row in rows:
            newest = max((r for r in self.model.values() if r.session == row.id), key=lambda r: r.completed_at)
            assert row.last_response == newest.id

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.close())
            self.loop.close()
            shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(10, 15), stateful_step_count=30, deadline=None)
