"""What every tier must do, whatever its medium. A new tier joins FACTORIES."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from statecache.errors import SegmentBad, TierFull
from statecache.tiers.base import SegmentHeader, Tier
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier

KEY, A, B = (c * 17 for c in (b"k", b"a", b"b"))

FACTORIES = {
    "ram": lambda tmp_path, budget: RamTier(budget),
    "disk": lambda tmp_path, budget: DiskTier(tmp_path / "segments", budget, reserve_bytes=0),
    "ram with checksums": lambda tmp_path, budget: RamTier(budget, checksums=True),
}


@pytest.fixture(params=FACTORIES)
def make_tier(request, tmp_path):
    return lambda budget=1 << 20: FACTORIES[request.param](tmp_path, budget)


def header(tokens: bytes = b"\1\0\0\0") -> SegmentHeader:
    return SegmentHeader("state", b"n", b"s", b"k", b"p", 64, 65, tokens, "turn", 3)


def test_it_is_a_tier(make_tier):
    tier = make_tier()
    assert isinstance(tier, Tier)
    assert tier.extent_blocks >= 1
    assert (tier.used_bytes, tier.budget_bytes, list(tier.keys())) == (0, 1 << 20, [])


def test_what_is_put_is_read_back(make_tier):
    tier = make_tier()
    rows = np.arange(60, dtype=np.uint8).reshape(6, 10)
    charged = tier.put(KEY, header(), {"kv": rows[::2], "empty": np.empty((0, 3), np.uint8)})
    assert charged == tier.used_bytes == tier.cost(header(), {"kv": 30, "empty": 0})
    assert tier.header(KEY) == header()
    assert tier.read(KEY, "kv").tobytes() == rows[::2].tobytes()
    assert tier.read(KEY, "kv").dtype == np.uint8
    assert tier.read(KEY, "empty").size == 0
    out = np.zeros((2, 5), np.uint8)
    tier.read_into(KEY, "kv", out, 10)
    assert out.tobytes() == rows[2].tobytes()


def test_arrays_that_follow_one_another_are_one_part(make_tier):
    tier = make_tier()
    rows = np.arange(120, dtype=np.uint8).reshape(12, 10)
    pieces = [rows[:4], rows[4:8:2], np.empty((0, 10), np.uint8), rows[8:]]
    charged = tier.put(KEY, header(), {"kv": pieces, "empty": [], "tail": rows[3]})
    assert charged == tier.used_bytes == tier.cost(header(), {"kv": 100, "empty": 0, "tail": 10})
    assert tier.read(KEY, "kv").tobytes() == np.concatenate(pieces).tobytes()
    assert tier.read(KEY, "empty").size == 0
    assert tier.read(KEY, "tail").tobytes() == rows[3].tobytes()


def test_the_source_may_change_after_put_and_reads_are_read_only(make_tier):
    tier = make_tier()
    data = np.ones(8, np.uint8)
    tier.put(KEY, header(), {"a": data})
    data[:] = 9
    stored = tier.read(KEY, "a")
    assert stored.tolist() == [1] * 8
    assert not stored.flags.writeable


def test_what_is_not_there_is_bad(make_tier):
    tier = make_tier()
    tier.put(KEY, header(), {"a": np.ones(8, np.uint8)})
    with pytest.raises(SegmentBad, match="missing"):
        tier.header(B)
    with pytest.raises(SegmentBad, match="no part 'b'") as caught:
        tier.read(KEY, "b")
    assert caught.value.key == KEY
    with pytest.raises(SegmentBad, match="has 8 bytes, need 9"):
        tier.read_into(KEY, "a", np.zeros(5, np.uint8), 4)
    assert tier.delete(B) == 0


def test_a_put_that_does_not_fit_changes_nothing(make_tier):
    tier = make_tier(10_000)
    tier.put(A, header(), {"a": np.ones(1000, np.uint8)})
    used = tier.used_bytes
    with pytest.raises(TierFull, match=r"need \d+ bytes, \d+ free"):
        tier.put(B, header(), {"a": np.ones(9_990, np.uint8)})
    assert tier.used_bytes == used
    assert list(tier.keys()) == [A]


class TierMachine(RuleBasedStateMachine):
    """Keys, bytes and charges against a dict."""

    @initialize(budget=st.sampled_from([9_000, 30_000]), which=st.sampled_from(sorted(FACTORIES)))
    def start(self, budget, which):
        self.directory = tempfile.TemporaryDirectory()
        self.tier = FACTORIES[which](Path(self.directory.name), budget)
        self.model: dict[bytes, tuple[bytes, int]] = {}

    @rule(key=st.sampled_from([KEY, A, B]), size=st.integers(0, 9000), fill=st.integers(0, 255))
    def put(self, key, size, fill):
        used_by_others = sum(cost for k, (_, cost) in self.model.items() if k != key)
        cost = self.tier.cost(header(), {"x": size})
        data = np.full(size, fill, np.uint8)
        if used_by_others + cost > self.tier.budget_bytes:
            with pytest.raises(TierFull):
                self.tier.put(key, header(), {"x": data})
        else:
            assert self.tier.put(key, header(), {"x": data}) == cost
            self.model[key] = (data.tobytes(), cost)

    @rule(key=st.sampled_from([KEY, A, B]))
    def delete(self, key):
        assert self.tier.delete(key) == self.model.pop(key, (b"", 0))[1]

    @invariant()
    def agrees(self):
        assert set(self.tier.keys()) == set(self.model)
        assert self.tier.used_bytes == sum(cost for _, cost in self.model.values())
        for key, (data, _) in self.model.items():
            assert self.tier.read(key, "x").tobytes() == data

    def teardown(self):
        if hasattr(self, "directory"):
            self.directory.cleanup()


TierMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestTierMachine = TierMachine.TestCase
