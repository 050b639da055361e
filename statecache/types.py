"""The nouns of the state cache. Plain data; see store.py for what is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec
import numpy as np

TierName = Literal["device", "ram", "disk"]

BLOCK_TOKENS = 64
"""Tokens under one block key, whatever page size the engine uses."""


class BoundaryKind(StrEnum):
    """Where one semantic block of an agent's context ends."""

    SYSTEM = "system"
    """System text and tool declarations."""
    USER = "user"
    THINK_OPEN = "think_open"
    """Just before thinking starts: the place an edit that drops the thinking goes back to."""
    THINK_CLOSE = "think_close"
    CALL_OPEN = "call_open"
    CALL_CLOSE = "call_close"
    TOOL_RESULT = "tool_result"
    TURN = "turn"
    """End of an assistant turn."""
    PROMPT_END = "prompt_end"
    SHADOW = "shadow"
    LADDER = "ladder"
    JUNCTION = "junction"
    PARTIAL = "partial"
    """Where a cancelled prefill stopped."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """position: tokens before the boundary (≥ 1). item: index of the context item it belongs to, −1 if none."""

    position: int
    kind: BoundaryKind
    item: int = -1


class MarkerTable(msgspec.Struct, frozen=True):
    """Marker token ids of one dialect under one tokenizer; an empty tuple means that it is not a single token here."""

    think_open: tuple[int, ...] = ()
    think_close: tuple[int, ...] = ()
    call_open: tuple[int, ...] = ()
    call_close: tuple[int, ...] = ()
    turn_end: tuple[int, ...] = ()

    def all(self) -> frozenset[int]:
        """Every token that marks something."""
        return frozenset(i for ids in msgspec.structs.astuple(self) for i in ids)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes that every record of a namespace has. state: (name, nbytes) of each recurrent component."""

    kv_token_bytes: int
    state: tuple[tuple[str, int], ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class KvRun:
    """Keys and values of tokens [start, start + len(rows)); rows: uint8 [tokens, kv_token_bytes]."""

    start: int
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes of one checkpoint: kv runs in order, recurrent components at `position`, f32 logits or None."""

    position: int
    kv: tuple[KvRun, ...]
    state: Mapping[str, np.ndarray]
    logits: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """First token where a context leaves the best saved one. cause: what the cache can tell by itself.

    `position` tokens agree. cause is "none" (append only), "tokens" (another id follows), "evicted" (agreed further than any
    checkpoint that is left), "salt" (the same tokens are known only under another salt) or "cold" (nothing known).
    """

    position: int
    cause: Literal["none", "tokens", "evicted", "salt", "cold"]
