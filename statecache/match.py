"""What a match hands out: a checkpoint that stays until it is given back. The store that made it does the work."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import numpy as np

from statecache.checkpoint import Record
from statecache.device import Resident
from statecache.types import BoundaryKind, Divergence, Payload, TierName


class Owner(Protocol):
    """The store, as its matches see it."""

    def read_match(self, match: Match, kv_out: np.ndarray | None, stop: Callable[[], bool] | None) -> Payload: ...
    def release_match(self, match: Match) -> None: ...


class Match:
    """The longest usable checkpoint of a context, pinned until release(). A context manager.

    position 0: nothing was found (checkpoint_id, kind and tier are None). read() may lower `position` and replace the other
    fields when the checkpoint turns out bad. Use one Match from one thread.
    """

    def __init__(self, owner: Owner, ids: bytes, salt: bytes, session: str, divergence: Divergence) -> None:
        self._owner = owner
        self.ids = ids
        self.salt = salt
        self.session = session
        self.record: Record | None = None
        self.resident: Resident | None = None
        """Where it is when it lies in the engine's pools: restore from its hold, nothing needs to be read."""
        self.divergence = divergence
        self.position = 0
        self.checkpoint_id: str | None = None
        self.kind: BoundaryKind | None = None
        self.tier: TierName | None = None
        self.nbytes = 0
        """Bytes that a restore copies; 0 on the device."""

    def read(self, kv_out: np.ndarray | None = None, *, stop: Callable[[], bool] | None = None) -> Payload:
        """The checkpoint's bytes, verified. Arrays are read-only and valid after release().

        kv_out: uint8 [≥ position, kv_token_bytes] to read the KV rows into; the payload then has one run, a view of it. Without
        it there is one run per stored extent. A bad component quarantines the checkpoint and the next shorter one is read
        instead; when none is left the payload is empty at position 0. So look at `payload.position`.

        stop: for threads other than the engine's. Asked between segments; once it says True ReadStopped is raised. A shorter
        checkpoint in the engine's pools is not read there: the payload is empty and `resident` says where it is.
        """
        return self._owner.read_match(self, kv_out, stop)

    def release(self) -> None:
        """Unpin. Does nothing the second time."""
        self._owner.release_match(self)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
