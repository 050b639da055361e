"""An engine that says what was recorded. Its states are digests of the tokens before them: a wrong restore stops the replay.

One request at a time. KV of a token: its position and id; recurrent state: SHA-256 of all ids so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.traces.tiers import KV_BYTES
from engine.errors import InvalidRequest, UnknownHold
from engine.kvcache.leaving import Copied, Leaving
from engine.types import (
    ROW,
    CutReached,
    EngineEvent,
    EngineStats,
    Finished,
    HeldState,
    HoldId,
    ModelInfo,
    PrefillProgress,
    Request,
    Room,
    StateComponent,
    StateLayout,
    StateSnapshot,
    TokenEvent,
)

STATE = "digest"
LAYOUT = StateLayout(KV_BYTES, (StateComponent(STATE, "uint8", (32,), 32),), 1)


def _rows(ids: np.ndarray, start: int) -> np.ndarray:
    """uint8 [len(ids) − start, 8]."""
    positions = np.arange(start, len(ids), dtype="<u4")
    return np.stack([positions, ids[start:].astype("<u4")], axis=1).view(np.uint8)


def _state(ids: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(ids.astype("<u4").tobytes()).digest(), np.uint8)


class RecordedEngine:
    """Implements EnginePort. script: what the next request will generate; set it before the turn starts."""

    def __init__(self, vocab_size: int, eos: tuple[int, ...]) -> None:
        self.info = ModelInfo("recorded", vocab_size, eos, 1 << 30, 1, 1, "uint8", "recorded", "0" * 64)
        self.layout = LAYOUT
        self.script: Sequence[int] = ()
        self.restores = 0
        self._request: Request | None = None
        self._ids = np.empty(0, np.uint32)
        self._computed = 0
        self._known = 0
        self._cuts: set[int] = set()
        self._holds: dict[HoldId, np.ndarray] = {}
        self._serial = 0

    @property
    def has_work(self) -> bool:
        return self._request is not None

    def submit(self, request: Request) -> None:
        if self._request is not None:
            raise InvalidRequest("id", request.id, "one request at a time")
        prompt = request.token_ids.astype(np.uint32)
        self._computed = 0
        if isinstance(request.restore, StateSnapshot):
            self._check(request.restore, prompt)
            self._computed = request.restore.position
            self.restores += 1
        self._request, self._known = request, len(prompt)
        self._ids = np.concatenate([prompt, np.array(self.script, np.uint32)])
        self._cuts = set(request.cuts)

    @staticmethod
    def _check(snapshot: StateSnapshot, prompt: np.ndarray) -> None:
        """AssertionError, which nothing catches, if the restored bytes are not those of the prompt."""
        prefix = prompt[: snapshot.position]
        rows = np.concatenate([run.rows for run in snapshot.kv])
        assert np.array_equal(rows, _rows(prefix, 0)), "restored KV is not that of the prompt"
        assert np.array_equal(snapshot.state[STATE], _state(prefix)), "restored state is not that of the prompt"
        assert snapshot.position < len(prompt) or snapshot.logits is not None, "a whole prompt was restored without logits"

    def declare_cut(self, request_id: str, position: int) -> None:
        if position < self._computed:
            raise InvalidRequest("position", position, f"{self._computed} or later")
        self._cuts.add(position)

    def step(self) -> list[EngineEvent]:
        """The whole prompt in one step, then one token a step."""
        request = self._request
        if request is None:
            return []
        events: list[EngineEvent] = []
        prompt = len(request.token_ids)
        generated = self._known - prompt
        if generated == 0:
            for position in sorted(p for p in self._cuts if self._computed < p <= prompt):
                events.append(self._hold(request.id, position))
            self._computed = prompt
            events.append(PrefillProgress(request.id, prompt, prompt))
        else:
            if self._computed in self._cuts and self._computed >= prompt:
                events.append(self._hold(request.id, self._computed))
            self._computed += 1
            if self._computed in self._cuts:
                events.append(self._hold(request.id, self._computed))
        token = int(self._ids[self._known])
        self._known += 1
        events.append(TokenEvent(request.id, token, generated))
        if self._known == len(self._ids):
            events.append(self._hold(request.id, self._computed))
            reason = "stop" if token in request.sampling.stop_token_ids else "length"
            events.append(Finished(request.id, reason, prompt, generated + 1))
            self._request = None
        return events

    def _hold(self, request_id: str, position: int) -> CutReached:
        self._cuts.discard(position)
        self._serial += 1
        hold = HoldId(self._serial)
        self._holds[hold] = self._ids[:position]
        return CutReached(request_id, position, hold)

    def copy_rest(self, hold: HoldId, start: int) -> Leaving:
        ids = self._holds.get(hold)
        if ids is None:
            raise UnknownHold(hold)
        kv = (_rows(ids, start),) if start < len(ids) else ()
        return Leaving(Copied(kv, {ROW: _state(ids)}, np.zeros(1, np.float32)))

    def settle(self) -> None:
        pass

    def set_beside(self, callback: Callable[[], None]) -> None:
        pass

    @property
    def room(self) -> Room:
        return Room(1, 1, 1, 1, KV_BYTES, LAYOUT.state_bytes)

    @property
    def held_bytes(self) -> int:
        return sum(self.own_bytes(hold) for hold in self._holds)

    def own_bytes(self, hold: HoldId) -> int:
        return len(self._holds[hold]) * KV_BYTES + LAYOUT.state_bytes

    def held(self, hold: HoldId) -> HeldState:
        return HeldState(len(self._holds[hold]), self._holds[hold].astype(np.int64), True)

    def copy_kv(self, hold: HoldId, start: int, stop: int, each: int = 0) -> Leaving:
        ids = self._holds[hold]
        edges = range(start, stop, each or max(1, stop - start))
        return Leaving(Copied(tuple(_rows(ids[: min(stop, first + (each or stop))], first) for first in edges)))

    def release(self, hold: HoldId) -> None:
        if self._holds.pop(hold, None) is None:
            raise UnknownHold(hold)

    def cancel(self, request_id: str, hold: bool = False) -> None:
        raise NotImplementedError("recorded turns run to their end")

    def set_reclaim(self, callback: Callable[[int], int]) -> None:
        pass

    def set_token_bytes(self, table: Mapping[int, bytes] | Sequence[bytes]) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(int(self.has_work), 0, 0, 0, 0, 0, 0, len(self._holds), 0, 0, 0.0, 0.0)
