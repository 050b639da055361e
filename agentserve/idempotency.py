"""One key, one response: who comes with a key that is in use follows the turn that runs under it, or gets what it became."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentserve.errors import IdempotencyConflict
from agentserve.interfaces import Store, StoredResponse
from agentserve.request import TurnRequest

if TYPE_CHECKING:
    from agentserve.turn import Turn

CONFLICT = "this idempotency key was used for another request"


@dataclass(slots=True)
class _Claim:
    digest: bytes
    turn: asyncio.Future[Turn | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Claims:
    """Keys of turns that have not ended, each with its principal."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], _Claim] = {}

    async def claim(self, request: TurnRequest) -> Turn | None:
        """The turn that runs under the request's key. None: there is none, and whoever asks must `settle`.

        Raises IdempotencyConflict if the key is in use for another request.
        """
        key = _key(request)
        while key is not None:
            claim = self._claims.get(key)
            if claim is None:
                self._claims[key] = _Claim(request.digest)
                return None
            if claim.digest != request.digest:
                raise IdempotencyConflict(CONFLICT, "idempotency_key")
            turn = await asyncio.shield(claim.turn)
            if turn is not None:
                return turn
        return None

    def settle(self, request: TurnRequest, turn: Turn | None) -> None:
        """The claim became this turn, or none: then the key is free."""
        key = _key(request)
        if key is not None and (claim := self._claims.get(key)) is not None:
            claim.turn.set_result(turn)
            if turn is None:
                del self._claims[key]

    def release(self, request: TurnRequest) -> None:
        """The turn has ended; if it was stored, the store knows its key."""
        key = _key(request)
        if key is not None:
            self._claims.pop(key, None)


async def known_answer(request: TurnRequest, store: Store) -> StoredResponse | None:
    """The stored response of this request's key, None if it is new.

    Raises IdempotencyConflict if it was for another request.
    """
    if request.idempotency_key is None:
        return None
    known = await store.by_idempotency_key(request.principal.id, request.idempotency_key)
    if known is not None and known.request_digest != request.digest:
        raise IdempotencyConflict(CONFLICT, "idempotency_key")
    return known


def _key(request: TurnRequest) -> tuple[str, str] | None:
    return None if request.idempotency_key is None else (request.principal.id, request.idempotency_key)
