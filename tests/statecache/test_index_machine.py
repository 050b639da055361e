"""Memory, disk and database together against a plain dict, with restarts, lost rows, and notes that were never written.

The same machine on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from statecache.durable import DiskSettings, open_states
from statecache.index import queries
from statecache.index.connect import connect
from statecache.policy import Policy
from tests.statecache.test_store_machine import CacheMachine
from tests.statecache.world import LAYOUT, NAMESPACE, Clock, close_books


class DurableMachine(CacheMachine):
    """What was copied down and noted is there after a restart, whatever the database remembers of it."""

    url = ""

    @initialize(budget=st.sampled_from([8_000, 1 << 20]), lower=st.sampled_from([60_000, 1 << 22]))
    def start(self, budget, lower):
        self.clock = Clock()
        self.directory = tempfile.TemporaryDirectory()
        self.sizes = (budget, lower)
        self.model = {}
        self.open = []
        self._boot()

    def _boot(self):
        disk = DiskSettings(Path(self.directory.name), self.sizes[1], 0, claim_wait_s=5.0, index_url=self.url)
        policy = Policy(slack_permille=0, remembered_checkpoints=8)
        self.states = open_states(NAMESPACE, LAYOUT, self.sizes[0], disk, policy=policy, clock=self.clock)
        assert self.states.writer is not None
        self.cache = self.states.cache
        # The machine copies and tells the index, and the writer's thread might do so too, at its start.
        self.states.writer.close(0.0)
        self.cache.on_waiting = lambda: None

    def _copy_down(self):
        while self.cache.copy_next() is not None:
            pass

    @rule(count=st.integers(1, 3))
    def keep(self, count):
        """What the end of a turn does."""
        infos = self.cache.checkpoints()
        self.cache.want([i.id for i in infos[-count:]])
        self.cache.write_back(1) if count == 3 else self._copy_down()

    @rule(ending=st.sampled_from(["closed", "killed", "rows lost", "some rows lost"]))
    def restart(self, ending):
        for match, _, _ in self.open:
            match.release()
        self.open = []
        shelf = self.cache._kept.shelves[1]
        self.states.writer.close(0.0)  # ends its thread: what is there now is what counts
        self._copy_down()
        if ending == "closed":
            self.cache.write_back()
        durable = {i: (h.state_bytes, h.logits_bytes) for i, h in shelf.holdings.items()}
        users = {i: (set(r.sessions), set(r.pins)) for i, r in self.cache._kept.records.items() if i in durable}
        # A killed process notes nothing more; its lock ends with it.
        if ending == "killed":
            self.states.ledger._notes.clear()
            self.states.writer.close(0.0)
            self.states.ledger._engine.dispose()
            self.states._place.close()
        else:
            self.states.close(0.0, everything=False)
        if ending.endswith("lost"):
            engine = connect(self.url)
            with engine.execution_options(writes=True).begin() as connection:
                keys = sorted(queries.known(connection, NAMESPACE))
                queries.forget(connection, NAMESPACE, keys if ending == "rows lost" else keys[::2])
            engine.dispose()
        self._boot()
        shelf = self.cache._kept.shelves[1]
        assert {i: (h.state_bytes, h.logits_bytes) for i, h in shelf.holdings.items()} == durable
        after = {i: (r.sessions, r.pins) for i, r in self.cache._kept.records.items()}
        if ending == "closed":
            assert after == users
        assert all(after[i][0] <= users[i][0] and after[i][1] <= users[i][1] for i in durable)

    @invariant()
    def books_close(self):
        if hasattr(self, "states"):
            close_books(self.cache)

    @invariant()
    def rows_say_what_the_files_say(self):
        if not hasattr(self, "states"):
            return
        assert self.states.ledger is not None
        assert self.states.ledger.flush()
        known = self.states.ledger.known()
        sizes = self.cache._kept.shelves[1].tier.sizes()
        assert {key: k.nbytes for key, k in known.items()} == sizes

    def teardown(self):
        if hasattr(self, "states"):
            for match, _, _ in self.open:
                match.release()
            self.states.close(0.0, everything=False)
            engine = connect(self.url)
            with engine.execution_options(writes=True).begin() as connection:
                queries.forget_all(connection, NAMESPACE)
                queries.leave(connection, NAMESPACE, ["s", "t"])
            engine.dispose()
            self.directory.cleanup()


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_memory_disk_and_database_agree_with_a_dict(database_url):
    machine = type("Machine", (DurableMachine,), {"url": database_url})
    examples = settings(max_examples=12, stateful_step_count=15, deadline=None)
    run_state_machine_as_test(machine, settings=examples)
