"""Telling the worker whose turn comes next, so that its state is in memory by then. Best effort: it never fails a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from agentserve.errors import ApiError
from agentserve.events import new_id
from agentserve.interfaces import Principal, Store, StoredResponse, Worker
from agentserve.request import header_session
from agentserve.served import Served
from agentserve.session_ids import named_session

log = logging.getLogger(__name__)


class Expectation:
    """Of one socket: what it said when it connected, or first, about where its client goes on. Close it with the socket."""

    def __init__(self, store: Store, models: Sequence[Served], principal: Principal) -> None:
        self._store = store
        self._models = models
        self._principal = principal
        self._key = new_id("expect")
        self._task: asyncio.Task[None] | None = None
        self._told: Worker | None = None

    def connected(self, headers: Mapping[str, str]) -> None:
        """Names of sessions in the headers of the handshake."""
        hint = header_session(headers)
        if hint is not None:
            self._begin(partial(self._last_of, named_session(self._principal.id, hint)))

    def goes_on(self, response_id: str | None) -> None:
        """The first turn goes on from this response; later ones follow what was just computed."""
        if response_id is not None and self._task is None:
            self._begin(partial(self._store.get, self._principal.id, response_id))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._told is not None:
            self._told.unexpect(self._key)

    async def _last_of(self, session: str) -> StoredResponse | None:
        row = await self._store.session(self._principal.id, session)
        return (
            None if row is None or row.last_response is None else await self._store.get(self._principal.id, row.last_response)
        )

    def _begin(self, find: Callable[[], Awaitable[StoredResponse | None]]) -> None:
        self._task = asyncio.create_task(self._tell(find), name="expectation")

    async def _tell(self, find: Callable[[], Awaitable[StoredResponse | None]]) -> None:
        """find: called here, since a socket that closes first ends this before it begins."""
        try:
            found = await find()
        except ApiError as error:
            log.debug("nothing expected code=%s", error.code)
            return
        model = None if found is None else next((m for m in self._models if m.name == found.model), None)
        if found is not None and model is not None:
            self._told = model.worker
            model.worker.expect(self._key, found.prompt_ids + found.generated_ids, self._principal.salt, found.session)
