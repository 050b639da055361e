"""Markers and segments → boundaries: which positions of a prompt, and of what is generated, get a checkpoint.

Token ids only. Markers that a tokenizer has no single token for are not seen here; their boundaries are best effort and come
from the server, which knows the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from statecache.policy import KIND_WEIGHT, Policy, better_kind
from statecache.types import Boundary, BoundaryKind, MarkerTable


def prompt_cuts(
    boundaries: Sequence[Boundary], prompt_tokens: int, policy: Policy, *, after: int = 0, parted_at: int = 0
) -> tuple[Boundary, ...]:
    """Positions of a prompt where its state is kept, rising and unique; the better kind names a shared position.

    All boundaries, the prompt end, shadows before it, the ladder and the junction, of those in (after, prompt_tokens].
    after: position that is restored, where a checkpoint exists. parted_at: tokens that agree with a saved context which goes
    on otherwise, 0 if there is none. Raises ValueError on a boundary outside [1, prompt_tokens].
    """
    wanted: dict[int, Boundary] = {}

    def want(cut: Boundary) -> None:
        if cut.position <= after or cut.position < 1:
            return
        other = wanted.get(cut.position)
        if other is None or better_kind(other.kind, cut.kind) is not other.kind:
            wanted[cut.position] = cut

    for boundary in boundaries:
        if not 1 <= boundary.position <= prompt_tokens:
            raise ValueError(f"boundary at {boundary.position} outside a prompt of {prompt_tokens} tokens")
        if policy.boundaries:
            want(boundary)
    want(Boundary(prompt_tokens, BoundaryKind.PROMPT_END))
    for distance in policy.shadows:
        want(Boundary(prompt_tokens - distance, BoundaryKind.SHADOW))
    if policy.ladder_tokens > 0:
        first = (after // policy.ladder_tokens + 1) * policy.ladder_tokens
        for position in range(first, prompt_tokens, policy.ladder_tokens):
            want(Boundary(position, BoundaryKind.LADDER))
    if 0 < policy.junction_tokens <= parted_at - after and parted_at < prompt_tokens:
        want(Boundary(parted_at, BoundaryKind.JUNCTION))
    return tuple(wanted[p] for p in sorted(wanted))


class GeneratedBoundaries:
    """Finds boundaries in generated ids, one token at a time.

    Positions count tokens in the state. A token is known before it is forwarded, so with token number i (from 0):

    - an opening marker and the end of the turn give position start + i, the state *before* the marker, which is exactly what
      the engine holds at that moment (edits go back to just before a block; the end token is usually never forwarded);
    - a closing marker gives position start + i + 1, reached once the marker has been forwarded.

    Returned positions never fall. A position is returned again only under a better kind (a turn that ends right after a call).
    A call marker inside open thinking closes the thinking. Inside a call only its end and the end of the turn count, the rest
    is arguments. thinking: whether the prompt already opened it.
    """

    def __init__(self, markers: MarkerTable, start: int, *, thinking: bool = False) -> None:
        self._markers = markers
        self.marking = markers.all()
        """Tokens at which push() may find something; the others change nothing but the position."""
        self._next = start
        self._thinking = thinking
        self._calling = False
        self._last: Boundary | None = None

    @property
    def thinking(self) -> bool:
        return self._thinking

    @property
    def position(self) -> int:
        """Position after every token pushed so far."""
        return self._next

    def push(self, token_id: int) -> Boundary | None:
        """Take the next sampled token; the boundary that it makes, if any."""
        before = self._next
        self._next += 1
        if token_id not in self.marking:
            return None
        found = self._classify(token_id, before)
        if found is None:
            return None
        last = self._last
        if last is not None and last.position == found.position and KIND_WEIGHT[found.kind] <= KIND_WEIGHT[last.kind]:
            return None
        self._last = found
        return found

    def push_at(self, position: int, token_id: int) -> Boundary | None:
        """push() of the token behind so many, where those since the last one pushed mark nothing and were left out."""
        self._next = position
        return self.push(token_id)

    def push_all(self, token_ids: Iterable[int]) -> list[Boundary]:
        return [b for b in map(self.push, token_ids) if b is not None]

    def _classify(self, token: int, before: int) -> Boundary | None:
        markers = self._markers
        if token in markers.turn_end:
            self._thinking = self._calling = False
            return Boundary(before, BoundaryKind.TURN)
        if self._calling:
            if token in markers.call_close:
                self._calling = False
                return Boundary(before + 1, BoundaryKind.CALL_CLOSE)
            if not markers.call_close and token in markers.call_open:  # this dialect's calls have no end of their own
                return Boundary(before, BoundaryKind.CALL_OPEN)
            return None
        if token in markers.call_open:
            self._thinking, self._calling = False, True
            return Boundary(before, BoundaryKind.CALL_OPEN)
        if token in markers.think_close:
            # Also when no opening was seen: many templates open the thinking in the prompt.
            self._thinking = False
            return Boundary(before + 1, BoundaryKind.THINK_CLOSE)
        if token in markers.think_open and not self._thinking:
            self._thinking = True
            return Boundary(before, BoundaryKind.THINK_OPEN)
        return None


TAIL_TOKENS = 32
"""A template opens thinking among the last tokens of a prompt or not at all."""


def thinking_is_open(ids: np.ndarray, markers: MarkerTable) -> bool:
    """Whether the prompt ends inside thinking that its template opened: the last marker of its tail opens one."""
    for token in reversed(ids[-TAIL_TOKENS:].tolist()):
        if token in markers.think_open:
            return True
        if token in markers.think_close or token in markers.turn_end:
            return False
    return False
