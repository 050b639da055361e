"""Cancels at any moment of any turn, on the real engine and a real cache: gone within one step, and the next turn is right.

Random interleavings of turns that are queued, held back for another, waiting for a grammar, restoring in pieces, prefilling,
paused, decoding and ending. The model's tokens depend on every number of its context, so a state that was published wrongly, or
one step too far, changes the answer of the turn that comes after.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest

from agentserve.worker.messages import Cut, FromWorker, Matched, Sampling, Saved, StartTurn, Tokens, TurnFailed, TurnFinished
from agentserve.worker.naming import namespace_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from engine.scheduler.pace import chunk_sizes
from statecache.durable import open_states
from statecache.types import BoundaryKind, MarkerTable
from tests.budget import examples
from tests.engine.helpers import make_engine
from tests.fakes.hash_model import HashModel, expected_tokens, make_spec

MARKERS = MarkerTable(turn_end=(0,))


class Anything:
    """A mask that forbids nothing."""

    def words(self) -> np.ndarray:
        return np.full(4, 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> None:
        pass


class SlowGrammars:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.asked: list[Future[Anything]] = []

    def compile(self, grammar: str, ends: tuple[int, ...]) -> Future[Anything]:
        future: Future[Anything] = Future()
        self.asked.append(future)
        return future

    def finish(self) -> None:
        for future in self.asked:
            if future.set_running_or_notify_cancel():
                future.set_result(Anything())
        self.asked.clear()


class World:
    """One worker's inside on a clock that every look moves by a millisecond."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ns = 1_000_000_000
        self.model = HashModel(make_spec())
        self.engine = make_engine(
            self.model,
            clock_ns=self.tick,
            page_size=8,
            kv_tokens=8 * rng.choice((40, 80)),
            chunk_tokens=16,
            max_rows=rng.choice((1, 2, 3)),
            snapshot_rows=24,
            restore_bytes=rng.choice((200, 1 << 20)),
            decode_gap_ms=5,
        )
        self.engine.scheduler._sizes = chunk_sizes(16, 4)
        names = namespace_of(self.engine.info, self.engine.layout)
        states = open_states(*names, rng.choice((1 << 17, 1 << 20)), clock=lambda: self.now_ns / 1e9)
        self.bridge = StateBridge(self.engine, states.cache, states.want, stays=rng.random() < 0.5)
        self.grammars = SlowGrammars()
        self.frames: list[FromWorker] = []
        self.loop = TurnLoop(
            self.engine,
            self.bridge,
            self.frames.append,
            grammars=self.grammars,  # pyright: ignore[reportArgumentType]
            clock=lambda: self.tick() / 1e9,
        )
        self.prompts: dict[str, list[int]] = {}
        self.ends: dict[str, TurnFinished | TurnFailed] = {}
        self.answers: dict[str, list[int]] = {}
        self.seen = 0
        self.states: Counter[str] = Counter()

    def tick(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns

    def start(self, ids: list[int], *, grammar: bool, urgent: bool, max_tokens: int = 6) -> str:
        turn_id = f"t{len(self.prompts)}"
        self.prompts[turn_id], self.answers[turn_id] = ids, []
        self.loop.start(
            StartTurn(
                turn_id=turn_id,
                ids=np.array(ids, "<u4").tobytes(),
                cuts=(Cut(min(10, len(ids)), BoundaryKind.SYSTEM),),
                markers=MARKERS,
                salt=b"salt",
                session=self.rng.choice("ab"),
                sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
                accepted_at=self.now_ns / 1e9,
                deadline_s=0.2 if urgent else None,
                grammar="start: any" if grammar else "",
            )
        )
        self.look()
        return turn_id

    def step(self) -> None:
        if self.loop.elsewhere:
            self.loop.poll()
        if self.engine.has_work:
            self.loop.step()
        self.engine.check()
        self.look()

    def look(self) -> None:
        """Take in the new frames: one end for each turn, and nothing behind it."""
        for frame in self.frames[self.seen :]:
            turn_id = getattr(frame, "turn_id", None)
            if turn_id is None:
                continue
            assert turn_id not in self.ends, "a frame behind the end"
            if isinstance(frame, Tokens):
                self.answers[turn_id].extend(frame.ids)
            elif isinstance(frame, TurnFinished | TurnFailed):
                self.ends[turn_id] = frame
            elif isinstance(frame, Saved):
                # What is published of a turn is never more than was computed: its prompt, and the tokens before the last one.
                assert frame.position <= len(self.prompts[turn_id]) + max(0, len(self.answers[turn_id]) - 1)
        self.seen = len(self.frames)

    def state_of(self, turn_id: str) -> str:
        """For the record of what was cancelled where."""
        if turn_id in self.loop._compiling:
            return "grammar"
        if turn_id in self.loop._held:
            return "held"
        seq = self.engine.outcomes.requests.get(turn_id)
        if seq is None:
            return "ended"
        if seq.table is None:
            return "paused" if seq.computed or seq.paused_us else "queued"
        if seq.loading is not None:
            return "restoring"
        return "decoding" if seq.output_length else "prefilling"

    def cancel(self, turn_id: str) -> None:
        self.states[self.state_of(turn_id)] += 1
        self.loop.cancel(turn_id)
        self.look()
        self.step()
        assert turn_id in self.ends, "one step later it is gone"
        assert turn_id not in self.engine.outcomes.requests
        assert turn_id not in self.loop._turns

    def finish(self) -> None:
        """Let all come to their ends, and see that the accounts are closed."""
        self.grammars.finish()
        for _ in range(5000):
            if not self.loop.running:
                break
            self.grammars.finish()
            self.step()
        assert set(self.ends) == set(self.prompts)
        assert (self.loop.running, self.bridge.pins, self.bridge.release_errors) == (0, 0, 0)
        assert not self.bridge._kept
        assert not self.engine.has_work
        self.engine.check()


def episode(seed: int, states: Counter[str]) -> int:
    """Returns how many turns were cancelled."""
    rng = random.Random(seed)
    world = World(rng)
    base = [rng.randrange(1, 97) for _ in range(40)]
    alive: list[str] = []
    cancelled: set[str] = set()
    for _ in range(rng.randrange(10, 26)):
        action = rng.randrange(10)
        if action < 4:
            old = rng.choice([base, *([*world.prompts[t], *world.answers[t]] for t in world.ends)])
            ids = [*old[: rng.randrange(1, len(old) + 1)], *(rng.randrange(1, 97) for _ in range(rng.randrange(0, 30)))][:120]
            alive.append(world.start(ids, grammar=rng.random() < 0.15, urgent=rng.random() < 0.4))
        elif action < 6 and (running := [t for t in alive if t not in world.ends]):
            turn_id = rng.choice(running)
            world.cancel(turn_id)
            cancelled.add(turn_id)
        elif action == 6:
            world.grammars.finish()
        else:
            for _ in range(rng.randrange(1, 4)):
                world.step()
    world.finish()
    for turn_id, ids in world.prompts.items():
        end, answer = world.ends[turn_id], world.answers[turn_id]
        assert isinstance(end, TurnFinished), end
        assert answer == expected_tokens(ids, len(answer))
        if turn_id not in cancelled:
            assert len(answer) == 6 or answer[-1] == 0
    # The next turn of each that was cancelled: what was kept of it is right.
    for turn_id in sorted(cancelled)[:3]:
        ids = [*world.prompts[turn_id], *world.answers[turn_id], 5]
        again = world.start(ids, grammar=False, urgent=False)
        world.finish()
        assert world.answers[again] == expected_tokens(ids, len(world.answers[again]))
    states.update(world.states)
    return len(cancelled)


STATES = {"queued", "grammar", "restoring", "paused", "prefilling", "decoding"}


@pytest.mark.parametrize("block", range(examples(1, 4)))
def test_a_cancel_at_any_moment_ends_the_turn_within_a_step_and_spoils_nothing(block: int) -> None:
    states: Counter[str] = Counter()
    seeds = examples(20, 40)
    count = sum(episode(seed, states) for seed in range(block * seeds, block * seeds + seeds))
    assert count > 1.5 * seeds
    assert set(states) >= {"queued", "prefilling", "decoding", "grammar"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_cancels_in_every_state() -> None:
    states: Counter[str] = Counter()
    count = sum(episode(1000 + seed, states) for seed in range(1200))
    assert count > 2000
    assert set(states) >= STATES, states


def test_cancelled_while_another_computes_what_it_needs_it_leaves_that_one_alone() -> None:
    world = World(random.Random(1))
    long = [1 + i % 90 for i in range(290)]
    first = world.start(long, grammar=False, urgent=False)
    world.step()
    second = world.start([*long, 3, 4], grammar=False, urgent=False)
    assert world.state_of(second) == "held"
    world.cancel(second)
    world.finish()
    assert world.answers[first] == expected_tokens(long, 6)
    assert any(isinstance(frame, Matched) for frame in world.frames)
