"""What the state cache costs a turn: finding a checkpoint, naming new tokens, memory of the index, saving.

    python -m benchmarks.cache_cost [--checkpoints 10000] [--rounds 100] [--only saving] [--record]

Processor time, so that other work on the machine matters little. Matches: contexts of 100,000 tokens whose paths are known,
among that many checkpoints of 100 sessions with one system prompt.

Saving, to memory, disk and index: two servers with the demo model play the same short turn in each round, a few steps of one
and a few of the other by turns, so that whatever else the machine does meets both alike. One saves and one does not; halfway
they change places, since two engines of one process are not equally fast, and a round counts as the mean of itself and the
same one with places changed. Two shares of the time in which the one that does not save decodes, each as the median over such
rounds with a 95% interval (bootstrap). The difference of all that the two turns took, with what was put off: prefill, cuts and
what caches lost included. And what is counted as saving by the clocks of the calls and threads that save, less what the clocks
take, which the other server's calls that do nothing tell: it leaves out what a pass does to keep a state, and is steadier on a
busy machine.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
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
WARM_UP = 8
"""Rounds until the engine's pools are as full as they stay."""
STRETCH = 4
"""Steps of one server before the other's."""
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


class Lane:
    """One of two servers that play the same turns: with states saved, in the engine's pools, memory, on disk and in its index,
    or with nothing saved at all."""

    def __init__(self, state_dir: Path, *, saves: bool) -> None:
        self.server = Server(DEMO_MODEL, DEMO_MODEL, state_dir=state_dir, index=True)
        self.saves = saves
        self._written = threading.Event()
        self.server.states.on_written(self._written.set)
        bridge = self.server.bridge
        self.inside: list[float] = []
        """Processor seconds of each call that saves. Where nothing is saved, what the clocks themselves take."""
        self.server.engine.set_reclaim(self._timed(bridge._reclaim))  # pyright: ignore[reportPrivateUsage]
        instead: dict[str, Callable[..., Any]] = {
            "plan_cuts": lambda turn, after: (),
            "generated": lambda turn, token: None,
            "save": lambda turn, cut: bridge.release(cut.hold),
            "close": bridge.close,
        }
        for name, nothing in instead.items():
            setattr(bridge, name, self._timed(getattr(bridge, name), nothing))
        self._steps: Iterator[None] = iter(())
        self.spent = self.decoded = 0.0

    def save_no_more(self) -> None:
        """Nor hold anything in the engine's pools."""
        self.saves = False
        while self.server.states.cache.make_device_room(1):
            pass

    def begin(self, ask: Message, say: Message, instructions: str) -> None:
        self._steps = self.server.steps([ask], [say], instructions=instructions)
        next(self._steps)
        self.inside.clear()
        self.spent = self.decoded = 0.0

    def go(self) -> bool:
        """Some steps. False: the turn is over."""
        for _ in range(STRETCH):
            decodes = bool(self.server.told.logits)
            began = time.thread_time()
            try:
                next(self._steps)
            except StopIteration:
                return False
            took = time.thread_time() - began
            self.spent += took
            self.decoded += took * decodes
        return True

    def finish(self) -> None:
        """Do all that was put off."""
        states = self.server.states
        began = time.thread_time()
        self.server.bridge.drain(60.0, everything=False)
        self.inside.append(time.thread_time() - began)
        self.spent += self.inside[-1]
        written = not self.saves
        while not written:
            self._written.clear()
            states.want(())  # it says so again when nothing is left
            assert self._written.wait(60.0)
            written = not states.cache.stats().waiting

    def _timed(self, method: Callable[..., Any], nothing: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """None of them calls another. nothing: called where nothing is saved."""

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return (method if self.saves or nothing is None else nothing)(*arguments, **named)
            finally:
                self.inside.append(time.thread_time() - began)

        return timed


def message_pair(number: int) -> tuple[Message, Message]:
    """What is asked and answered in a round; no two of them share anything."""
    ask = Message(role="user", content=(InputText(f"{number:06d}: " + ANSWER * (10 + number % 4)),))
    return ask, Message(role="assistant", content=(OutputText(ANSWER * 8),))


def saving(rounds: int) -> dict[str, Any]:
    """Of the demo model, one thread: shares of the processor time that decoding takes where nothing is saved."""
    each = max(1, rounds // 2)
    with tempfile.TemporaryDirectory() as folder:
        one, other = Lane(Path(folder, "one"), saves=True), Lane(Path(folder, "other"), saves=False)
        shares = [rounds_of(one, other, each, 0)]
        checkpoints = one.server.states.cache.stats().checkpoints / (each + WARM_UP)
        one.save_no_more()
        other.saves = True
        shares.append(rounds_of(other, one, each, 500_000))
        for lane in (one, other):
            lane.server.close()
    paired, counted = np.mean(shares, axis=0).T.tolist()
    return {
        "share_of_decode": spread(paired) | {"interval": interval(paired)},
        "counted_of_decode": spread(counted) | {"interval": interval(counted)},
        "checkpoints_a_turn": round(checkpoints, 1),
    }


def rounds_of(saves: Lane, plain: Lane, count: int, first: int) -> list[tuple[float, float]]:
    """(difference of the two, counted) of each of `count` rounds, as shares."""
    lanes, shares = (saves, plain), list[tuple[float, float]]()
    elsewhere = time.process_time() - time.thread_time()
    for number in range(first - WARM_UP, first + count):
        gc.collect()
        gc.disable()
        for lane in lanes:
            lane.begin(*message_pair(number), f"{number:06d}")
        going, order = [True, True], number % 2
        while any(going):
            for which in (order, 1 - order):
                going[which] = going[which] and lanes[which].go()
            order = 1 - order
        for lane in lanes:
            lane.finish()
        # The engines compute in this thread, so whatever others used was used for writing.
        elsewhere, before = time.process_time() - time.thread_time(), elsewhere
        others = elsewhere - before
        gc.enable()
        if number >= first:  # others' from round to round, since rows of the index are written when several have come together
            difference = saves.spent + others - plain.spent
            counted = sum(saves.inside) + others - sum(plain.inside)
            shares.append((difference / plain.decoded, counted / plain.decoded))
    return shares


def interval(values: Sequence[float], draws: int = 4_000) -> tuple[float, float]:
    """Where the median lies with 95%, by resampling."""
    random = np.random.default_rng(0)
    medians = np.median(random.choice(np.asarray(values), (draws, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return round(float(low), 5), round(float(high), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100)
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
