"""Held states on their way to the host: what is being copied stays referenced until it is there.

A copy never makes a step wait: it is begun between two of them, or while the device computes one, and looked at again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.device.base import Moment


@dataclass(frozen=True, slots=True)
class Copied:
    """On the host. kv: uint8 [tokens, token_bytes] each, in order; state: {ROW: uint8 [state_bytes]}, see
    StateLayout.split, or {}; logits: as in StateSnapshot. Read-only."""

    kv: tuple[np.ndarray, ...] = ()
    state: Mapping[str, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray | None = None


class Leaving:
    """One copy. moment: when it is over, None = it is. sources: what it reads, given up by let_go(sources) whatever came of
    it."""

    def __init__(
        self,
        copied: Copied,
        moment: Moment | None = None,
        sources: Any = None,
        let_go: Callable[[Any], None] = lambda sources: None,
    ) -> None:
        self.sources = sources
        self._copied, self._moment, self._let_go = copied, moment, let_go
        self._error: Exception | None = None
        self._over = moment is None

    @property
    def done(self) -> bool:
        """Whether result() will not wait. Does not wait itself."""
        if not self._over and self._moment is not None:
            try:
                if self._moment.reached():
                    self._end()
            except Exception as error:
                self._error = error
                self._end()
        return self._over

    def result(self) -> Copied:
        """Waits. Raises DeviceError if the device failed; what was to be written then is anything."""
        if not self._over and self._moment is not None:
            try:
                self._moment.wait()
            except Exception as error:
                self._error = error
            self._end()
        if self._error is not None:
            raise self._error
        return self._copied

    def _end(self) -> None:
        self._over, self._moment = True, None
        sources, self.sources = self.sources, None
        self._let_go(sources)


class Departures:
    """All copies under way, for whoever has to wait for them."""

    def __init__(self) -> None:
        self._all: deque[Leaving] = deque()

    def add(self, leaving: Leaving) -> Leaving:
        if not leaving.done:
            self._all.append(leaving)
        return leaving

    def look(self) -> None:
        """Let go of what is over. Copies end in the order in which they began."""
        while self._all and self._all[0].done:
            self._all.popleft()

    def settle(self) -> bool:
        """Wait for all of it; what failed is told to those who asked for it. False: there was nothing."""
        waited = bool(self._all)
        while self._all:
            with suppress(Exception):
                self._all.popleft().result()
        return waited

    def sources(self) -> list[Any]:
        """What is referred to now."""
        return [leaving.sources for leaving in self._all if leaving.sources is not None]
