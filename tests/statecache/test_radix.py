"""The index against a plain list of contexts."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from statecache.index.radix import RadixIndex
from statecache.keys import block_keys, token_bytes
from tests.budget import examples

SALTS = (b"a", b"b")
PIECES = [np.full(n, v) for n in (1, 40, 64, 130) for v in (1, 2)]
contexts = st.lists(st.sampled_from(range(len(PIECES))), max_size=5).map(
    lambda picks: np.concatenate([PIECES[i] for i in picks] or [np.empty(0, dtype=np.int64)]).astype(np.int64)
)


def keys_of(salt: bytes, tokens: np.ndarray) -> bytes:
    return b"".join(block_keys(b"n", salt, tokens))


class IndexMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.index = RadixIndex()
        self.model: dict[str, tuple[bytes, bytes]] = {}
        self.count = 0

    @rule(salt=st.sampled_from(SALTS), tokens=contexts.filter(len))
    def add(self, salt, tokens):
        ids = token_bytes(tokens)
        known = [m for m, place in self.model.items() if place == (salt, ids)]
        mark = known[0] if known else f"m{self.count}"
        self.count += 1
        self.index.add(salt, ids, keys_of(salt, tokens), mark)
        self.model[mark] = (salt, ids)

    @rule(data=st.data())
    def remove(self, data):
        if self.model:
            mark = data.draw(st.sampled_from(sorted(self.model)))
            self.index.remove(mark)
            del self.model[mark]
        self.index.remove("never there")

    @rule(salt=st.sampled_from(SALTS), tokens=contexts, limit=st.integers(0, 700))
    def walk(self, salt, tokens, limit):
        ids = token_bytes(tokens)
        walk = self.index.walk(salt, ids)
        known = [other for s, other in self.model.values() if s == salt]
        depth = max((_common(ids, other) for other in known), default=0)
        assert walk.depth == depth
        expected = sorted(
            ((len(other) // 4, m) for m, (s, other) in self.model.items() if s == salt and ids[: len(other)] == other),
            reverse=True,
        )
        assert list(walk.marks(limit)) == [(p, m) for p, m in expected if p <= limit]
        for position, mark in expected:
            assert walk.at(position) == mark
            assert list(self.index.above(mark)) == [(p, m) for p, m in expected if p < position]
        assert walk.keys() == keys_of(salt, tokens[:depth])
        continues = any(len(o) // 4 > depth and o[: 4 * depth] == ids[: 4 * depth] for o in known)
        if depth:
            assert walk.tip == (not continues)

    @invariant()
    def holds_no_token_twice_and_none_in_vain(self):
        prefixes = {(s, ids[: 4 * p]) for s, ids in self.model.values() for p in range(1, len(ids) // 4 + 1)}
        assert self.index.tokens == len(prefixes)
        assert len(self.index) == len(self.model)
        for mark in self.model:
            assert self.index.knows(mark)


def _common(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // 4
    return next((i for i in range(n) if a[4 * i : 4 * i + 4] != b[4 * i : 4 * i + 4]), n)


IndexMachine.TestCase.settings = settings(max_examples=examples(40, 60), stateful_step_count=25, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_a_long_session_stays_one_edge():
    """Checkpoints do not split edges: a match over thousands of them is one comparison of memory."""
    index = RadixIndex()
    tokens = np.arange(20_000)
    ids = token_bytes(tokens)
    keys = keys_of(b"a", tokens)
    for n in range(1, 2001):
        index.add(b"a", ids[: 40 * n], keys[: 10 * n // 64 * 16], f"m{n}")
    (root,) = index._roots.values()
    (edge,) = root.children.values()
    assert not edge.children
    assert next(index.walk(b"a", ids).marks(19_999)) == (19_990, "m1999")


def test_a_walk_is_followed_again_when_something_changed():
    index, tokens = RadixIndex(), np.arange(200)
    ids, keys = token_bytes(tokens), keys_of(b"a", tokens)
    assert index.walk(b"a", ids).depth == 0
    index.add(b"a", ids[:400], keys[:16], "shorter")
    assert list(index.walk(b"a", ids).marks(200)) == [(100, "shorter")]
    assert index.walk(b"b", ids).depth == 0
    index.add(b"a", ids, keys, "whole")
    assert index.walk(b"a", ids).at(200) == "whole"
    index.remove("whole")
    assert index.walk(b"a", ids).depth == 100
