"""Ranges of pinned memory: they never overlap while anybody looks at them, and come back when nobody does."""

from __future__ import annotations

import logging
import mmap
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.host import HostDevice
from engine.kvcache import arena as module
from engine.kvcache.arena import PinnedArena
from engine.kvcache.spans import joined

STEP, UNIT = 4 * mmap.PAGESIZE, 64
ROOM = STEP // UNIT - 2
"""Units of a step that can be given out."""


def make(steps: int = 2, device: HostDevice | None = None, **more: int) -> PinnedArena:
    return PinnedArena(device or HostDevice(), steps * STEP, **{"step_bytes": STEP, "unit": UNIT, **more})


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@given(sizes=st.lists(st.integers(0, STEP // 3), min_size=1, max_size=60), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_what_is_used_is_nobody_elses_and_all_of_it_comes_back(sizes, seed):
    arena, order = make(3), random.Random(seed)
    arena.fill()
    live: dict[int, np.ndarray] = {}
    for number, size in enumerate(sizes):
        live[number] = arena.take(size)
        assert live[number].nbytes == size
        live[number][:] = number % 251
        if order.random() < 0.2:
            arena.set_limit(order.randint(0, 4) * STEP)
            arena.fill()
            while arena.shrink():
                pass
        if order.random() < 0.6:
            index = order.choice(list(live))
            live[index] = live[index][: len(live[index]) // 2].reshape(-1, 1)  # a view alone keeps the range
        if order.random() < 0.5:
            del live[order.choice(list(live))]
        assert all((live[index] == index % 251).all() for index in live)
    used = sum(-(-sizes[index] // UNIT) * UNIT for index in live if sizes[index] and inside(arena, live[index]))
    halved = [index for index in live if sizes[index] and not live[index].nbytes]  # to nothing, and kept all the same
    empty = sum(-(-sizes[index] // UNIT) * UNIT for index in halved)
    assert used <= arena.stats().used <= used + empty
    live.clear()
    assert arena.stats().used == 0
    arena.set_limit(3 * STEP)
    arena.fill()
    assert arena.stats().pinned >= 3 * STEP
    whole = [arena.take(ROOM * UNIT) for _ in range(len(arena._chunks))]
    assert all(inside(arena, array) for array in whole), "ranges that came back are one again"


def inside(arena: PinnedArena, array: np.ndarray) -> bool:
    return array.nbytes > 0 and arena._chunk_of(address(array) // UNIT) >= 0


def test_ranges_taken_one_after_another_are_one_copy_and_never_reach_over_a_seam():
    arena = make(2)
    arena.fill()
    arrays = [arena.take(UNIT) for _ in range(2 * ROOM)]
    assert all(inside(arena, array) for array in arrays)
    by_address = sorted(arrays, key=address)
    spans = list(joined(by_address))
    assert [len(span) for span in spans] == [ROOM * UNIT] * 2
    for span in spans:
        chunk = arena._chunks[arena._chunk_of(address(span) // UNIT)]
        assert chunk.data_ptr() < address(span)
        assert address(span) + len(span) < chunk.data_ptr() + STEP


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_joined_arrays_are_the_same_bytes_in_order(data):
    memory = np.arange(200, dtype=np.uint8)
    cuts = sorted(data.draw(st.lists(st.integers(0, 200), max_size=8)))
    parts = [memory[a:b] for a, b in zip([0, *cuts], [*cuts, 200], strict=True)]
    mixed = data.draw(st.booleans())
    if mixed:
        parts = data.draw(st.permutations(parts))
    other = [np.full(3, 7, np.uint8), *parts]
    assert b"".join(s.tobytes() for s in joined(other)) == b"".join(p.tobytes() for p in other)
    if not mixed:
        assert len(list(joined(parts))) == 1


def test_a_span_keeps_what_it_covers():
    arena = make(1)
    arena.fill()
    arrays = [arena.take(UNIT) for _ in range(3)]
    (span,) = joined(arrays)
    del arrays
    assert arena.stats().used == 3 * UNIT
    del span
    assert arena.stats().used == 0


def test_all_that_the_limit_allows_is_pinned_and_no_more():
    device = HostDevice()
    arena = make(3, device)
    arena.fill()
    assert not arena.grow()
    assert arena.stats().pinned == 3 * STEP == sum(device._pinned.values())
    kept = [arena.take(ROOM * UNIT) for _ in range(3)]
    assert all(inside(arena, array) for array in kept)
    beyond = arena.take(100)
    assert not inside(arena, beyond)
    assert arena.stats().elsewhere == 100
    arena.close()
    assert device._pinned == {}
    assert arena.stats().used == 0
    kept[0][:] = 1  # what is still used can be


def test_a_refusal_is_told_once_and_ordinary_memory_serves(caplog):
    arena = make(8, HostDevice(pin_quota=STEP))
    with caplog.at_level(logging.WARNING):
        arena.fill()
        arrays = [arena.take(ROOM * UNIT) for _ in range(3)]
        arena.fill()
    assert [inside(arena, array) for array in arrays] == [True, False, False]
    (told,) = [r.message for r in caplog.records]
    assert f"a quota of {STEP} bytes" in told


def test_a_lower_limit_gives_back_what_nobody_uses_and_the_rest_when_nobody_does():
    device = HostDevice()
    arena = make(3, device)
    arena.fill()
    kept = [arena.take(ROOM * UNIT) for _ in range(3)]
    arena.set_limit(STEP)
    assert not arena.shrink(), "all of it is used"
    del kept[1]
    assert arena.shrink()
    assert not arena.shrink()
    assert arena.stats().pinned == 2 * STEP == sum(device._pinned.values())
    kept[0][:] = kept[1][:] = 7
    kept.clear()
    assert arena.shrink()
    assert not arena.shrink(), "so much may be pinned"
    assert inside(arena, arena.take(ROOM * UNIT))
    arena.set_limit(2 * STEP)
    assert arena.grow()
    assert arena.stats().pinned == 2 * STEP == sum(device._pinned.values())


def test_many_that_come_back_at_once_are_taken_in_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 2)
    arena = make(1)
    arena.fill()
    kept = [arena.take(UNIT) for _ in range(ROOM)]
    kept.clear()
    one = arena.take(UNIT)
    assert inside(arena, one)
    assert len(arena._returned) == ROOM - 2
    assert inside(arena, arena.take((ROOM - 2) * UNIT)), "all of them, before there is too little"


def test_memory_that_others_need_is_not_pinned(caplog, monkeypatch):
    monkeypatch.setattr(module, "SPARE_BYTES", 1 << 60)
    arena = make()
    arena.fill()
    assert arena.stats().pinned == 0
    assert arena.take(10).nbytes == 10
    assert "bytes are available" in caplog.text


def test_a_thread_pins_what_is_wanted_and_ends_with_the_arena():
    grown = []

    class Device(HostDevice):
        def pin(self, memory):
            grown.append(len(memory))
            return super().pin(memory)

    arena = make(1, Device())
    arena.start()
    while len(grown) < 1:
        pass
    arena.set_limit(2 * STEP)
    while len(grown) < 2:
        pass
    arena.close()
    assert arena._thread is not None
    assert not arena._thread.is_alive()


@pytest.mark.parametrize("nbytes", [STEP, 2 * STEP])
def test_what_no_step_can_hold_is_ordinary_memory(nbytes):
    arena = make()
    arena.fill()
    assert not inside(arena, arena.take(nbytes))
