"""The host device runs tapes in every order that they allow and in no other, so that a missing fence shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.device.host import HostDevice
from engine.device.tape import Lane, Mark, Tape
from engine.errors import DeviceError


def forked(log: list[str], joined: bool) -> Tape:
    tape = Tape()
    tape.add(lambda: log.append("before"))
    tape.fork()
    tape.add(lambda: log.append("copy"), Lane.SIDE)
    tape.add(lambda: log.append("compute"))
    if joined:
        tape.join()
    tape.add(lambda: log.append("read"))
    return tape


def orders(joined: bool) -> set[tuple[str, ...]]:
    seen = set()
    for seed in range(60):
        log: list[str] = []
        device = HostDevice(seed)
        device.run(forked(log, joined))
        device.synchronize()
        seen.add(tuple(log))
    return seen


def test_a_fork_and_a_join_hold_in_every_order():
    found = orders(joined=True)
    assert found == {("before", "copy", "compute", "read"), ("before", "compute", "copy", "read")}


def test_without_the_join_the_copy_also_comes_too_late():
    assert ("before", "compute", "read", "copy") in orders(joined=False)


def test_the_side_lane_may_lag_into_later_tapes_until_it_is_waited_for():
    seen = set()
    for seed in range(60):
        log: list[str] = []
        device = HostDevice(seed)
        first, second = Tape(), Tape()
        first.add(lambda log=log: log.append("copy"), Lane.SIDE)
        first.add(lambda log=log: log.append("first"))
        second.add(lambda log=log: log.append("second"))
        second.join()
        second.add(lambda log=log: log.append("third"))
        device.run(first)
        device.run(second)
        seen.add(tuple(log))
    assert ("first", "second", "copy", "third") in seen
    assert all(order.index("copy") < order.index("third") for order in seen)


@given(st.lists(st.sampled_from(["main", "side", "fork", "join"]), max_size=30), st.integers(0, 1000))
def test_calls_of_a_lane_run_in_order_and_marks_are_kept(script, seed):
    tape, log, device = Tape(), [], HostDevice(seed)
    happens_before: list[tuple[int, int]] = []
    last, forks, joins = {Lane.MAIN: -1, Lane.SIDE: -1}, -1, -1
    for number, what in enumerate(script):
        if what in ("main", "side"):
            lane = Lane.MAIN if what == "main" else Lane.SIDE
            tape.add(lambda number=number: log.append(number), lane)
            happens_before += [(last[lane], number), (forks if lane is Lane.SIDE else joins, number)]
            last[lane] = number
        elif what == "fork":
            tape.fork()
            forks = last[Lane.MAIN]
        else:
            tape.join()
            joins = last[Lane.SIDE]
    device.run(tape)
    device.synchronize()
    assert sorted(log) == [n for n, what in enumerate(script) if what in ("main", "side")]
    for earlier, later in happens_before:
        assert earlier < 0 or log.index(earlier) < log.index(later)


def test_a_tape_that_waits_for_nothing_is_an_error_and_not_a_hang():
    tape = Tape()
    tape.wait(Mark(7, Lane.SIDE), Lane.MAIN)
    with pytest.raises(DeviceError, match="never set"):
        HostDevice(0).run(tape)


def test_a_captured_tape_runs_again():
    log: list[str] = []
    graph = HostDevice(1).capture(forked(log, joined=True))
    log.clear()
    graph.replay()
    graph.replay()
    assert len(log) == 8


STEPS = st.lists(st.sampled_from(["main", "side", "fork", "join"]), max_size=24)


@given(steps=STEPS, calls=st.integers(1, 6), seed=st.integers(0, 1000))
def test_pieces_hold_the_same_work_and_are_joined_at_every_cut(steps: list[str], calls: int, seed: int) -> None:
    log: list[tuple[str, int]] = []
    tape = Tape()
    for number, step in enumerate(["fork", *steps, "join"]):
        if step == "main":
            tape.add(lambda n=number: log.append(("main", n)))
        elif step == "side":
            tape.add(lambda n=number: log.append(("side", n)), Lane.SIDE)
        elif step == "fork":
            tape.fork()
        else:
            tape.join()
    parts = tape.pieces(calls)
    assert [entry for part in parts for entry in part.entries] == tape.entries
    device, before = HostDevice(seed), 0
    for part in parts:
        for entry in part.entries:
            if entry.awaits is not None:
                assert entry.awaits.index in {e.sets.index for e in part.entries if e.sets is not None}
        device.run(part)
        # Whatever order the device chose, a piece that is followed by another left nothing behind on the side lane.
        before += sum(entry.call is not None for entry in part.entries)
        if part is not parts[-1]:
            assert len(log) == before
    device.synchronize()
    assert len(log) == before


def test_pieces_are_no_longer_than_they_must_be():
    tape = Tape()
    for _ in range(9):
        tape.add(lambda: None)
    tape.fork()
    for _ in range(5):
        tape.add(lambda: None, Lane.SIDE)
    tape.join()
    tape.add(lambda: None)
    assert [sum(e.call is not None for e in part.entries) for part in tape.pieces(3)] == [3, 3, 3, 5, 1]


def test_a_fork_stays_with_what_it_is_for():
    tape = Tape()
    tape.fork()
    for lane in (Lane.MAIN, Lane.MAIN, Lane.SIDE):
        tape.add(lambda: None, lane)
    tape.join()
    assert len(tape.pieces(1)) == 1


def test_a_join_of_less_than_all_of_the_side_lane_is_no_place_to_cut():
    tape = Tape()
    tape.fork()
    tape.add(lambda: None, Lane.SIDE)
    first = tape.mark(Lane.SIDE)
    tape.add(lambda: None, Lane.SIDE)
    tape.wait(first, Lane.MAIN)
    for _ in range(3):
        tape.add(lambda: None)
    tape.join()
    tape.add(lambda: None)
    assert [sum(e.call is not None for e in part.entries) for part in tape.pieces(1)] == [5, 1]
