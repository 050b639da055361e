"""StateCache against a plain dict: whatever is done in whatever order, only truth is served and the books close."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statecache.keys import xxh3_128
from statecache.match import Match
from statecache.policy import Policy
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import BoundaryKind
from tests.budget import examples
from tests.statecache.world import OTHER_SALT, SALT, Clock, close_books, make, same, save

PIECES = [np.full(n, v, dtype=np.int32) for n in (1, 30, 64, 100) for v in (1, 2)]
contexts = st.lists(st.sampled_from(range(len(PIECES))), min_size=1, max_size=4).map(
    lambda picks: np.concatenate([PIECES[i] for i in picks])
)
salts = st.sampled_from([SALT, OTHER_SALT])
sessions = st.sampled_from(["", "s", "t"])
kinds = st.sampled_from([BoundaryKind.SYSTEM, BoundaryKind.TURN, BoundaryKind.SHADOW, BoundaryKind.LADDER])


class CacheMachine(RuleBasedStateMachine):
    """model: (salt, ids) → logits saved, for what was kept; entries may leave only by eviction."""

    @initialize(
        budget=st.sampled_from([3_000, 8_000, 1 << 20]),
        lower=st.sampled_from([None, 6_000, 1 << 20]),
        extent_blocks=st.sampled_from([1, 3]),
    )
    def start(self, budget, lower, extent_blocks):
        self.clock = Clock()
        tiers = [RamTier(budget), *([RamTier(lower, name="disk")] if lower else [])]
        tiers[-1].extent_blocks = extent_blocks
        policy = Policy(slack_permille=0, remembered_checkpoints=8)
        self.cache = make(tiers=tiers, policy=policy, clock=self.clock, hash128=self.hash128())
        self.model: dict[tuple[bytes, bytes], bool] = {}
        self.open: list[tuple[Match, np.ndarray, bytes]] = []

    def hash128(self):
        return xxh3_128

    @rule(
        tokens=contexts,
        salt=salts,
        kind=kinds,
        logits=st.booleans(),
        session=st.sampled_from(["", "s", "t"]),
        cut=st.floats(0, 1),
    )
    def put(self, tokens, salt, kind, logits, session, cut):
        position = max(1, int(len(tokens) * cut))
        result = save(self.cache, tokens, position, kind, salt=salt, logits=logits, session=session)
        key = (salt, tokens[:position].tobytes())
        if result.checkpoint_id is not None:
            self.model[key] = logits or self.model.get(key, False)
            self.clock.now += 1

    @rule(tokens=contexts, salt=salts, keep=st.booleans(), into=st.booleans(), limit=st.none() | st.integers(0, 400))
    def match(self, tokens, salt, keep, into, limit):
        match = self.cache.match(tokens, salt, limit=limit)
        live = {i.id for i in self.cache.checkpoints()}
        if match.position:
            assert match.checkpoint_id in live
            assert match.position <= (len(tokens) if limit is None else limit)
            assert (salt, tokens[: match.position].tobytes()) in self.model
        payload = match.read(np.empty((len(tokens), 8), np.uint8) if into else None)
        assert payload.position == match.position
        assert not payload.position or same(payload, tokens, salt)
        assert payload.position < len(tokens) or payload.logits is not None
        deeper = [i for i in self.cache.checkpoints() if match.position < i.position < min(len(tokens), limit or len(tokens))]
        for info in deeper:  # nothing that is there and longer was overlooked
            record = self.cache._kept.records[info.id]
            shelf = self.cache._kept.shelf_of(record)
            assert shelf is not None
            assert record.salt != salt or shelf.path(record).ids != tokens[: info.position].tobytes() or limit == 0
        if keep:
            self.open.append((match, tokens, salt))
        else:
            match.release()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def read_later_and_release(self, data):
        match, tokens, salt = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        position = match.position
        payload = match.read()
        assert payload.position == position  # pinned: nothing may have taken it
        assert not position or same(payload, tokens, salt)
        match.release()

    @rule(data=st.data())
    def evict(self, data):
        infos = self.cache.checkpoints()
        if infos:
            info = data.draw(st.sampled_from(infos))
            used = {m.checkpoint_id for m, _, _ in self.open}
            assert self.cache.evict(info.id) == (info.id not in used and not info.pinned)

    @rule(data=st.data(), session=st.sampled_from(["s", "t"]))
    def pin(self, data, session):
        infos = self.cache.checkpoints()
        if infos:
            assert self.cache.pin(data.draw(st.sampled_from(infos)).id, session)

    @rule(session=st.sampled_from(["s", "t", "unknown"]))
    def forget(self, session):
        self.cache.forget(session)
        assert self.cache.checkpoints(session) == []

    @invariant()
    def books_close(self):
        close_books(self.cache)

    def teardown(self):
        for match, _, _ in getattr(self, "open", []):
            match.release()
        if hasattr(self, "cache"):
            for session in ("s", "t"):
                self.cache.forget(session)
            assert all(r.in_use == 0 and not r.pins for r in self.cache._kept.records.values() if r.in_use or "" not in r.pins)
            for info in self.cache.checkpoints():
                assert self.cache.evict(info.id)
            assert all(t.used_bytes == 0 for t in self.cache.stats().tiers.values())


class RestartingMachine(CacheMachine):
    """The lower tier is on disk, and the process starts anew now and then: what lay there is there, and nothing else."""

    @initialize(budget=st.sampled_from([3_000, 1 << 20]), lower=st.sampled_from([40_000, 1 << 20]))
    def start(self, budget, lower):
        self.clock = Clock()
        self.directory = tempfile.TemporaryDirectory()
        self.sizes = (budget, lower)
        self.model = {}
        self.open = []
        self.boot()

    def boot(self):
        disk = DiskTier(Path(self.directory.name) / "segments", self.sizes[1], reserve_bytes=0, fsync=False)
        policy = Policy(slack_permille=0, remembered_checkpoints=8)
        self.cache = make(tiers=[RamTier(self.sizes[0]), disk], policy=policy, clock=self.clock)
        self.cache.recover()

    @rule(save_first=st.booleans())
    def restart(self, save_first):
        if save_first:
            self.cache.write_back()
        for match, _, _ in self.open:
            match.release()
        self.open = []
        shelf = self.cache._kept.shelves[1]
        durable = {i: (h.state_bytes, h.logits_bytes) for i, h in shelf.holdings.items()}
        used = shelf.tier.used_bytes
        self.boot()
        shelf = self.cache._kept.shelves[1]
        assert {i: (h.state_bytes, h.logits_bytes) for i, h in shelf.holdings.items()} == durable
        assert shelf.tier.used_bytes == used

    def teardown(self):
        super().teardown()
        if hasattr(self, "directory"):
            self.directory.cleanup()


class CollidingMachine(CacheMachine):
    """The same with keys of 8 bits: most puts are refused, what is kept is still only truth."""

    def hash128(self):
        return lambda data: xxh3_128(data)[:1] * 16


for machine in (CacheMachine, CollidingMachine):
    machine.TestCase.settings = settings(max_examples=examples(35, 100), stateful_step_count=25, deadline=None)

RestartingMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)

TestCacheMachine = CacheMachine.TestCase
TestCollidingMachine = CollidingMachine.TestCase
TestRestartingMachine = RestartingMachine.TestCase
