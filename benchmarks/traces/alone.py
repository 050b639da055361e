"""Policies alone: which saved positions lie on the next request's path. No store, no bytes, no eviction beyond the policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.traces.compose import Prompt
from benchmarks.traces.data import BlockTurn
from benchmarks.traces.figures import Tally
from benchmarks.traces.policies import POLICIES, Keep, lasts
from benchmarks.traces.prefixes import common_prefix
from statecache.policy import worth_disk
from statecache.returns import Returns
from statecache.types import BLOCK_TOKENS, Boundary


class Paths:
    """Numbers the block prefixes of one session: equal prefix, equal number."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._branches: set[int] = set()

    def walk(self, blocks: np.ndarray) -> tuple[list[int], int, bool]:
        """(number of the prefix after each block, how many blocks were known, whether a known path goes on otherwise)."""
        numbers: list[int] = []
        at, known, parted = 0, 0, False
        for block in blocks.tolist():
            step = (at, block)
            following = self._next.get(step)
            if following is None:
                following = self._next[step] = len(self._next) + 1
                parted = parted or (known == len(numbers) and at in self._branches)
            else:
                known += 1
            self._branches.add(at)
            at = following
            numbers.append(at)
        return numbers, known, parted


def block_policies(sessions: Sequence[Sequence[BlockTurn]], policies: Mapping[str, Keep] = POLICIES) -> dict[str, Any]:
    """Figures by policy. What is generated is part of the next request's blocks and is not saved separately."""
    return {name: _replay_blocks(sessions, keep).figures() for name, keep in policies.items()}


def _replay_blocks(sessions: Sequence[Sequence[BlockTurn]], keep: Keep) -> Tally:
    tally = Tally()
    for session in sessions:
        paths = Paths()
        recent: deque[set[int]] = deque(maxlen=keep.ends or None)
        for_ever: set[int] = set()
        for turn in session:
            numbers, known, parted = paths.walk(turn.blocks)
            saved = for_ever.union(*recent)
            depth = next((i + 1 for i in range(known - 1, -1, -1) if numbers[i] in saved), 0)
            limit = turn.input_tokens - 1
            tally.turn(turn.input_tokens, min(known * BLOCK_TOKENS, limit), min(depth * BLOCK_TOKENS, limit))
            ends: set[int] = {numbers[depth - 1]} if depth == len(numbers) else set()
            parted_at = known * BLOCK_TOKENS if parted else 0
            cuts = keep.cuts((), len(numbers) * BLOCK_TOKENS, after=depth * BLOCK_TOKENS, parted_at=parted_at)
            for cut in worth_disk(cuts, keep.policy) if keep.disk else cuts:
                number = numbers[cut.position // BLOCK_TOKENS - 1]
                tally.placed += number not in saved
                (for_ever if lasts(cut) else ends).add(number)
            recent.append(ends)
    return tally


def prompt_policies(sessions: Sequence[Sequence[Prompt]], policies: Mapping[str, Keep] = POLICIES) -> dict[str, Any]:
    """Figures by policy, for prompts with their boundaries; each session for itself."""
    return {name: _replay_prompts(sessions, keep).figures() for name, keep in policies.items()}


def _replay_prompts(sessions: Sequence[Sequence[Prompt]], keep: Keep) -> Tally:
    tally, returns = Tally(), Returns()
    for name, session in enumerate(sessions):
        contexts: list[np.ndarray] = []
        placed: list[list[Boundary]] = []
        for turn, prompt in enumerate(session):
            n = len(prompt.ids)
            shared = [common_prefix(prompt.ids, context) for context in contexts]
            longest = max(shared, default=0)
            depth = 0
            for number, (agree, cuts) in enumerate(zip(shared, placed, strict=True)):
                old = keep.ends and number < turn - keep.ends
                limit = agree if agree < n or _ends_at(cuts, n) else n - 1
                depth = max([depth, *(c.position for c in cuts if c.position <= limit and (lasts(c) or not old))])
            tally.turn(n, n if longest >= n and depth == n else min(longest, n - 1), depth)
            parted_at = longest if any(len(c) > longest == s for c, s in zip(contexts, shared, strict=True)) else 0
            cuts = keep.cuts(
                prompt.boundaries,
                n,
                after=depth,
                parted_at=parted_at if longest < n else 0,
                generated=prompt.generated,
                markers=prompt.markers,
            )
            if keep.disk:
                returns.came(b"", str(name), min(longest, n - 1), longest)
                cuts = returns.durable(b"", str(name), cuts, n, keep.policy)
            tally.placed += len(cuts)
            contexts.append(np.concatenate([prompt.ids, np.array(prompt.generated, np.uint32)]))
            placed.append(cuts if cuts or not placed else [Boundary(depth, placed[-1][-1].kind)] if depth else [])
    return tally


def _ends_at(cuts: Sequence[Boundary], position: int) -> bool:
    return any(cut.position == position for cut in cuts)
