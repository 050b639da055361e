"""Block ids against the real StateCache, over tiers that charge for the states of a 35B hybrid model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.traces.alone import Paths
from benchmarks.traces.data import BlockTurn, interleave
from benchmarks.traces.figures import Tally
from benchmarks.traces.rates import STATE_BYTES
from benchmarks.traces.tiers import KV_BYTES, SCALE, copy_wanted, tiers_of
from statecache.boundary import prompt_cuts
from statecache.index.radix import RadixIndex
from statecache.policy import Policy, worth_disk
from statecache.store import StateCache
from statecache.types import BLOCK_TOKENS, Boundary, KvRun, Layout, Payload

LAYOUT = Layout(KV_BYTES, (("recurrent", STATE_BYTES // SCALE),), 1)
SALT = b"trace"
SESSION_BLOCKS = 20_000
"""Block ids of a session are below this."""


def replay_blocks(
    sessions: Sequence[Sequence[BlockTurn]], policy: Policy, ram_bytes: int, disk_bytes: int = 0, lanes: int = 1
) -> dict[str, Any]:
    """Match and save every request; what is chosen for the disk is written there before the next one.

    What is generated is part of the next request's blocks and is not saved separately.
    """
    now = 0.0
    tiers = tiers_of(ram_bytes, disk_bytes)
    cache = StateCache(
        b"trace",
        LAYOUT,
        tiers=tiers,
        index=RadixIndex(),
        policy=policy,
        clock=lambda: now,
        write_behind=len(tiers) > 1,
    )
    cache.on_waiting = lambda: copy_wanted(cache)
    row = np.zeros((1, LAYOUT.kv_token_bytes), dtype=np.uint8)
    state = {name: np.zeros(size, np.uint8) for name, size in LAYOUT.state}
    paths = [Paths() for _ in sessions]
    tally = Tally()
    for at, number, turn in interleave(sessions, lanes):
        now = at
        _, known, _ = paths[number].walk(turn.blocks)
        # a block id becomes 64 token ids that no other session has
        ids = ((turn.blocks + number * SESSION_BLOCKS)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
        placed: dict[Boundary, str] = {}
        with cache.match(ids, SALT) as match:
            base = match.position
            tally.turn(turn.input_tokens, min(known * BLOCK_TOKENS, turn.input_tokens - 1), base, match.tier)
            tally.fresh += len(ids) - known * BLOCK_TOKENS
            parted_at = match.divergence.position if match.divergence.cause == "tokens" else 0
            for cut in prompt_cuts((), len(ids), policy, after=base, parted_at=parted_at):
                start = cache.kv_missing_from(ids, SALT, cut.position)
                rows = np.broadcast_to(row, (cut.position - start, LAYOUT.kv_token_bytes))
                result = cache.put(ids, SALT, cut, Payload(cut.position, (KvRun(start, rows),), state))
                if result.checkpoint_id is not None:
                    placed[cut] = result.checkpoint_id
                    tally.placed += not result.existed
        cache.want([placed[cut] for cut in worth_disk(placed, policy)])
        cache.settle(placed.values())
        copy_wanted(cache)
    evictions = sum(tier.evictions for tier in cache.stats().tiers.values())
    return tally.figures() | tally.written(tiers) | {"evictions": evictions}
