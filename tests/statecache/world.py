"""A model of the truth for store tests: every byte of a state is a function of the *whole* token prefix, so that any byte from
another prefix, position or salt shows."""

from __future__ import annotations

import contextlib

import numpy as np

from statecache.errors import SegmentBad
from statecache.index.radix import RadixIndex
from statecache.policy import Policy
from statecache.store import StateCache
from statecache.tiers.base import Tier
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind, KvRun, Layout, Payload

LAYOUT = Layout(kv_token_bytes=8, state=(("delta", 24), ("conv", 8)), vocab_size=11)
NAMESPACE = b"n" * 32
SALT = b"a" * 32
OTHER_SALT = b"b" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def digests(tokens: np.ndarray, salt: bytes) -> np.ndarray:
    """u64 per position 1…n: depends on the salt and on every token before it."""
    value = int.from_bytes(salt[:4], "little")
    out = np.empty(len(tokens), dtype=np.uint64)
    for i, token in enumerate(tokens.tolist()):
        value = (value * 6364136223846793005 + token + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        out[i] = value
    return out


def truth(tokens: np.ndarray, salt: bytes, position: int, *, start: int = 0, logits: bool = False) -> Payload:
    """The state after tokens[:position], with KV rows from `start`."""
    rolling = digests(tokens[:position], salt)
    rows = rolling.view(np.uint8).reshape(-1, 8)[start:].copy()
    last = rolling[-1:].view(np.uint8)
    state = {"delta": np.tile(last, 3), "conv": last ^ 0xFF}
    scores = (rolling[-1] % np.uint64(1000)).astype(np.float32) + np.arange(11, dtype=np.float32)
    return Payload(position, (KvRun(start, rows),), state, scores if logits else None)


def same(payload: Payload, tokens: np.ndarray, salt: bytes) -> bool:
    """The payload is byte for byte the truth of its position."""
    want = truth(tokens, salt, payload.position, logits=True)
    rows = np.concatenate([run.rows for run in payload.kv])
    at = 0
    for run in payload.kv:
        assert run.start == at
        at += len(run.rows)
    return (
        rows.tobytes() == want.kv[0].rows.tobytes()
        and payload.state.keys() == want.state.keys()
        and all(payload.state[k].tobytes() == v.tobytes() for k, v in want.state.items())
        and (payload.logits is None or payload.logits.tobytes() == want.logits.tobytes())  # pyright: ignore
    )


def context(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def make(budget: int = 1 << 20, *, tiers: list[Tier] | None = None, policy: Policy | None = None, **kwargs) -> StateCache:
    return StateCache(
        kwargs.pop("namespace", NAMESPACE),
        LAYOUT,
        tiers=tiers or [RamTier(budget)],
        index=RadixIndex(),
        policy=policy or Policy(slack_permille=0),
        **kwargs,
    )


def save(
    cache: StateCache,
    tokens: np.ndarray,
    position: int,
    kind: BoundaryKind = BoundaryKind.TURN,
    *,
    salt: bytes = SALT,
    logits: bool = False,
    session: str = "",
):
    """put() the way the worker does: copy out only the rows that are missing."""
    start = cache.kv_missing_from(tokens, salt, position)
    payload = truth(tokens, salt, position, start=start, logits=logits)
    return cache.put(tokens, salt, Boundary(position, kind), payload, session=session)


def close_books(cache: StateCache) -> None:
    """Assert that every count agrees with an independent walk over the records."""
    kept = cache._kept
    for shelf in kept.shelves:
        tier = shelf.tier
        assert tier.used_bytes <= max(tier.budget_bytes, tier.used_bytes if tier.budget_bytes == 0 else 0)
        assert set(shelf.holdings) <= set(kept.records)
        needed: dict[bytes, int] = {}
        segments: set[bytes] = set()
        for holding in shelf.holdings.values():
            segments.add(holding.state_key)
            if holding.logits_key is not None:
                segments.add(holding.logits_key)
            if holding.tail is not None:
                needed[holding.tail.key] = needed.get(holding.tail.key, 0) + 1
        tails = [holding.tail for holding in shelf.holdings.values()]
        moves = cache._placing.moves
        growing = None if moves is None or moves._job is None else moves._job.growing
        if growing is not None and growing.shelf is shelf and growing.tail is not None:
            tails.append(growing.tail)
            needed[growing.tail.key] = needed.get(growing.tail.key, 0) + 1
        reachable = {}
        for tail in tails:
            block = tail
            while block is not None and block.key not in reachable:
                reachable[block.key] = block
                block = block.parent
        for block in reachable.values():
            if block.parent is not None:
                needed[block.parent.key] = needed.get(block.parent.key, 0) + 1
            segments.add(block.extent.key)
        for key, block in shelf.blocks.items():
            assert block.refs == needed.get(key, 0)
        assert set(reachable) <= set(shelf.blocks)
        for block in shelf.blocks.values():
            assert block.extent.live == sum(b.refs > 0 for b in block.extent.blocks) > 0
        if shelf is kept.shelves[0]:
            segments |= {item.key for item in cache._staging.items.values()}
        assert set(tier.keys()) == segments
        assert tier.used_bytes == sum(_segment_cost(tier, key) for key in segments)
    for record in kept.records.values():
        assert kept.is_anywhere(record)
    for item in cache._staging.items.values():
        there = kept.records.get(item.record.id)
        assert there is None or (there is item.record and kept.shelf_of(there) is None)
        assert item.base is None or item.base.in_use > 0
    assert cache._staging.used_bytes <= max(cache._staging.limit_bytes, 0)
    listed = {(s, i) for s, ids in kept.sessions.items() for i in ids}
    assert listed == {(s, r.id) for r in kept.records.values() for s in r.sessions}


def _segment_cost(tier: Tier, key: bytes) -> int:
    header = tier.header(key)
    states = [f"state.{n}" for n, _ in LAYOUT.state]
    names = {"extent": ["kv"], "logits": ["logits"]}.get(header.what) or ["kv.tail", *states]
    if key[:1] == b"q":  # rows that wait
        names = ["kv", *states]
        with contextlib.suppress(SegmentBad):
            tier.read(key, "logits")
            names.append("logits")
    return tier.cost(header, {name: tier.read(key, name).nbytes for name in names})
