"""A state that only the disk has is read beside the running turns: they step on, it can be cancelled, it may fail."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from agentserve.worker.messages import TurnFailed, TurnFinished
from statecache.errors import SegmentBad
from statecache.tiers.disk import DiskTier
from tests.worker.harness import Harness
from tests.worker.test_turn_loop import greedy

SAVED = list(range(14, 60)) * 5
PROMPT = [*SAVED, *greedy(SAVED, 6), 20, 21]


@pytest.fixture
def h(tmp_path: Path):
    """A server that starts with what another one has left on disk."""
    before = Harness(disk=tmp_path, stays=False)
    before.turn(SAVED, max_tokens=6)
    before.run()
    before.states.close(60.0)
    h = Harness(disk=tmp_path)
    assert h.reader is not None
    assert {info.tiers for info in h.cache.checkpoints()} == {("disk",)}
    yield h
    h.reader.close()
    h.states.close()


class Gate:
    """Reads of the disk stand still until it is opened, and then fail with `error` if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.inside, self.open = threading.Event(), threading.Event()
        read = DiskTier.read

        def gated(tier: DiskTier, key: bytes, part: str) -> np.ndarray:
            self.inside.set()
            assert self.open.wait(60)
            if error is not None:
                raise SegmentBad("disk", key, "flipped") if isinstance(error, SegmentBad) else error
            return read(tier, key, part)

        monkeypatch.setattr(DiskTier, "read", gated)


def in_use(h: Harness) -> int:
    return sum(record.in_use for record in h.cache._kept.records.values())


def start(h: Harness) -> threading.Event:
    """Let the reader work; set when it has read something."""
    told = threading.Event()
    h.bridge.on_read = told.set
    assert h.reader is not None
    h.reader.start()
    return told


def test_other_turns_step_on_while_a_state_is_read(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, told = Gate(monkeypatch), start(h)
    other = h.turn([7, 8, 9], max_tokens=200)
    h.loop.step()
    waits = h.turn(PROMPT, max_tokens=6)
    assert gate.inside.wait(60)
    assert (h.loop.elsewhere, h.bridge.pins, h.loop.load().counters["restoring"]) == (1, 1, 1)
    before = len(h.answer(other))
    for _ in range(50):
        h.loop.poll()
        h.loop.step()
    assert len(h.answer(other)) == before + 50
    assert h.answer(waits) == []
    gate.open.set()
    assert told.wait(60)
    h.loop.poll()
    assert (h.loop.elsewhere, h.bridge.pins, in_use(h)) == (0, 0, 0)
    h.run()
    assert (h.matched(waits).tier, h.matched(waits).position) == ("disk", len(SAVED) + 5)
    assert h.answer(waits) == greedy(PROMPT, 6)
    assert h.answer(other) == greedy([7, 8, 9], 200)


def test_it_can_be_cancelled_before_and_while_it_is_read(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    waits, later = h.turn(PROMPT), h.turn(PROMPT)
    h.loop.cancel(later)
    start(h)
    assert gate.inside.wait(60)
    h.loop.cancel(waits)
    for turn_id in (waits, later):
        end = h.end(turn_id)
        assert isinstance(end, TurnFinished)
        assert end.reason == "cancelled"
    assert (h.loop.running, h.loop.elsewhere, h.bridge.pins) == (0, 0, 0)
    gate.open.set()
    assert h.reader is not None
    h.reader.close()
    assert in_use(h) == 0
    again = Harness().turn(PROMPT)
    assert again == "t1"


def test_a_deadline_passes_while_it_is_read(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    start(h)
    waits = h.turn(PROMPT, deadline_s=5.0)
    assert gate.inside.wait(60)
    h.clock_s += 6.0
    h.loop.poll()
    end = h.end(waits)
    assert isinstance(end, TurnFailed)
    assert end.code == "deadline_exceeded"
    gate.open.set()


@pytest.mark.parametrize("error", [SegmentBad("disk", b"x", "checksum"), OSError(5, "Input/output error"), MemoryError()])
def test_what_cannot_be_read_is_computed(h: Harness, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    gate, told = Gate(monkeypatch, error), start(h)
    turn_id = h.turn(PROMPT, max_tokens=6)
    gate.open.set()
    assert told.wait(60)
    h.loop.poll()
    h.run()
    assert h.matched(turn_id).position == 0
    assert h.answer(turn_id) == greedy(PROMPT, 6)
    assert (h.bridge.pins, in_use(h)) == (0, 0)


def test_two_turns_that_wait_for_the_same_state_prefill_what_follows_once(h: Harness) -> None:
    """The second one waits for the first one's checkpoint, once both have been read."""
    long = [*SAVED, *([5, 6, 7, 8] * 200)]
    first, second = h.turn(long, max_tokens=3), h.turn(long, max_tokens=3)
    assert h.reader is not None
    while h.reader.work() is not None:
        h.loop.poll()
    h.run()
    assert h.answer(first) == h.answer(second) == greedy(long, 3)
    assert h.matched(first).tier == "disk"
    assert h.matched(second).position >= len(long) - 1
    assert h.loop.running == 0


def test_a_bad_segment_leads_to_a_shorter_state_in_the_engines_pools(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one is not read by the reader's thread; the turn begins from its hold."""
    short = h.turn(SAVED[:30], max_tokens=2)
    assert h.loop.elsewhere == 0
    h.run()
    assert h.answer(short) == greedy(SAVED[:30], 2)
    told = start(h)
    gate = Gate(monkeypatch, SegmentBad("disk", b"x", "gone"))
    turn_id = h.turn(PROMPT, max_tokens=6)
    gate.open.set()
    assert told.wait(60)
    h.loop.poll()
    h.run()
    assert (h.matched(turn_id).tier, h.matched(turn_id).position) == ("device", 30)
    assert h.answer(turn_id) == greedy(PROMPT, 6)


def test_budgets_change_between_steps_and_running_turns_go_on(h: Harness) -> None:
    states = h.states
    running = h.turn([7, 8, 9], max_tokens=60)
    h.loop.step()
    assert states.set_budgets(0, 0) == ""
    h.bridge.budgets_changed()
    h.run()
    assert h.answer(running) == greedy([7, 8, 9], 60)
    rows = {row.tier: row for row in h.bridge.tiers()}
    assert (rows["ram"].used_bytes, rows["disk"].used_bytes, rows["disk"].checkpoints) == (0, 0, 0)
    assert states.set_budgets(1 << 20, 1 << 24) == ""
    h.bridge.budgets_changed()
    again = h.turn(PROMPT, max_tokens=6)
    h.run()
    assert h.matched(again).position == 0
    assert h.answer(again) == greedy(PROMPT, 6)
