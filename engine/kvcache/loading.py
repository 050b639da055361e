"""A saved state on its way from the host into pages and a row, in pieces, so that no step of the engine waits for all of it."""

from __future__ import annotations

import numpy as np

from engine.kvcache.store import NO_ROW, StateStore
from engine.types import KvRun, StateSnapshot


class Loading:
    """One snapshot, already checked, and where it goes. Owns neither pages nor row.

    pages: int32, at least as many as the snapshot's tokens need. done: everything is there.
    """

    def __init__(self, store: StateStore, snapshot: StateSnapshot, pages: np.ndarray, row: int) -> None:
        self.snapshot = snapshot
        self.done = False
        self._store = store
        self._pages = pages.copy()  # the table may move while it grows
        self._row = row
        self._runs = list(snapshot.kv)[::-1]
        """What is left, last first."""
        self._components = [] if row == NO_ROW else list(snapshot.state)[::-1]

    def rename(self, renamed: np.ndarray) -> None:
        """Pages have moved: renamed[old id] is the new one."""
        self._pages = renamed[self._pages]

    def advance(self, limit: int) -> int:
        """Copy about `limit` bytes (> 0), at least one token or component; bytes copied."""
        copied = 0
        if self._runs:
            start, part = self._runs[-1].start, list[np.ndarray]()
            while self._runs and copied < limit:
                run = self._runs.pop()
                tokens = max(1, (limit - copied) // max(1, run.rows.shape[1]))
                if tokens < len(run.rows):
                    self._runs.append(KvRun(run.start + tokens, run.rows[tokens:]))
                part.append(run.rows[:tokens])
                copied += part[-1].nbytes
            self._store.kv.write_all(self._pages, start, part)
        while self._components and copied < limit and not self._runs:
            name = self._components.pop()
            self._store.states.write(self._row, name, self.snapshot.state[name])
            copied += self.snapshot.state[name].nbytes
        self.done = not self._runs and not self._components
        return copied
