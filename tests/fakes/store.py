"""Storage in a dict. Implements agentserve.interfaces.Store."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.interfaces import SessionRow, StoredResponse
from agentserve.protocol.responses import ResponseBody


class NoConversations:
    """There are none; those that there are have tests on a database."""

    async def get(self, principal: str, conversation_id: str) -> None:
        return None

    async def items(self, principal: str, conversation_id: str) -> None:
        return None


class FakeStore:
    """committed: ids in the order of their commits. fail: raised by the next commits."""

    def __init__(self) -> None:
        self.conversations = NoConversations()
        self.rows: dict[str, StoredResponse] = {}
        self.committed: list[str] = []
        self.fail: Exception | None = None
        self.background_fails: Exception | None = None
        self.background: dict[str, tuple[str, ResponseBody]] = {}

    async def get(self, principal: str, response_id: str) -> StoredResponse | None:
        row = self.rows.get(response_id)
        return row if row is not None and row.principal == principal else None

    async def chain(self, principal: str, response_id: str) -> tuple[StoredResponse, ...] | None:
        found: list[StoredResponse] = []
        at: str | None = response_id
        while at is not None:
            row = await self.get(principal, at)
            if row is None:
                return None
            found.append(row)
            at = row.parent
        return tuple(reversed(found))

    async def commit(self, response: StoredResponse) -> None:
        if self.fail is not None:
            raise self.fail
        self.rows[response.id] = response
        self.background.pop(response.id, None)
        self.committed.append(response.id)

    async def delete(self, principal: str, response_id: str) -> bool:
        if await self.get(principal, response_id) is None:
            return False
        del self.rows[response_id]
        return True

    async def by_idempotency_key(self, principal: str, key: str) -> StoredResponse | None:
        return next((r for r in self.rows.values() if r.principal == principal and r.idempotency_key == key), None)

    async def stored_bytes(self, principal: str) -> int:
        return sum(len(r.body) for r in self.rows.values() if r.principal == principal)

    async def begin_background(self, principal: str, body: ResponseBody) -> None:
        if self.background_fails is not None:
            raise self.background_fails
        self.background[body.id] = (principal, body)

    async def fail_background(self, body: ResponseBody) -> None:
        self.background[body.id] = (self.background[body.id][0], body)

    async def in_background(self, principal: str, response_id: str) -> ResponseBody | None:
        owner, body = self.background.get(response_id, ("", None))
        return body if owner == principal else None

    async def kept_sessions(self, principal: str, ids: Sequence[str]) -> frozenset[str]:
        return frozenset([an_id for an_id in ids if await self.session(principal, an_id) is not None])

    async def sessions(self, principal: str, limit: int, after: str | None) -> tuple[SessionRow, ...]:
        names = list(dict.fromkeys(r.session for r in self.rows.values() if r.principal == principal))
        start = names.index(after) + 1 if after in names else 0
        rows = [await self.session(principal, name) for name in names[start : start + limit]]
        return tuple(r for r in rows if r is not None)

    async def session(self, principal: str, session_id: str) -> SessionRow | None:
        turns = [r for r in self.rows.values() if r.principal == principal and r.session == session_id]
        if not turns:
            return None
        return SessionRow(
            id=session_id,
            created_at=int(turns[0].created_at),
            updated_at=int(turns[-1].completed_at),
            turns=len(turns),
            last_response=turns[-1].id,
            context_tokens=len(turns[-1].prompt_ids) // 4,
            lineage=tuple(t.id for t in turns),
        )

    async def delete_session(self, principal: str, session_id: str) -> bool:
        gone = [r.id for r in self.rows.values() if r.principal == principal and r.session == session_id]
        for response_id in gone:
            del self.rows[response_id]
        return bool(gone)
