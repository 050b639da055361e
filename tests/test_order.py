"""The order that tests get when they run side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.order import LONG, spread

folders = st.sampled_from([*LONG, "engine", "statecache"])
tests = st.lists(folders, max_size=60).map(lambda names: list(enumerate(names)))


def folder(item: tuple[int, str]) -> str:
    return item[1]


@given(items=tests, processes=st.integers(1, 5))
def test_nothing_is_lost_and_each_folder_keeps_its_order(items: list[tuple[int, str]], processes: int) -> None:
    ordered = spread(items, processes, folder)
    assert sorted(ordered) == items
    for name in LONG:
        assert [i for i in ordered if folder(i) == name] == [i for i in items if folder(i) == name]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_run_of_each_process_begins_with_long_tests(processes: int) -> None:
    items = list(enumerate(["agentserve"] * 50 + ["benchmarks"] * 4 + ["e2e"] * 6 + ["engine"] * 50 + ["worker"] * 11))
    ordered = [folder(item) for item in spread(items, processes, folder)]
    begins, at = [], 0
    for left in range(processes, 0, -1):
        begins.append(ordered[at])
        at += (len(items) - at) // left
    assert begins == list(LONG[:processes])
    assert ordered[-1] not in LONG
