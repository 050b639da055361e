"""Which ends of messages contexts come back to: what of a turn is worth writing to disk. Integers only, no tokens.

An agent that calls a tool appends to its call and hardly ever goes back to the result before it; after an answer, a template
that drops thinking takes the next context back to the last question. Which of these happens is counted for each group of
contexts, from what memory still has, so that what is never written is watched as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from statecache.policy import USUAL_RANKS, Policy, message_ends, worth_disk
from statecache.types import Boundary, BoundaryKind

CALLS = (BoundaryKind.CALL_OPEN, BoundaryKind.CALL_CLOSE)
TRIALS = 16
"""Of each sort are written before it may be left out."""
RARE = 64
"""One return in so many is not worth the bytes."""
FORGET_AT = 512
MOST_GROUPS = 256
MOST_SESSIONS = 4096
MOST_ENDS = 256
"""Of a session; the shallowest are not forgotten, since they are what a long chain of calls returns to."""


class Sort(NamedTuple):
    """What returns are counted by. calls: whether the turn ended with a call. rank: 0 is the turn's deepest end."""

    kind: BoundaryKind
    calls: bool
    rank: int


class Returns:
    """Counts by group (who asks), and the recent ends of the newest sessions."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, dict[Sort, tuple[int, int]]] = OrderedDict()
        """(offered, come back to)"""
        self._ends: OrderedDict[str, dict[int, Sort | None]] = OrderedDict()
        """Session → position → its sort, None once it was counted."""

    def durable(
        self, group: bytes, session: str, placed: Sequence[Boundary], prompt_tokens: int, policy: Policy
    ) -> list[Boundary]:
        """What of an ended turn should outlive the process, as worth_disk() says it; all of it is watched from now on."""
        calls = any(b.kind in CALLS for b in placed if b.position >= prompt_tokens)
        ends = message_ends(placed)[: policy.durable_ends]
        self.left(group, session, [(b.position, Sort(b.kind, calls, rank)) for rank, b in enumerate(ends)])
        return worth_disk(placed, policy, lambda kind, rank: self.worth(group, Sort(kind, calls, rank)))

    def left(self, group: bytes, session: str, ends: Iterable[tuple[int, Sort]]) -> None:
        """A turn has ended, with these ends of messages placed in it."""
        if not session:
            return
        known = self._ends.setdefault(session, {})
        self._ends.move_to_end(session)
        for position, sort in ends:
            known[position] = sort
            offered, used = self._group(group).get(sort, (0, 0))
            self._count(group, sort, offered + 1, used)
        while len(known) > MOST_ENDS:
            del known[max(known)]
        if len(self._ends) > MOST_SESSIONS:
            self._ends.popitem(last=False)

    def came(self, group: bytes, session: str, restored: int, agreed: int) -> None:
        """The session's next context: so many tokens were restored, so many agree with what is saved."""
        known = self._ends.get(session, {})
        at = max((position for position in known if position <= restored), default=0)
        sort = known.get(at)
        if sort is not None:
            offered, used = self._group(group).get(sort, (0, 0))
            self._count(group, sort, offered, used + 1)
            known[at] = None
        for position in [position for position in known if position > agreed]:
            del known[position]

    def worth(self, group: bytes, sort: Sort) -> bool:
        """Whether such an end should outlive the process."""
        offered, used = self._counts.get(group, {}).get(sort, (0, 0))
        if used * RARE >= max(1, offered):
            return True
        return sort.rank < USUAL_RANKS and offered <= TRIALS

    def _group(self, group: bytes) -> dict[Sort, tuple[int, int]]:
        counts = self._counts.setdefault(group, {})
        self._counts.move_to_end(group)
        if len(self._counts) > MOST_GROUPS:
            self._counts.popitem(last=False)
        return counts

    def _count(self, group: bytes, sort: Sort, offered: int, used: int) -> None:
        """Halved when there are many, so that a client that changes its ways is followed."""
        if offered >= FORGET_AT:
            offered, used = offered // 2, used // 2
        self._counts[group][sort] = (offered, used)
