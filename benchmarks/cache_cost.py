"""What the state cache costs a turn: finding a checkpoint, naming new tokens, memory of the index, saving.

    python -m benchmarks.cache_cost [--checkpoints 10000] [--rounds 40] [--only saving] [--record]

Processor time, so that other work on the machine matters little. Matches: contexts of 100,000 tokens whose paths are known,
among that many checkpoints of 100 sessions with one system prompt. Saving, to memory and disk: the demo model plays four short
turns in each round, two of them with nothing saved, in the order A B B A and B A A B by turns. Two shares of the time in which
it decoded, each as the median over rounds with a 95% interval (bootstrap): the difference between the two kinds of turns, which
counts everything and is a small difference of large numbers; and what is counted as saving itself by the clocks of its threads,
which leaves out what a pass does to keep a state, and stands on a busy machine too.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
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
WARM_UP = 2
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


class Saver:
    """One server that saves in every other turn, or rather in turns 1 and 4 of four, so that drift cancels."""

    def __init__(self, state_dir: Path) -> None:
        self._server = server = Server(DEMO_MODEL, DEMO_MODEL, state_dir=state_dir)
        self.saves = True
        bridge = server.bridge
        for name, silent in (
            ("plan_cuts", lambda turn, after: ()),
            ("generated", lambda turn, token: None),
            ("save", lambda turn, cut: bridge.release(cut.hold)),
        ):
            setattr(bridge, name, self._either(getattr(bridge, name), silent))
        self._inside = _timed(bridge, ("plan_cuts", "generated", "save", "close", "chore", "drain"))
        self._serial = 0
        self.checkpoints = 0

    def _either(self, real: Callable[..., Any], silent: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (real if self.saves else silent)(*arguments)

    def turn(self, saves: bool, number: int) -> tuple[float, float, float]:
        """Processor seconds of a turn with all that was put off: (of the process, of decoding, counted as saving).

        number: turns of the same one are as long as each other and share nothing.
        """
        server, self.saves = self._server, saves
        self._serial += 1
        ask = Message(role="user", content=(InputText(f"{self._serial:06d}: " + ANSWER * (10 + number % 4)),))
        say = Message(role="assistant", content=(OutputText(ANSWER * 8),))
        first_token: list[float] = []
        real = server.loop.step

        def step() -> bool:
            ended = real()
            if server.told.logits and not first_token:
                first_token.append(time.process_time())
            return ended

        server.loop.step = step  # pyright: ignore[reportAttributeAccessIssue]
        self._inside.clear()
        before = server.states.cache.stats().checkpoints
        gc.collect()
        gc.disable()
        began, here = time.process_time(), time.thread_time()
        server.turn([ask], [say], instructions=f"{self._serial:06d}")
        decoded = time.process_time()
        server.bridge.drain(60.0, everything=False)
        assert server.states.writer is not None
        while not server.states.writer.flush(60.0):
            pass
        ended, elsewhere = time.process_time(), time.thread_time() - here
        gc.enable()
        server.loop.step = real  # pyright: ignore[reportAttributeAccessIssue]
        self.checkpoints += server.states.cache.stats().checkpoints - before
        # The engine computes in this thread, so whatever others used was used for writing.
        return ended - began, decoded - first_token[0], sum(self._inside) + (ended - began - elsewhere)

    def close(self) -> None:
        self._server.close()


def saving(rounds: int) -> dict[str, Any]:
    """Of the demo model, one thread: shares of the processor time that its decoding takes."""
    paired: list[float] = []
    counted: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder))
        for number in range(-WARM_UP, rounds):
            total: dict[bool, list[float]] = {True: [], False: []}
            decoding: list[float] = []
            inside: list[float] = []
            for saves in (True, False, False, True) if number % 2 else (False, True, True, False):
                spent, decoded, own = saver.turn(saves, number)
                total[saves].append(spent)
                decoding += [decoded] * (not saves)
                inside += [own] * saves
            if number >= 0:
                paired.append((sum(total[True]) - sum(total[False])) / sum(decoding))
                counted.append(sum(inside) / sum(decoding))
        checkpoints = saver.checkpoints / (2 * (rounds + WARM_UP))
        saver.close()
    return {
        "share_of_decode": spread(paired) | {"interval": interval(paired)},
        "counted_of_decode": spread(counted) | {"interval": interval(counted)},
        "checkpoints_a_turn": round(checkpoints, 1),
    }


def interval(values: Sequence[float], draws: int = 4_000) -> tuple[float, float]:
    """Where the median lies with 95%, by resampling."""
    random = np.random.default_rng(0)
    medians = np.median(random.choice(np.asarray(values), (draws, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return round(float(low), 5), round(float(high), 5)


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
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=("finding", "saving"), default=None)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if options.only != "saving":
        figures |= finding(options.checkpoints)
        figures["index_bytes_a_checkpoint"] = round(index_bytes(options.checkpoints), 1)
    if options.only != "finding":
        figures["saving"] = saving(options.rounds)
    workload = {"checkpoints": options.checkpoints, "context": TOKENS, "new_tokens": NEW, "rounds": options.rounds}
    report("cache_cost", f"index alone, and {Path(DEMO_MODEL).name}", workload, figures, options.record)


if __name__ == "__main__":
    main()
