"""Sessions of clients that want nothing stored: their ids and sizes only, in memory, until the server ends.

What was said is not here: it lives as long as its connection (context.py), and as token ids in the bounded cache below, to see
which turn a resent context goes on from.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from agentserve.interfaces import LINEAGE, SessionRow, StoredResponse
from agentserve.kept import Kept
from agentserve.session.lineage import predecessor

SESSIONS = 1024
TURNS_PER_SESSION = 1024
CONTEXT_BYTES = 32 << 20
LOOKED_AT = 16


@dataclass(slots=True)
class _Turn:
    before: str | None
    items: int


@dataclass(slots=True)
class _Session:
    created_at: float
    updated_at: float = 0.0
    turns: int = 0
    context_tokens: int = 0
    reused_tokens: int = 0
    known: OrderedDict[str, _Turn] = field(default_factory=OrderedDict)


class Unstored:
    """The newest sessions that have unstored turns, of all principals. Not thread-safe."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._contexts: Kept[str, bytes] = Kept(CONTEXT_BYTES)

    @property
    def size_bytes(self) -> int:
        """What the contexts take."""
        return self._contexts.size_bytes

    def add(self, turn: StoredResponse, reused_tokens: int) -> None:
        """A turn has ended that is not to be stored."""
        key = (turn.principal, turn.session)
        session = self._sessions.setdefault(key, _Session(created_at=turn.created_at))
        self._sessions.move_to_end(key)
        before = turn.parent or self._before(session, turn)
        session.updated_at = time.time()
        session.turns += 1
        session.context_tokens = (len(turn.prompt_ids) + len(turn.generated_ids)) // 4
        session.reused_tokens += reused_tokens
        session.known[turn.id] = _Turn(before, turn.context_items)
        context = turn.prompt_ids + turn.generated_ids
        self._contexts.put(turn.id, context, len(context))
        if len(session.known) > TURNS_PER_SESSION:
            session.known.popitem(last=False)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def _before(self, session: _Session, turn: StoredResponse) -> str | None:
        newest = reversed(session.known.items())
        fewer = [(known.items, name) for name, known in newest if known.items < turn.context_items]
        nearest = sorted(fewer, key=lambda one: -one[0])[:LOOKED_AT]
        contexts = ((name, self._contexts.get(name)) for _, name in nearest)
        return predecessor(turn.prompt_ids, turn.own_tokens, ((name, ids) for name, ids in contexts if ids is not None))

    def names(self, principal: str) -> list[str]:
        """Ids of sessions, newest first."""
        return [name for owner, name in reversed(self._sessions) if owner == principal]

    def row(self, principal: str, session_id: str, lineage: int = LINEAGE) -> SessionRow | None:
        """lineage: how many responses are named at most."""
        found = self._sessions.get((principal, session_id))
        return None if found is None else _row(session_id, found, lineage)

    def forget(self, principal: str, session_id: str) -> bool:
        gone = self._sessions.pop((principal, session_id), None)
        for name in () if gone is None else gone.known:
            self._contexts.drop(name)
        return gone is not None


def _row(name: str, session: _Session, most: int) -> SessionRow:
    last = next(reversed(session.known))
    line: dict[str, None] = {}
    at: str | None = last
    while at is not None and at in session.known and at not in line and len(line) < most:
        line[at] = None
        at = session.known[at].before
    return SessionRow(
        id=name,
        created_at=int(session.created_at),
        updated_at=int(session.updated_at),
        turns=session.turns,
        last_response=last,
        context_tokens=session.context_tokens,
        reused_tokens=session.reused_tokens,
        lineage=tuple(reversed(line)),
        lineage_has_more=at is not None and at not in line,
        stored=False,
    )
