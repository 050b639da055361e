"""Copies to the host that a device makes late: what they read stays, errors reach who asked, shutting down waits for them."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from engine.device.host import HostDevice
from engine.engine import Engine
from engine.types import HoldId
from tests.engine.helpers import make_engine, prompt, request, run

LENGTH = 40


class LateDevice(HostDevice):
    """Nothing told aside happens before somebody waits for it. fails: it does not happen then either."""

    def __init__(self) -> None:
        super().__init__(1)
        self.fails = False

    def _advance_aside(self, to):
        if to is None:
            return
        if self.fails:
            self._aside.clear()
            raise OSError("the device is gone")
        super()._advance_aside(to)


@pytest.fixture
def engine() -> Engine:
    return make_engine(device=LateDevice())


def held(engine: Engine) -> HoldId:
    engine.submit(request("a", prompt(3, LENGTH), 1, cuts=(LENGTH,)))
    return run(engine).hold_at("a", LENGTH)


def test_what_a_copy_reads_stays_when_its_hold_goes_and_is_free_when_it_has_come(engine):
    hold = held(engine)
    expected = engine.copy_out(hold)
    total = engine.stats().free_pages
    part, rest = engine.copy_kv(hold, 5, 33, 8), engine.copy_rest(hold, 33)
    engine.release(hold)
    engine.check()
    assert not part.done
    assert engine.stats().free_pages == total, "3 pages are held by the copies alone"
    assert [len(rows) for rows in part.result().kv] == [8, 8, 8, 4]
    rows = np.concatenate([*part.result().kv, *rest.result().kv])
    assert np.array_equal(rows, expected.kv[0].rows[5:])
    state = engine.layout.split(rest.result().state)
    assert state.keys() == expected.state.keys()
    assert all(np.array_equal(array, expected.state[name]) for name, array in state.items())
    engine.check()
    assert engine.stats().free_pages == engine.stats().total_pages


def test_a_copy_holds_only_the_pages_that_it_reads(engine):
    hold = held(engine)
    free = engine.stats().free_pages
    copy = engine.copy_kv(hold, 17, 20)
    engine.release(hold)
    assert engine.stats().free_pages == free + 2, "one page of three"
    copy.result()
    assert engine.stats().free_pages == free + 3


def test_an_error_of_the_device_reaches_who_asked_and_gives_up_what_was_referred_to(engine):
    hold = held(engine)
    copy = engine.copy_rest(hold, 0)
    engine.store._device.fails = True
    with pytest.raises(OSError, match="the device is gone"):
        copy.result()
    with pytest.raises(OSError, match="the device is gone"):
        copy.result()
    engine.store._device.fails = False
    engine.release(hold)
    engine.check()
    assert engine.stats().free_pages == engine.stats().total_pages


def test_shutting_down_waits_for_what_is_on_its_way_and_then_gives_the_memory_back(engine):
    hold = held(engine)
    arena = engine.memory_for_copies(0)
    assert arena is not None
    arena._step = 4 * mmap.PAGESIZE
    arena.set_limit(4 * mmap.PAGESIZE)
    arena.fill()
    copy = engine.copy_kv(hold, 0, LENGTH)
    stats = engine.stats()
    assert (stats.pinned_bytes, stats.not_pinned_bytes) == (4 * mmap.PAGESIZE, 0)
    assert stats.pinned_used_bytes == mmap.PAGESIZE
    engine.forget_memory()
    assert copy.done
    assert len(copy.result().kv[0]) == LENGTH
    assert engine.stats().pinned_bytes == 0
    assert engine.store._device._pinned == {}
    engine.copy_kv(hold, 0, LENGTH).result()  # to any memory
