"""What the state cache costs a turn: finding a checkpoint, naming new tokens, memory of the index, saving.

    python -m benchmarks.cache_cost [--checkpoints 10000] [--rounds 24] [--record]

Processor time, so that other work on the machine matters little. Matches: contexts of 100,000 tokens whose paths are known,
among that many checkpoints of 100 sessions with one system prompt. Saving: the demo model plays the same turn twice in each
round, once with nothing saved; the difference, with all copies that were put off, ÷ the time in which it decoded. The time
inside the calls that save is counted beside it, because it is a small difference of large numbers.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentserve.protocol.items import InputText, Message, OutputText
from benchmarks.common import report, spread
from benchmarks.in_process import Server
from benchmarks.traces.compose import DEMO_MODEL
from statecache.index.radix import RadixIndex
from statecache.keys import KEY_BYTES, KeyChain, block_keys, token_bytes
from statecache.store import StateCache
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind, KvRun, Layout, Payload

SESSIONS, TOKENS, SYSTEM = 100, 100_000, 4_000
NEW = 2_048
"""Tokens that a turn adds, in the row about hashing."""
LAYOUT = Layout(1, (), 1)
SALT = b"s" * 32
ANSWER = "The lamp in the old house by the river is green, and it costs forty two coins today. "


def contexts() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    system = random.integers(0, 50_000, SYSTEM)
    return [np.concatenate([system, random.integers(0, 50_000, TOKENS - SYSTEM)]).astype(np.int32) for _ in range(SESSIONS)]


def finding(checkpoints: int) -> dict[str, Any]:
    """Milliseconds a call."""
    cache = StateCache(b"n" * 32, LAYOUT, tiers=[RamTier(1 << 40)], index=RadixIndex())
    paths = contexts()
    step = SESSIONS * (TOKENS - SYSTEM) // checkpoints
    for tokens in paths:
        for position in range(SYSTEM + step, TOKENS + 1, step):
            start = cache.kv_missing_from(tokens, SALT, position)
            rows = np.zeros((position - start, 1), np.uint8)
            cache.put(tokens, SALT, Boundary(position, BoundaryKind.TURN), Payload(position, (KvRun(start, rows),), {}))
    found: list[float] = []
    for tokens in paths:
        asked = np.append(tokens, 1).astype(np.int32)
        began = time.thread_time()
        match = cache.match(asked, SALT)
        found.append(1e3 * (time.thread_time() - began))
        assert match.position == TOKENS
        match.release()
    hashed: list[float] = []
    known = b"".join(block_keys(b"n" * 32, SALT, paths[0]))
    known = known[: (TOKENS - NEW) // 64 * KEY_BYTES]
    for tokens in paths:
        new = token_bytes(tokens[-NEW:])
        began = time.thread_time()
        KeyChain(b"n" * 32, SALT, known=known).extend(new)
        hashed.append(1e3 * (time.thread_time() - began))
    return {"checkpoints": cache.stats().checkpoints, "match_ms": spread(found), "hash_new_tokens_ms": spread(hashed)}


def index_bytes(checkpoints: int) -> float:
    """Bytes of the index per checkpoint, without the token ids themselves."""
    paths = [(token_bytes(tokens), b"".join(block_keys(b"n" * 32, SALT, tokens))) for tokens in contexts()]
    step = SESSIONS * (TOKENS - SYSTEM) // checkpoints
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = RadixIndex()
    for number, (ids, keys) in enumerate(paths):
        for position in range(SYSTEM + step, TOKENS + 1, step):
            index.add(SALT, ids[: 4 * position], keys[: position // 64 * KEY_BYTES], f"{number:016x}{position:016x}")
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return (taken - 4 * index.tokens) / len(index)


def saving(rounds: int) -> dict[str, Any]:
    """Of the demo model, one thread: shares of the processor time that its decoding takes."""
    servers = {True: Server(DEMO_MODEL, DEMO_MODEL), False: Server(DEMO_MODEL, DEMO_MODEL)}
    silent = servers[False].bridge
    silent.plan_cuts = lambda turn, after: ()  # pyright: ignore[reportAttributeAccessIssue]
    silent.generated = lambda turn, token: None  # pyright: ignore[reportAttributeAccessIssue]
    silent.save = lambda turn, cut: silent.release(cut.hold)  # pyright: ignore[reportAttributeAccessIssue]
    inside = _timed(servers[True].bridge, ("plan_cuts", "generated", "save", "close", "chore", "drain"))
    calls: list[float] = []
    spent: dict[bool, list[float]] = {True: [], False: []}
    decoding: list[float] = []
    placed = 0
    for number in range(rounds + 2):
        for saves in (True, False) if number % 2 else (False, True):
            server = servers[saves]
            ask = Message(role="user", content=(InputText(f"{number}: " + ANSWER * 12),))
            say = Message(role="assistant", content=(OutputText(ANSWER * 8),))
            marks: list[float] = []
            real = server.loop.step

            def step(real: Any = real, marks: list[float] = marks, server: Server = server) -> bool:
                ended = real()
                if server.told.logits and not marks:
                    marks.append(time.process_time())
                return ended

            server.loop.step = step  # pyright: ignore[reportAttributeAccessIssue]
            inside.clear()
            began = time.process_time()
            server.turn([ask], [say], instructions=f"{number}")
            server.bridge.drain(60.0, everything=True)
            ended = time.process_time()
            server.loop.step = real  # pyright: ignore[reportAttributeAccessIssue]
            if number >= 2:
                spent[saves].append(ended - began)
                calls += [sum(inside)] * saves
                if not saves:
                    decoding.append(ended - marks[0])
    placed = servers[True].states.cache.stats().checkpoints
    for server in servers.values():
        server.close()
    shares = [(a - b) / d for a, b, d in zip(spent[True], spent[False], decoding, strict=True)]
    counted = [a / d for a, d in zip(calls, decoding, strict=True)]
    return {
        "share_of_decode": spread(shares),
        "inside_calls_of_decode": spread(counted),
        "checkpoints_a_turn": round(placed / (rounds + 2), 1),
    }


def _timed(target: object, names: Sequence[str]) -> list[float]:
    """Processor seconds of each call of these methods from now on; none of them calls another."""
    seconds: list[float] = []

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                seconds.append(time.thread_time() - began)

        return timed

    for name in names:
        setattr(target, name, wrap(getattr(target, name)))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    figures = finding(options.checkpoints)
    figures["index_bytes_a_checkpoint"] = round(index_bytes(options.checkpoints), 1)
    figures["saving"] = saving(options.rounds)
    workload = {"checkpoints": options.checkpoints, "context": TOKENS, "new_tokens": NEW, "rounds": options.rounds}
    report("cache_cost", f"index alone, and {Path(DEMO_MODEL).name}", workload, figures, options.record)


if __name__ == "__main__":
    main()
