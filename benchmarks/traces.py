"""Replay recorded coding-agent requests against checkpoint policies: what is reused, what is prefilled beyond the ideal.

    python -m benchmarks.traces FILE.jsonl.gz [--ram-gib 8] [--disk-gib 64] [--lanes 4] [--sessions N] [--record]

FILE: one session a line, requests as run-length lists of 64-token block ids (equal id = equal block within the session).

Two replays. *Policy alone*: which saved positions lie on the next request's path, with nothing evicted beyond what the policy
says. *Store*: the real StateCache over tiers that count bytes and keep none, sized like a 35B hybrid model (20,480 B of KV per
token, 61.4 MiB of recurrent state per checkpoint); sessions follow one another in `--lanes` lanes.

hit: reused ÷ input tokens. re-prefill: tokens prefilled ÷ tokens that even unlimited checkpoints at every block would prefill.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import report
from statecache.boundary import prompt_cuts
from statecache.index.radix import RadixIndex
from statecache.policy import Policy
from statecache.store import StateCache
from statecache.tiers.base import SegmentHeader
from statecache.tiers.ram import RamTier
from statecache.types import BLOCK_TOKENS, BoundaryKind, KvRun, Layout, Payload

LAYOUT = Layout(kv_token_bytes=20_480, state=(("recurrent", 64_382_566),), vocab_size=248_320)
SALT = b"trace"


@dataclass(frozen=True)
class Turn:
    """One request: seconds since its session began, input tokens, ids of its full blocks."""

    t: float
    input_tokens: int
    output_tokens: int
    blocks: np.ndarray


def load(path: Path, limit: int | None = None) -> list[list[Turn]]:
    sessions: list[list[Turn]] = []
    with gzip.open(path, "rt") as file:
        for line in file:
            requests = json.loads(line)["requests"]
            sessions.append([Turn(r["t"], r["in"], r["out"], _expand(r["blocks"])) for r in requests if r["blocks"]])
            if len(sessions) == limit:
                break
    return sessions


def _expand(runs: list[list[int]]) -> np.ndarray:
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])


# ── policy alone ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Keep:
    """What a session keeps: its last `ends` prompt ends with their shadows, and all ladder positions it ever passed."""

    ends: int
    policy: Policy


POLICIES: Mapping[str, Keep] = {
    "last end": Keep(1, Policy(shadows=(), ladder_tokens=0)),
    "last 2 ends": Keep(2, Policy(shadows=(), ladder_tokens=0)),
    "last end + shadow": Keep(1, Policy(shadows=(128,), ladder_tokens=0)),
    "last 2 + shadows": Keep(2, Policy(shadows=(64, 256), ladder_tokens=0)),
    "last 2 + ladder": Keep(2, Policy(shadows=())),
    "last 2 + shadows + ladder": Keep(2, Policy()),
}


class Paths:
    """Numbers the block prefixes of one session: equal prefix, equal number."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def walk(self, blocks: np.ndarray) -> tuple[list[int], int]:
        """(number of the prefix after each block, how many of the blocks were known)."""
        numbers: list[int] = []
        at, known = 0, 0
        for block in blocks.tolist():
            step = (at, block)
            following = self._next.get(step)
            if following is None:
                following = self._next[step] = len(self._next) + 1
            else:
                known += 1
            at = following
            numbers.append(at)
        return numbers, known


def replay_policies(sessions: list[list[Turn]]) -> dict[str, dict[str, float]]:
    """Per policy: hit, re-prefill relative to ideal, and checkpoints placed per turn."""
    asked = ideal = turns = 0
    reused = dict.fromkeys(POLICIES, 0)
    placed = dict.fromkeys(POLICIES, 0)
    for session in sessions:
        paths = Paths()
        recent = {name: deque[set[int]](maxlen=keep.ends) for name, keep in POLICIES.items()}
        ladder: dict[str, set[int]] = {name: set() for name in POLICIES}
        for turn in session:
            numbers, known = paths.walk(turn.blocks)
            asked += turn.input_tokens
            ideal += min(known * BLOCK_TOKENS, turn.input_tokens - 1)
            turns += 1
            for name, keep in POLICIES.items():
                saved = ladder[name].union(*recent[name])
                depth = next((i + 1 for i in range(known - 1, -1, -1) if numbers[i] in saved), 0)
                reused[name] += min(depth * BLOCK_TOKENS, turn.input_tokens - 1)
                ends: set[int] = set()
                for cut in prompt_cuts((), len(numbers) * BLOCK_TOKENS, keep.policy):
                    number = numbers[cut.position // BLOCK_TOKENS - 1]
                    placed[name] += number not in saved
                    (ladder[name] if cut.kind is BoundaryKind.LADDER else ends).add(number)
                recent[name].append(ends)
    figures = {
        name: {
            "hit": round(reused[name] / asked, 4),
            "re_prefill": round((asked - reused[name]) / (asked - ideal), 3),
            "placed_per_turn": round(placed[name] / turns, 2),
        }
        for name in POLICIES
    }
    figures["ideal"] = {"hit": round(ideal / asked, 4), "re_prefill": 1.0, "placed_per_turn": 0.0}
    return figures


# ── the real store ───────────────────────────────────────────────────────────────────────────────────────────────────


class CountingTier(RamTier):
    """Charges for bytes and keeps only their sizes, so that terabytes can be replayed. Reads give zeros."""

    def put(self, key: bytes, header: SegmentHeader, parts: Mapping[str, np.ndarray]) -> int:
        cost = self.cost(header, {name: array.nbytes for name, array in parts.items()})
        self.delete(key)
        zeros = {name: np.broadcast_to(np.zeros(1, np.uint8), (array.nbytes,)) for name, array in parts.items()}
        self._segments[key] = (header, zeros, {}, cost)
        self._used += cost
        return cost


def interleave(sessions: list[list[Turn]], lanes: int) -> Iterator[tuple[float, int, Turn]]:
    """(time, session, turn) in order of time; each lane plays its sessions one after another with a minute between."""
    events: list[tuple[float, int, int]] = []
    free_at = [0.0] * lanes
    heapq.heapify(free_at)
    for number, session in enumerate(sessions):
        begin = heapq.heappop(free_at)
        events += [(begin + turn.t, number, i) for i, turn in enumerate(session)]
        heapq.heappush(free_at, begin + session[-1].t + 60 if session else begin)
    for at, number, i in sorted(events):
        yield at, number, sessions[number][i]


def replay_store(sessions: list[list[Turn]], policy: Policy, ram_bytes: int, disk_bytes: int, lanes: int) -> dict[str, float]:
    """Match and save every request. What is generated is part of the next request's blocks and is not saved separately."""
    now = 0.0
    tiers = [CountingTier(ram_bytes, name="ram")]
    if disk_bytes:
        tiers.append(CountingTier(disk_bytes, name="disk"))
    cache = StateCache(b"trace", LAYOUT, tiers=tiers, index=RadixIndex(), policy=policy, clock=lambda: now)
    row = np.zeros((1, LAYOUT.kv_token_bytes), dtype=np.uint8)
    state = {name: np.broadcast_to(np.zeros(1, np.uint8), (size,)) for name, size in LAYOUT.state}
    paths = [Paths() for _ in sessions]
    asked = ideal = reused = turns = fresh = saves = 0
    for at, number, turn in interleave(sessions, lanes):
        now = at
        _, known = paths[number].walk(turn.blocks)
        # a block id becomes 64 token ids that no other session has
        ids = ((turn.blocks + number * 20_000)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
        with cache.match(ids, SALT) as match:
            base = match.position
            asked += turn.input_tokens
            ideal += min(known * BLOCK_TOKENS, turn.input_tokens - 1)
            reused += base
            turns += 1
            fresh += len(ids) - known * BLOCK_TOKENS
            for cut in prompt_cuts((), len(ids), policy, after=base):
                start = cache.kv_missing_from(ids, SALT, cut.position)
                rows = np.broadcast_to(row, (cut.position - start, LAYOUT.kv_token_bytes))
                result = cache.put(ids, SALT, cut, Payload(cut.position, (KvRun(start, rows),), state))
                saves += result.checkpoint_id is not None and not result.existed
    stats = cache.stats()
    written = {
        f"{name}_written_per_new_kv_byte": round(tier.written_bytes / (fresh * LAYOUT.kv_token_bytes), 2)
        for name, tier in stats.tiers.items()
    }
    return {
        "hit": round(reused / asked, 4),
        "re_prefill": round((asked - reused) / (asked - ideal), 3),
        "saves_per_turn": round(saves / turns, 2),
        **written,
        "evictions": sum(tier.evictions for tier in stats.tiers.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ram-gib", type=float, default=8.0)
    parser.add_argument("--disk-gib", type=float, default=64.0)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=None, help="only the first N")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if not options.file.exists():
        print(f"skipped: {options.file} is not here")
        return
    sessions = load(options.file, options.sessions)
    workload = {"file": options.file.name, "sessions": len(sessions), "requests": sum(map(len, sessions))}
    figures = replay_policies(sessions)
    for name, line in figures.items():
        hit, again, placed = line["hit"], line["re_prefill"], line["placed_per_turn"]
        print(f"{name:28s} hit {hit:.2%}  re-prefill {again:.2f}×  placed {placed:.1f} a turn")
    report("traces", "policy alone", workload, figures, options.record)
    gib = 1 << 30
    ram, disk = int(options.ram_gib * gib), int(options.disk_gib * gib)
    for label, sizes in {"unlimited": (1 << 50, 0), f"{options.ram_gib:g} + {options.disk_gib:g} GiB": (ram, disk)}.items():
        line = replay_store(sessions, Policy(), *sizes, options.lanes)
        print(f"store, {label:21s} " + "  ".join(f"{key} {value}" for key, value in line.items()))
        workload_here = workload | {"tiers": label, "lanes": options.lanes}
        report("traces", "hybrid 35B, 20,480 B KV a token, 61.4 MiB state", workload_here, line, options.record)


if __name__ == "__main__":
    main()
