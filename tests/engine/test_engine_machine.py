"""Any order of submit, step, cut, cancel, hold, release, copy out and restore, against plain token lists."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.device.host import HostDevice
from engine.kvcache.leaving import Leaving
from engine.scheduler.pace import chunk_sizes
from engine.types import CutReached, Finished, HoldId, PrefillProgress, TokenEvent
from tests.budget import examples
from tests.engine.helpers import make_engine, request
from tests.fakes.hash_model import HashModel, Plain, StagedHashModel, expected_tokens, make_spec

PAGE, PAGES = 4, 14
WORDS = st.integers(1, 5)


@dataclass
class Turn:
    """A request as the test sees it. start: restored tokens. held: position of its last hold."""

    prompt: list[int]
    max_tokens: int
    start: int
    got: list[int]
    held: int = 0


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        recurrent=st.booleans(),
        reclaiming=st.booleans(),
        rows=st.integers(1, 3),
        spare=st.integers(1, 4),
        piece=st.sampled_from([1, 300, 1 << 20]),
        stages=st.sampled_from([0, 1, 3]),
        seed=st.none() | st.integers(0, 100),
        pinned=st.sampled_from([0, 4, 1 << 10]),
    )
    def start(self, recurrent, reclaiming, rows, spare, piece, stages, seed, pinned):
        self.spec = make_spec(recurrent)
        self.now_ns = 0
        self.engine = make_engine(
            StagedHashModel(self.spec, stages) if stages else HashModel(self.spec),
            page_size=PAGE,
            kv_tokens=PAGE * PAGES,
            chunk_tokens=8,
            max_rows=rows,
            snapshot_rows=spare,
            restore_bytes=piece,
            decode_gap_ms=3,
            clock_ns=self.clock,
            device=None if seed is None else HostDevice(seed),
        )
        self.leaving: list[tuple[Leaving, list[int], int]] = []
        self.arena = self.engine.memory_for_copies(pinned * mmap.PAGESIZE) if pinned else None
        if self.arena is not None:
            self.arena._step = 4 * mmap.PAGESIZE
            self.arena.set_limit(pinned * mmap.PAGESIZE)
        self.engine.set_beside(self.beside)
        self.engine.scheduler._sizes = chunk_sizes(8, 2)  # so that the gap has something to choose from
        if reclaiming:
            self.engine.set_reclaim(self.reclaim)
        self.turns: dict[str, Turn] = {}
        self.holds: dict[HoldId, list[int]] = {}
        self.count = 0
        # Something to restore from the beginning: else most short examples never get that far.
        self.submit([1, 2, 3, 4, 5, 1, 2], 3, None, 0, (2, 5, 6), True)
        self.submit([5, 4, 3, 2], 9, None, 0, (), False)
        self.step(3)

    def clock(self):
        """Every look at it is 3 ms later."""
        self.now_ns += 3_000_000
        return self.now_ns

    def reclaim(self, pages):
        known = [h for h in self.holds if h in self.engine.store.holds]
        if not known:
            return 0
        self.engine.release(known[0])
        del self.holds[known[0]]
        return 1

    def submit(self, ids, max_tokens, restore, start, cuts, hold_at_end, due_ms=None):
        self.count += 1
        id = f"t{self.count}"
        cuts = tuple(sorted({1 + c % len(ids) for c in cuts}))
        due_us = None if due_ms is None else self.now_ns // 1000 + 1000 * due_ms
        more = {"due_us": due_us, "priority": self.count % 3, "share": "ab"[self.count % 2]}
        self.engine.submit(request(id, ids, max_tokens, restore=restore, cuts=cuts, hold_at_end=hold_at_end, **more))
        self.turns[id] = Turn(ids, max_tokens, start, [])

    @rule(
        ids=st.lists(WORDS, min_size=1, max_size=30),
        max_tokens=st.integers(0, 12),
        cuts=st.lists(st.integers(0, 40), max_size=3),
        hold_at_end=st.booleans(),
        due_ms=st.none() | st.integers(-40_000, 400),
    )
    def submit_cold(self, ids, max_tokens, cuts, hold_at_end, due_ms):
        self.submit(ids, max_tokens, None, 0, cuts, hold_at_end, due_ms)

    @rule(
        data=st.data(),
        suffix=st.lists(WORDS, min_size=1, max_size=12),
        max_tokens=st.integers(0, 8),
        on_device=st.booleans(),
        let_go=st.booleans(),
    )
    def submit_warm(self, data, suffix, max_tokens, on_device, let_go):
        if not self.holds:
            return
        hold = data.draw(st.sampled_from(sorted(self.holds)))
        tokens = self.holds[hold]
        whole = self.engine.store.holds[hold].logits is not None and data.draw(st.booleans())
        ids = tokens if whole else tokens + suffix
        if len(ids) + 1 > self.engine.max_context:
            return
        restore = hold if on_device else self.engine.copy_out(hold)
        self.submit(list(ids), max_tokens, restore, len(tokens), [data.draw(st.integers(0, 40))], True)
        if let_go:
            self.engine.release(hold)
            del self.holds[hold]

    @rule(data=st.data(), ahead=st.integers(0, 10))
    def declare_cut(self, data, ahead):
        if not self.turns:
            return
        id = data.draw(st.sampled_from(sorted(self.turns)))
        turn = self.turns[id]
        self.engine.declare_cut(id, len(turn.prompt) + len(turn.got) + ahead)

    @rule(data=st.data(), hold=st.booleans())
    def cancel(self, data, hold):
        if not self.turns:
            return
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.turns))), hold)

    @rule(data=st.data())
    def release(self, data):
        if not self.holds:
            return
        hold = data.draw(st.sampled_from(sorted(self.holds)))
        self.engine.release(hold)
        del self.holds[hold]

    @rule(data=st.data())
    def copy_out(self, data):
        if not self.holds:
            return
        hold = data.draw(st.sampled_from(sorted(self.holds)))
        self.verify(hold, data.draw(st.integers(0, len(self.holds[hold]))))

    @rule(data=st.data(), each=st.integers(0, 5), whole=st.booleans())
    def begin_copy(self, data, each, whole):
        """Of what is held now, and may be gone, or written behind, when it arrives."""
        if not self.holds:
            return
        hold = data.draw(st.sampled_from(sorted(self.holds)))
        self.begin(hold, data.draw(st.integers(0, len(self.holds[hold]))), each, whole)

    def begin(self, hold, start, each, whole):
        tokens = self.holds[hold]
        if self.arena is not None:
            self.arena.fill()
        if whole:
            copy = self.engine.copy_rest(hold, start)
        else:
            copy = self.engine.copy_kv(hold, start, len(tokens), each)
        self.leaving.append((copy, list(tokens), start))

    def beside(self):
        """A device computes: some copy is begun, another has come, and a hold goes."""
        known = [hold for hold in self.holds if hold in self.engine.store.holds]
        if known and len(self.leaving) < 3:
            self.begin(known[-1], 0, 2, True)
        self.look()
        if len(known) > 3:
            self.engine.release(known[0])
            del self.holds[known[0]]

    @rule(wait=st.booleans())
    def look(self, wait=False):
        for item in list(self.leaving):
            copy, tokens, start = item
            if not (wait or copy.done):
                continue
            self.leaving.remove(item)
            copied, plain = copy.result(), Plain(tokens, self.spec)
            rows = b"".join(part.tobytes() for part in copied.kv)
            assert rows == plain.kv_bytes()[start:].tobytes()
            assert all(not part.flags.writeable for part in copied.kv)
            if copied.state:
                state = self.engine.layout.split(copied.state)
                assert all(np.array_equal(a, b) for a, b in zip(state.values(), plain.state_bytes(), strict=True))

    def verify(self, hold, start=0):
        """The held bytes are those of the plain computation over the held tokens."""
        tokens = self.holds[hold]
        snapshot = self.engine.copy_out(hold, start)
        plain = Plain(tokens, self.spec)
        assert snapshot.position == len(tokens)
        rows = snapshot.kv[0].rows if snapshot.kv else np.zeros((0, plain.kv_bytes().shape[1]), np.uint8)
        assert np.array_equal(rows, plain.kv_bytes()[start:])
        assert all(np.array_equal(a, b) for a, b in zip(snapshot.state.values(), plain.state_bytes(), strict=True))
        if snapshot.logits is not None:
            assert np.array_equal(snapshot.logits, plain.logits())

    @rule(times=st.integers(1, 6))
    def advance(self, times):
        self.step(times)

    def step(self, times):
        for _ in range(times):
            self.take(self.engine.step())
            self.engine.check()

    def take(self, events):
        for event in events:
            turn = self.turns[event.request_id]
            match event:
                case TokenEvent():
                    assert event.index == len(turn.got)
                    turn.got.append(event.token_id)
                case PrefillProgress():
                    assert turn.start < event.processed <= event.total == len(turn.prompt)
                case CutReached():
                    assert event.position > turn.held, "each position is held once"
                    turn.held = event.position
                    self.holds[event.hold] = (turn.prompt + turn.got)[: event.position]
                    assert len(self.holds[event.hold]) == event.position
                case Finished():
                    del self.turns[event.request_id]
                    limit = min(turn.max_tokens, self.engine.max_context - len(turn.prompt))
                    assert event.reason in ("length", "cancelled"), event
                    assert event.output_tokens == len(turn.got)
                    if event.reason == "length":
                        assert len(turn.got) == limit
                    assert turn.got == expected_tokens(turn.prompt, len(turn.got), self.spec)

    @invariant()
    def accounts_close(self):
        if hasattr(self, "engine"):
            self.engine.check()
            # A hold made this moment may not have been told yet, and never the other way round.
            assert set(self.holds) == set(self.engine.store.holds)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(4000):
            if not self.engine.has_work:
                break
            for hold in list(self.holds):
                self.verify(hold)
                self.engine.release(hold)
                del self.holds[hold]
            self.take(self.engine.step())
            self.engine.check()
        assert not self.engine.has_work, "everything ends once holds are given back"
        self.look(wait=True)
        self.engine.settle()
        for hold in list(self.holds):
            self.verify(hold)
            self.engine.release(hold)
        stats = self.engine.stats()
        assert (stats.free_pages, stats.free_rows) == (stats.total_pages, stats.total_rows)
        self.engine.check()
        if self.arena is not None:
            self.engine.forget_memory()
            assert self.arena.stats().used == 0
            assert self.arena.stats().pinned == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=examples(20, 150), stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
