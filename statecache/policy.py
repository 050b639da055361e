"""What a checkpoint is worth and where one is placed. Integers only; no bytes, no clocks, no records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from statecache.types import Boundary, BoundaryKind

KIND_WEIGHT: dict[BoundaryKind, int] = {
    BoundaryKind.PARTIAL: 1,
    BoundaryKind.LADDER: 2,
    BoundaryKind.SHADOW: 4,
    BoundaryKind.JUNCTION: 6,
    BoundaryKind.THINK_CLOSE: 6,
    BoundaryKind.CALL_CLOSE: 7,
    BoundaryKind.CALL_OPEN: 8,
    BoundaryKind.THINK_OPEN: 9,
    BoundaryKind.TOOL_RESULT: 10,
    BoundaryKind.USER: 11,
    BoundaryKind.PROMPT_END: 14,
    BoundaryKind.TURN: 16,
    BoundaryKind.SYSTEM: 64,
}
"""How likely a context comes back to such a place, other things equal; also which kind names a shared position."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Placement and eviction settings.

    shadows: tokens before the prompt end. On 48,658 recorded coding-agent requests 4.8% part from the saved context within its
    last 256 tokens; two shadows take re-prefill from 1.32× to 1.09× of the ideal.
    ladder_tokens: distance of regular checkpoints, 0 = none.
    junction_tokens: a checkpoint is placed where a context parts from the saved ones, if it lies at least so many tokens behind
    the restored one: what changed once (a counter, a timestamp, a list of tools) changes there again. 0 = none.
    boundaries: False places only prompt end, shadows and ladder.
    prefill_us_per_token: what recomputing one token costs; only its ratio to bytes matters.
    half_age_s: age at which a checkpoint's chance of reuse has halved (median idle gap of the same recording: 9.7 s, p90 120
    s).
    slack_permille: how much of a tier one eviction round frees beyond what is needed, so that rounds are rare.
    remembered_checkpoints, remembered_tokens: how many evicted checkpoints, and tokens in the whole index, are kept to explain
    later misses.
    single_flight_tokens: a turn waits for another one's checkpoint that is about to save it so many tokens; 0 = never.
    tell_other_salts: report the divergence cause "salt". It tells a principal that another one has used the same tokens, so it
    is off unless all of them are the same person; "cold" or "tokens" is reported instead.
    durable_ends: of each turn's checkpoints, how many go to disk at most beside those that are placed once in a session's life.
    """

    shadows: tuple[int, ...] = (64, 256)
    ladder_tokens: int = 8192
    junction_tokens: int = 32
    boundaries: bool = True
    prefill_us_per_token: int = 1000
    half_age_s: int = 120
    slack_permille: int = 15
    remembered_checkpoints: int = 4096
    remembered_tokens: int = 16 << 20
    single_flight_tokens: int = 256
    tell_other_salts: bool = False
    durable_ends: int = 3


LOOK_AGAIN_US = 20_000
WRITES_FIRST_US = 2_000_000
"""So long a prefetch waits for saved states that are being written. They are never all written on a busy server."""


def prefetch_pause_us(*, restoring: bool, writing: bool, waited_us: int, read_us: int, since_us: int) -> int:
    """Microseconds until an expected checkpoint may be read from disk, 0 = now. It may never come, so others go first.

    restoring: a turn waits for the disk. writing: states are being written there. waited_us: since it was asked for. read_us,
    since_us: what the last prefetch took and when it ended: at most half of the time is spent on guesses.
    """
    if restoring:
        return LOOK_AGAIN_US
    rest = max(0, read_us - since_us)
    if writing and waited_us < WRITES_FIRST_US:
        rest = max(rest, min(LOOK_AGAIN_US, WRITES_FIRST_US - waited_us))
    return rest


COPIED_BYTES_PER_US = 1000
"""From the engine's pools to the memory tier: about a gigabyte per second, in blocks, read once and written twice."""


def worth_copying(saved_tokens: int, nbytes: int, policy: Policy) -> bool:
    """Whether a state that has to leave the device is copied first: computing its tokens again would take longer."""
    return saved_tokens * policy.prefill_us_per_token * COPIED_BYTES_PER_US > nbytes


def better_kind(a: BoundaryKind, b: BoundaryKind) -> BoundaryKind:
    """The kind that names a position where two boundaries meet; the first one when equal."""
    return b if KIND_WEIGHT[b] > KIND_WEIGHT[a] else a


LASTING = frozenset({BoundaryKind.SYSTEM, BoundaryKind.LADDER, BoundaryKind.JUNCTION})
"""Kinds that are placed once on a stretch of context, not again in each turn."""
MESSAGE_ENDS = frozenset({BoundaryKind.USER, BoundaryKind.TOOL_RESULT, BoundaryKind.TURN})
ASKING_TOKENS = 32
"""Most that lies between a prompt's last message and its end: a role's header and an empty thinking block."""
LEAST_ENDS = 2
USUAL_RANKS = 2
"""Ends of messages that are written of a turn while nothing is known: its own, and that of the last message before it."""


def usually_worth(kind: BoundaryKind, rank: int) -> bool:
    """Of a turn's ends of messages, deepest first, those that are written while nothing is known of its agent."""
    return rank < USUAL_RANKS


def message_ends(placed: Iterable[Boundary]) -> list[Boundary]:
    """Deepest first."""
    return sorted((b for b in placed if b.kind in MESSAGE_ENDS), key=lambda b: b.position, reverse=True)


def worth_disk(
    placed: Iterable[Boundary], policy: Policy, worth: Callable[[BoundaryKind, int], bool] = usually_worth
) -> list[Boundary]:
    """Which checkpoints of one ended turn are written to disk, deepest first, so that one extent covers the turn's blocks.

    worth(kind, rank): whether contexts come back to such an end of a message; see returns.py.

    All lasting kinds, and those of the `durable_ends` deepest ends of messages that are worth it, at least one: the end of the
    turn, to which the next one appends; of the last message before it, to which a retry and a context without the turn's
    thinking come back; and of the one before that, to which an agent comes back that rewrites its last message. A template
    takes back the words that ask for an answer, so the prompt's own end counts only where no message is known to end there.
    Where fewer than two ends are known, the best of the others join them, one of a kind.
    """
    deepest_first = sorted(placed, key=lambda b: b.position, reverse=True)
    chosen = [b for b in deepest_first if b.kind in LASTING]
    messages = message_ends(deepest_first)
    others: dict[BoundaryKind, Boundary] = {}
    for boundary in deepest_first:
        if boundary.kind in LASTING | MESSAGE_ENDS:
            continue
        asks = boundary.kind is BoundaryKind.PROMPT_END and any(
            0 < boundary.position - b.position <= ASKING_TOKENS for b in messages
        )
        if not asks:
            others.setdefault(boundary.kind, boundary)
    best = sorted(others.values(), key=lambda b: KIND_WEIGHT[b.kind], reverse=True)
    known = messages[: policy.durable_ends]
    ends = [b for rank, b in enumerate(known) if worth(b.kind, rank)] or known[:1]
    ends += best[: max(0, min(LEAST_ENDS, policy.durable_ends) - len(known))]
    return sorted(chosen + ends, key=lambda b: b.position, reverse=True)
