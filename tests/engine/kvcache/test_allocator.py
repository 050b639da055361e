"""The allocator against a dict of counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.errors import OutOfPages, OutOfRows
from engine.kvcache.allocator import RefAllocator

TOTAL = 12


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = RefAllocator(TOTAL, OutOfPages)
        self.references: list[np.ndarray] = []

    @rule(count=st.integers(0, 5))
    def take(self, count):
        used = {i for ids in self.references for i in ids.tolist()}
        if count > TOTAL - len(used):
            with pytest.raises(OutOfPages, match=f"need {count} KV pages, {TOTAL - len(used)} free"):
                self.allocator.take(count)
            return
        ids = self.allocator.take(count)
        assert len(set(ids.tolist())) == count
        assert not used & set(ids.tolist())
        self.references.append(ids)

    @rule(data=st.data())
    def share(self, data):
        if self.references:
            ids = data.draw(st.sampled_from(self.references))
            part = ids[: data.draw(st.integers(0, len(ids)))].copy()
            self.allocator.retain(part)
            self.references.append(part)

    @rule(data=st.data())
    def release(self, data):
        if self.references:
            ids = self.references.pop(data.draw(st.integers(0, len(self.references) - 1)))
            freed = self.allocator.release(ids)
            left = {i for other in self.references for i in other.tolist()}
            assert set(freed.tolist()) == set(ids.tolist()) - left

    @invariant()
    def accounts_close(self):
        self.allocator.check(self.references)
        used = {i for ids in self.references for i in ids.tolist()}
        assert self.allocator.free == TOTAL - len(used)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_check_notices_a_leak_and_a_double_use():
    allocator = RefAllocator(4, OutOfRows)
    ids = allocator.take(2)
    with pytest.raises(AssertionError, match="references"):
        allocator.check([])
    with pytest.raises(AssertionError, match="references"):
        allocator.check([ids, ids])
    allocator.release(ids)
    with pytest.raises(AssertionError, match="was free"):
        allocator.release(ids)
