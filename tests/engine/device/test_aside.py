"""What is told aside on the host device: in order, late, and never before what it was told after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.device.host import HostDevice


@given(seed=st.integers(0, 200), steps=st.lists(st.sampled_from(["tell", "look", "wait"]), max_size=30))
def test_calls_end_in_the_order_in_which_they_were_told_and_all_of_them_do(seed, steps):
    device, ended, moments = HostDevice(seed), [], []

    def tell(number: int) -> None:
        moments.append(device.aside(lambda: ended.append(number)))

    for step in steps:
        if step == "tell":
            tell(len(moments))
        elif step == "look" and moments:
            moments[-1].reached()
        elif moments:
            moments[len(moments) // 2].wait()
            assert len(moments) // 2 in ended
        assert ended == list(range(len(ended)))
        assert [moment.done for moment in moments] == [number < len(ended) for number in range(len(moments))]
    device.synchronize()
    assert ended == list(range(len(moments)))
    assert all(moment.reached() for moment in moments)


@given(seed=st.integers(0, 50))
def test_what_is_wanted_soon_waits_for_nothing_that_was_told_aside(seed):
    device, ended = HostDevice(seed), []
    moments = [device.aside(lambda: ended.append("aside"))]
    moments += [device.soon(lambda number=number: ended.append(number)) for number in range(3)]
    moments[2].wait()
    assert [one for one in ended if one != "aside"][:2] == [0, 1]
    assert "aside" not in ended
    device.synchronize()
    assert sorted(map(str, ended)) == ["0", "1", "2", "aside"]
    assert all(moment.reached() for moment in moments)


def test_some_seed_leaves_a_call_for_later_and_some_does_not():
    def is_late(seed: int) -> bool:
        return not HostDevice(seed).aside(lambda: None).reached()

    assert {is_late(seed) for seed in range(20)} == {False, True}


def test_without_a_seed_a_call_is_over_when_it_is_told():
    ended = []
    assert HostDevice().aside(lambda: ended.append(1)).reached()
    assert ended == [1]


def test_a_call_that_raises_is_told_to_whoever_waits_for_it_and_those_behind_it_run():
    def fail() -> None:
        raise OSError("no")

    ended: list[int] = []
    device = HostDevice(1)
    first, second = device.aside(fail), device.aside(lambda: ended.append(2))
    with pytest.raises(OSError, match="no"):
        first.wait()
    second.wait()
    assert ended == [2]
