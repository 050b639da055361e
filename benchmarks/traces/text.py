"""The whole path on recorded text: turn loop, state bridge and the real StateCache, over an engine that says what was recorded.

Everything between "a turn starts" and "its checkpoints are saved" is the code that serves; only the numbers in the states are
stand-ins, and every restore is compared with the tokens that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentserve.worker.messages import FromWorker, Matched, Sampling, StartTurn, TurnFinished
from agentserve.worker.naming import namespace_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from benchmarks.traces.compose import Prompt
from benchmarks.traces.data import interleave
from benchmarks.traces.engine import RecordedEngine
from benchmarks.traces.figures import Tally
from benchmarks.traces.prefixes import Known
from benchmarks.traces.tiers import copy_wanted, tiers_of
from statecache.index.radix import RadixIndex
from statecache.policy import Policy
from statecache.store import StateCache

SALT = b"trace"


def replay_prompts(
    sessions: Sequence[Sequence[Prompt]], policy: Policy, ram_bytes: int, disk_bytes: int = 0, lanes: int = 1
) -> dict[str, Any]:
    """Play every prompt and its recorded answer. Budgets are those of the full-size model (rates.py).

    Raises AssertionError if a restored state is not that of its prompt, or the cache failed anywhere.
    """
    now = 0.0
    first = next(prompt for session in sessions for prompt in session)
    vocabulary = 1 + max(int(prompt.ids.max()) for session in sessions for prompt in session)
    engine = RecordedEngine(max(vocabulary, 1 + max(first.markers.turn_end)), first.markers.turn_end)
    namespace, layout = namespace_of(engine.info, engine.layout)
    tiers = tiers_of(ram_bytes, disk_bytes)
    cache = StateCache(
        namespace,
        layout,
        tiers=tiers,
        index=RadixIndex(),
        policy=policy,
        clock=lambda: now,
        write_behind=len(tiers) > 1,
    )
    cache.on_waiting = lambda: copy_wanted(cache)
    frames: list[FromWorker] = []
    bridge = StateBridge(engine, cache, cache.want, stays=False)  # budgets are those of memory and disk
    loop = TurnLoop(engine, bridge, frames.append, clock=lambda: now)
    tally, known = Tally(), Known()
    for at, number, prompt in interleave(sessions, lanes):
        now = at
        frames.clear()
        engine.script = prompt.generated
        loop.start(
            StartTurn(
                turn_id=f"t{tally.turns}",
                ids=prompt.ids.astype("<u4").tobytes(),
                cuts=prompt.cuts,
                markers=prompt.markers,
                salt=SALT,
                session=str(number),
                sampling=Sampling(max_tokens=len(prompt.generated), temperature=0.0),
                accepted_at=now,
            )
        )
        while engine.has_work:
            loop.step()
        matched = next(frame for frame in frames if isinstance(frame, Matched))
        assert isinstance(frames[-1], TurnFinished), frames[-1]
        tally.turn(len(prompt.ids), known.reusable(prompt.ids), matched.position, matched.tier)
        tally.fresh += known.add(prompt.ids, np.array(prompt.generated, np.uint32))
        copy_wanted(cache)
    assert bridge.cache_errors == 0, f"the cache failed {bridge.cache_errors} times"
    tally.placed = tiers[0].segments["state"]
    evictions = sum(tier.evictions for tier in cache.stats().tiers.values())
    return tally.figures() | tally.written(tiers) | {"evictions": evictions}
