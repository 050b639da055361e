"""An engine without a model: state is a digest of the tokens it has seen, so that a wrong restore cannot pass unseen.

Follows the contract of engine/types.py: chunks, cuts, holds, cancel, one token per step and request. The next token of a
greedy turn is a function of the whole prefix, `next_token`. `fail_at` raises at the n-th call of a method, `nan` spoils one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.errors import ContextTooLong, EngineError, SnapshotMismatch, UnknownHold, Unsupported
from engine.kvcache.leaving import Copied, Leaving
from engine.types import (
    ROW,
    CutReached,
    EngineEvent,
    EngineStats,
    Finished,
    HeldState,
    HoldId,
    MemoryReport,
    ModelInfo,
    PrefillProgress,
    Request,
    Room,
    StateComponent,
    StateLayout,
    StateSnapshot,
    TokenEvent,
)

VOCAB = 64
EOS = 1
KV_BYTES = 8
LAYOUT = StateLayout(KV_BYTES, (StateComponent("layer.0.delta", "float32", (8,), 32),), VOCAB)


def state_of(tokens: Sequence[int]) -> np.ndarray:
    """uint8 [32]: the recurrent state after exactly these tokens."""
    return np.frombuffer(hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).digest(), np.uint8)


def kv_row(position: int, token: int) -> np.ndarray:
    """uint8 [KV_BYTES]: keys and values of one token."""
    return np.array([position, token], "<u4").view(np.uint8)


def next_token(tokens: Sequence[int]) -> int:
    """The greedy continuation; ids 2…, so never EOS (turns end by max_tokens or by `script`)."""
    return 2 + int(state_of(tokens)[0]) % (VOCAB - 2)


@dataclass
class _Run:
    request: Request
    tokens: list[int]
    processed: int = 0
    output: int = 0
    cuts: set[int] = field(default_factory=set)
    admitted: bool = False


class FakeEngine:
    """script: tokens to generate by request id, instead of next_token. chunk: prompt tokens per step."""

    def __init__(self, *, chunk: int = 16, max_context: int = 4096, rows: int = 2) -> None:
        self.chunk = chunk
        self.rows = rows
        self.script: defaultdict[str, deque[int]] = defaultdict(deque)
        self.calls: dict[str, int] = {}
        self.fail_at: tuple[str, int] | None = None
        self.nan: set[str] = set()
        self.holds: dict[HoldId, list[int]] = {}
        self.reclaim: Callable[[int], int] | None = None
        self.short = False
        self._ids = iter(range(1, 1 << 30))
        self._runs: dict[str, _Run] = {}
        self._pending: list[EngineEvent] = []
        self.info = ModelInfo("fake", VOCAB, (EOS,), max_context, 1, 1, "float32", "fake", "0" * 64)
        self.layout = LAYOUT

    def _call(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.fail_at == (name, self.calls[name]):
            raise EngineError(f"injected into {name}")

    @property
    def has_work(self) -> bool:
        return bool(self._runs or self._pending)

    def submit(self, request: Request) -> None:
        self._call("submit")
        tokens = [int(t) for t in request.token_ids]
        if len(tokens) + 1 > self.info.max_context:
            raise ContextTooLong(len(tokens), self.info.max_context)
        run = _Run(request, tokens, cuts=set(request.cuts))
        restore = request.restore
        if isinstance(restore, StateSnapshot):
            self._check(restore, tokens)
            run.processed = restore.position
        elif restore is not None:
            held = self._get(restore)
            if held != tokens[: len(held)]:
                raise SnapshotMismatch("the hold is of other tokens")
            run.processed = len(held)
        self._runs[request.id] = run

    def _check(self, snapshot: StateSnapshot, tokens: list[int]) -> None:
        prefix = tokens[: snapshot.position]
        if snapshot.state["layer.0.delta"].tobytes() != state_of(prefix).tobytes():
            raise SnapshotMismatch("state is not that of the prefix")
        rows = np.concatenate([run.rows for run in snapshot.kv])
        wanted = np.stack([kv_row(i, t) for i, t in enumerate(prefix)])
        if rows.tobytes() != wanted.tobytes():
            raise SnapshotMismatch("KV rows are not those of the prefix")
        if snapshot.position == len(tokens) and snapshot.logits is None:
            raise SnapshotMismatch("a whole prefix needs logits")

    def declare_cut(self, request_id: str, position: int) -> None:
        self._call("declare_cut")
        run = self._runs.get(request_id)
        if run is None:
            raise EngineError("a request that is queued or running")
        if position < run.processed:
            raise EngineError(f"position {position} has passed")
        run.cuts.add(position)

    def cancel(self, request_id: str, hold: bool = False) -> None:
        self._call("cancel")
        run = self._runs.pop(request_id, None)
        if run is None:
            return
        if hold and run.admitted and run.processed:
            self._pending.append(self._hold(run))
        self._pending.append(Finished(request_id, "cancelled", len(run.request.token_ids), run.output))

    def _hold(self, run: _Run) -> CutReached:
        hold = HoldId(next(self._ids))
        self.holds[hold] = run.tokens[: run.processed]
        return CutReached(run.request.id, run.processed, hold)

    def step(self) -> Sequence[EngineEvent]:
        self._call("step")
        events, self._pending = self._pending, []
        for run in list(self._runs.values())[: self.rows]:
            run.admitted = True
            self._advance(run, events)
        return events

    def _advance(self, run: _Run, events: list[EngineEvent]) -> None:
        request, n = run.request, len(run.request.token_ids)
        if run.output and run.processed in run.cuts:  # declared for the place where the state is
            run.cuts.discard(run.processed)
            events.append(self._hold(run))
        if run.processed < n:
            until = min(n, run.processed + self.chunk)
            for position in sorted(p for p in run.cuts if run.processed < p <= until):
                run.processed = position
                run.cuts.discard(position)
                events.append(self._hold(run))
            run.processed = until
            events.append(PrefillProgress(request.id, until, n))
            if until < n:
                return
            if request.id in self.nan:
                self._end(run, "error", events, "NaN in the logits")
                return
            if request.sampling.max_tokens == 0:
                self._end(run, "length", events)
                return
        elif run.output:
            run.processed += 1
            if run.processed in run.cuts:
                run.cuts.discard(run.processed)
                events.append(self._hold(run))
        script = self.script.get(request.id)
        token = script.popleft() if script else next_token(run.tokens)
        run.tokens.append(token)
        events.append(TokenEvent(request.id, token, run.output))
        run.output += 1
        if token in request.sampling.stop_token_ids:
            self._end(run, "stop", events)
        elif run.output >= request.sampling.max_tokens:
            self._end(run, "length", events)

    def _end(self, run: _Run, reason: str, events: list[EngineEvent], error: str | None = None) -> None:
        if run.request.hold_at_end and reason != "error":
            events.append(self._hold(run))
        finished = Finished(run.request.id, reason, len(run.request.token_ids), run.output, error)  # pyright: ignore[reportArgumentType]
        events.append(finished)
        del self._runs[run.request.id]

    def release(self, hold: HoldId) -> None:
        if self.holds.pop(hold, None) is None:
            raise UnknownHold(hold)

    def _get(self, hold: HoldId) -> list[int]:
        if hold not in self.holds:
            raise UnknownHold(hold)
        return self.holds[hold]

    def held(self, hold: HoldId) -> HeldState:
        tokens = self._get(hold)
        return HeldState(len(tokens), np.asarray(tokens, np.int64), True)

    @property
    def room(self) -> Room:
        return Room(0 if self.short else 8, 8, 8, 8, KV_BYTES, LAYOUT.state_bytes)

    @property
    def held_bytes(self) -> int:
        return sum(self.own_bytes(hold) for hold in self.holds)

    def own_bytes(self, hold: HoldId) -> int:
        return len(self._get(hold)) * KV_BYTES + LAYOUT.state_bytes

    def copy_kv(self, hold: HoldId, start: int, stop: int, each: int = 0) -> Leaving:
        self._call("copy_kv")
        tokens = self._get(hold)
        edges = range(start, stop, each or max(1, stop - start))
        return Leaving(Copied(tuple(_rows(tokens, first, min(stop, first + (each or stop))) for first in edges)))

    def copy_rest(self, hold: HoldId, start: int) -> Leaving:
        self._call("copy_rest")
        tokens = self._get(hold)
        kv = (_rows(tokens, start, len(tokens)),) if start < len(tokens) else ()
        logits = np.full(VOCAB, float(next_token(tokens)), np.float32)
        return Leaving(Copied(kv, {ROW: state_of(tokens).copy()}, logits))

    def settle(self) -> None:
        pass

    def set_beside(self, callback: Callable[[], None]) -> None:
        pass

    def set_reclaim(self, callback: Callable[[int], int]) -> None:
        self.reclaim = callback

    def set_token_bytes(self, table: Mapping[int, bytes] | Sequence[bytes]) -> None:
        self.token_bytes = table

    @property
    def memory(self) -> MemoryReport | None:
        return None

    def resize_experts(self, slots: int) -> None:
        raise Unsupported(f"expert slots: got {slots}, and there are none")

    def tend_memory(self) -> None:
        pass

    def stats(self) -> EngineStats:
        runs = list(self._runs.values())
        waiting = runs[self.rows :]
        return EngineStats(
            running=len(runs) - len(waiting),
            waiting=len(waiting),
            waiting_prefill_tokens=sum(len(r.request.token_ids) - r.processed for r in waiting),
            free_pages=0,
            total_pages=0,
            free_rows=0,
            total_rows=self.rows,
            held=len(self.holds),
            prefill_tokens=0,
            decode_tokens=0,
            prefill_seconds=0.0,
            decode_seconds=0.0,
        )


def _rows(tokens: Sequence[int], start: int, stop: int) -> np.ndarray:
    return np.stack([kv_row(i, tokens[i]) for i in range(start, stop)])
