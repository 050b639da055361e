"""The directory of a namespace while a process uses it: claimed, described, and made again when somebody has deleted it.

Knows the directory and what says of it that it is ours; which states lay in it is for the cache to draw the consequences of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from statecache.directory import Claim, claim, describe
from statecache.errors import TierFailed
from statecache.types import Layout

SETTLE_S = 5.0
"""Between finding a directory deleted and making it again: whoever deletes more around it should be done by then."""


class Place:
    """See the module. path: of the namespace, in the directory of all of them. The others: see directory.describe()."""

    def __init__(
        self,
        path: Path,
        namespace: bytes,
        model: str,
        layout: Layout,
        worker: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._clock = clock
        self._missed_at: float | None = None
        self._described = (namespace, model, layout, worker)
        self._claim: Claim | None = None

    def open(self, wait_s: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Claim and describe it. Raises TierFailed, OSError."""
        self._claim, before = claim(self.path, wait_s=wait_s, waiting=waiting), self._claim
        if before is not None:
            before.release()
        describe(self.path, *self._described)

    def look(self) -> bool:
        """False if it was deleted, emptied or replaced, and is made again now.

        It is not made while what it lay in is gone too: whoever took that away may put it back. Raises TierFailed while it
        is not ours.
        """
        if self._claim is None or self._claim.holds():
            self._missed_at = None
            return True
        above, now = self.path.parent.parent, self._clock()
        if not above.is_dir():
            raise TierFailed(f"{above} was deleted; put it back, or restart the server")
        self._missed_at = now if self._missed_at is None else self._missed_at
        if now < self._missed_at + SETTLE_S:
            raise TierFailed(f"{self.path} was deleted or replaced; it is made again soon")
        try:
            self.open(0.0)
        except OSError as error:
            raise TierFailed(f"{self.path}: {error.strerror}") from error
        self._missed_at = None
        return False

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
