"""Recordings on disk → sessions. Shapes only; what a recorded text means to a model is compose.py's business."""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

DATA = Path(__file__).resolve().parent.parent / "data"
"""Where the shipped recordings lie."""
BLOCKS, AIRLINE, MAGAGENT, MINISWE = "coding_agent_blocks", "airline_tool_calls", "magagent", "miniswe"


@dataclass(frozen=True)
class BlockTurn:
    """One request: seconds since its session began, input and output tokens, ids of its full 64-token blocks."""

    t: float
    input_tokens: int
    output_tokens: int
    blocks: np.ndarray


class Timed(Protocol):
    @property
    def t(self) -> float: ...


T = TypeVar("T", bound=Timed)


def records(name: str, directory: Path = DATA, limit: int | None = None) -> list[dict[str, Any]]:
    """Lines of a recording. Raises FileNotFoundError."""
    found: list[dict[str, Any]] = []
    with gzip.open(directory / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            found.append(json.loads(line))
            if len(found) == limit:
                break
    return found


def block_sessions(directory: Path = DATA, limit: int | None = None) -> list[list[BlockTurn]]:
    """Sessions of block ids; requests shorter than one block are left out."""
    return [
        [BlockTurn(r["t"], r["in"], r["out"], _expand(r["blocks"])) for r in session["requests"] if r["blocks"]]
        for session in records(BLOCKS, directory, limit)
    ]


def _expand(runs: list[list[int]]) -> np.ndarray:
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])


def interleave(sessions: Sequence[Sequence[T]], lanes: int) -> Iterator[tuple[float, int, T]]:
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
