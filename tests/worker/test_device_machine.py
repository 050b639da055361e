"""Any order of turns, cancels, chores, shortages and crashes over a real engine, cache and disk: answers are those of a cold
run, every page, row and hold is accounted for, and at the end nothing is left."""

from __future__ import annotations

import mmap
import tempfile
import time
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentserve.worker.messages import Cut, FromWorker, Matched, Sampling, StartTurn, Tokens, TurnFailed, TurnFinished
from agentserve.worker.naming import namespace_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from engine.device.host import HostDevice
from engine.types import CutReached, HoldId
from statecache.index.radix import RadixIndex
from statecache.policy import Policy
from statecache.store import StateCache
from statecache.tiers.base import ordinary
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import BoundaryKind, MarkerTable
from tests.budget import examples
from tests.engine.helpers import make_engine
from tests.fakes.hash_model import HashModel, expected_tokens, make_spec

PAGE = 4
PIECES = [[v] * n for n in (1, 7, 30) for v in (1, 2, 3)]
contexts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(lambda pieces: [t for piece in pieces for t in piece])


class DeviceMachine(RuleBasedStateMachine):
    @initialize(
        recurrent=st.booleans(),
        pages=st.integers(35, 80),
        rows=st.integers(1, 3),
        spare=st.integers(1, 12),
        ram=st.sampled_from([2_000, 20_000, 1 << 22]),
        piece=st.sampled_from([200, 1 << 20]),
        stays=st.booleans() | st.just(True),
        seed=st.none() | st.integers(0, 50),
    )
    def start(self, recurrent, pages, rows, spare, ram, piece, stays, seed):
        """seed: of a device whose copies to the host come late, to pinned memory while there is some."""
        self.directory = tempfile.TemporaryDirectory()
        self.spec = make_spec(recurrent)
        self.sizes = {"page_size": PAGE, "kv_tokens": PAGE * pages, "max_rows": rows, "snapshot_rows": spare}
        self.piece, self.ram, self.stays, self.seed = piece, ram, stays, seed
        self.serial = 0
        self.reused = 0
        self.boot()
        self.turn([1] * 30 + [2], 3, 10)  # something to go on from, else short examples never get that far
        self.step(5)

    def boot(self):
        device = None if self.seed is None else HostDevice(self.seed)
        self.engine = make_engine(HashModel(self.spec), chunk_tokens=8, restore_bytes=self.piece, device=device, **self.sizes)
        self.memory = self.engine.memory_for_copies(0)
        if self.memory is not None:
            self.memory._step = 4 * mmap.PAGESIZE
            self.memory.set_limit(16 * mmap.PAGESIZE)
            self.memory.fill()
        take = ordinary if self.memory is None else self.memory.take
        namespace, layout = namespace_of(self.engine.info, self.engine.layout)
        disk = DiskTier(Path(self.directory.name) / "segments", 1 << 20, reserve_bytes=0, fsync=False, take=take)
        self.cache = StateCache(
            namespace,
            layout,
            tiers=[RamTier(self.ram, take=take), disk],
            index=RadixIndex(),
            policy=Policy(shadows=(4, 16), ladder_tokens=32, junction_tokens=4, single_flight_tokens=8),
        )
        self.cache.recover()
        self.frames: list[FromWorker] = []
        self.bridge = StateBridge(self.engine, self.cache, self.cache.want, stays=self.stays)
        self.loop = TurnLoop(self.engine, self.bridge, self.frames.append)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.answers: dict[str, list[int]] = {}

    def turn(self, ids, max_tokens, cut):
        self.serial += 1
        turn_id = f"t{self.serial}"
        self.asked[turn_id] = (ids, max_tokens)
        self.loop.start(
            StartTurn(
                turn_id=turn_id,
                ids=np.array(ids, "<u4").tobytes(),
                cuts=(Cut(1 + cut % len(ids), BoundaryKind.USER),),
                markers=MarkerTable(),
                salt=b"salt",
                session="s",
                sampling=Sampling(max_tokens=max(1, max_tokens), temperature=0.0),
                accepted_at=time.monotonic(),
                generate=max_tokens > 0,
            )
        )

    @rule(ids=contexts, max_tokens=st.integers(0, 9), cut=st.integers(0, 60))
    def ask(self, ids, max_tokens, cut):
        if len(self.asked) < 5:
            self.turn(ids, max_tokens, cut)

    @rule(data=st.data(), more=st.sampled_from([[], [1], [2, 2], [3] * 9]), max_tokens=st.integers(0, 6))
    def go_on(self, data, more, max_tokens):
        """A context that the cache knows, whole or with something behind it: two of them make a fork."""
        known = [r for r in self.cache._kept.records.values() if r.position < 90]
        if not known or len(self.asked) >= 5:
            return
        record = data.draw(st.sampled_from(sorted(known, key=lambda r: r.id)))
        resident = self.cache._kept.resident(record)
        if resident is not None:
            ids = self.engine.held(HoldId(resident.hold)).tokens.tolist()
        else:
            shelf = self.cache._kept.shelf_of(record)
            assert shelf is not None
            ids = np.frombuffer(shelf.path(record).ids, "<u4").tolist()
        self.turn([*ids, *more], max_tokens, 0)

    @rule(times=st.integers(1, 12), chores=st.integers(0, 2))
    def advance(self, times, chores):
        self.step(times, chores)

    def step(self, times, chores=1):
        for _ in range(times):
            for _ in range(chores):
                self.bridge.chore()
            if self.engine.has_work:
                self.loop.step()
                self.engine.check()
        self.look()

    @rule(times=st.integers(1, 8))
    def idle(self, times):
        for _ in range(times):
            self.bridge.chore()

    @rule()
    def write_to_disk(self):
        self.cache.copy_next()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        self.loop.cancel(data.draw(st.sampled_from(sorted(self.asked))))
        self.look()

    @rule(data=st.data())
    def evict(self, data):
        infos = self.cache.checkpoints()
        if infos:
            self.cache.evict(data.draw(st.sampled_from(infos)).id)

    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data, pinned):
        infos = self.cache.checkpoints("s")
        if infos:
            self.bridge.pin("s", data.draw(st.sampled_from(infos)).id, pinned)

    @rule(settled=st.booleans())
    def crash(self, settled):
        """The process ends, in the middle of turns or after a drain: what was on disk is found again, nothing else."""
        if settled:
            self.bridge.drain(60.0, everything=True)
            self.cache.write_back()
        lower = self.cache._kept.shelves[1]
        durable = {i for i in lower.holdings if not lower.unsealed(self.cache._kept.records[i])}
        assert not settled or durable == {i for i in lower.holdings if self.cache._kept.records[i].proven}
        self.boot()
        assert {info.id for info in self.cache.checkpoints()} == durable

    def look(self):
        """Frames since the last look: answers are those of the plain computation over the whole prompt."""
        frames, self.frames[:] = list(self.frames), []
        for frame in frames:
            if isinstance(frame, Matched):
                ids, _ = self.asked[frame.turn_id]
                assert frame.position <= len(ids)
                self.reused += frame.position
            elif isinstance(frame, Tokens):
                ids, _ = self.asked[frame.turn_id]
                got = self.answers.setdefault(frame.turn_id, [])
                got.extend(frame.ids)
                assert got == expected_tokens(ids, len(got), self.spec)
            elif isinstance(frame, TurnFailed):
                raise AssertionError(frame)
            elif isinstance(frame, TurnFinished):
                ids, max_tokens = self.asked.pop(frame.turn_id)
                if frame.reason == "length":
                    limit = min(max_tokens, self.engine.max_context - len(ids))
                    assert len(self.answers.get(frame.turn_id, [])) == limit

    @invariant()
    def accounts_close(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        residents = self.cache._kept.device.residents if self.cache._kept.device else {}
        assert {r.hold for r in residents.values()} == set(self.engine.store.holds) - self.untold()
        assert all(r.readers == 0 for r in residents.values())
        assert all(self.cache._kept.records[i] is r.record for i, r in residents.items())
        assert self.bridge.cache_errors == 0
        assert self.bridge.release_errors == 0

    def untold(self):
        """Holds of events that the next step gives out."""
        return {event.hold for event in self.engine._unreturned if isinstance(event, CutReached)}

    def teardown(self):
        if hasattr(self, "directory"):
            with self.directory:
                self.end()

    def end(self):
        for _ in range(20_000):
            if not self.loop.running:
                break
            self.step(1)
        assert not self.asked, "every turn ends"
        self.bridge.forget("s")
        for info in self.cache.checkpoints():
            assert self.cache.evict(info.id)
        self.engine.settle()
        self.engine.check()
        assert not self.engine.store.holds
        stats = self.engine.stats()
        assert (stats.free_pages, stats.free_rows) == (stats.total_pages, stats.total_rows)
        assert all(tier.used_bytes == 0 for tier in self.cache.stats().tiers.values())
        self.engine.forget_memory()


TestDeviceMachine = DeviceMachine.TestCase
TestDeviceMachine.settings = settings(
    max_examples=examples(20, 60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
