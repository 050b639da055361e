"""Frames between the server process and a worker: msgspec-msgpack, tagged, length-prefixed on a socket pair.

The server sends text-free token ids; the worker answers with positions and token ids. Times are seconds of
`time.monotonic()`, which both processes of one machine share. Every turn ends with exactly one TurnFinished or TurnFailed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from statecache.types import BoundaryKind, MarkerTable

PROTOCOL_VERSION = 8
"""Raised when a frame changes; a worker of another version is refused at Hello."""


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """A prompt boundary found in the text: `position` tokens lie before it. item: index of the context item, −1 if none."""

    position: int
    kind: BoundaryKind
    item: int = -1


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Mirror of engine.types.SamplingParams on the wire (stop strings as UTF-8 bytes)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    stop: tuple[bytes, ...] = ()


# ── server → worker ──────────────────────────────────────────────────────────────────────────────────────────────


class StartTurn(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Begin a turn.

    ids: little-endian uint32 token ids of the whole prompt. cuts: prompt boundaries, rising positions.
    salt: isolation digest of the principal. session: id for pins, lists and metrics only, never for matching.
    generate False: prefill, checkpoint, finish with zero tokens.
    accepted_at: when the turn was accepted. deadline_s: seconds from accepted_at to the first token, None = default; turns are
    ordered by it. priority: a higher one goes first among equally pressing ones.
    on_miss "fail": end the turn as failed (`deadline_exceeded`) when the deadline passes before the first token; what was
    prefilled is kept as a checkpoint.
    grammar: what the answer must be, in llguidance's notation; "" = anything.
    """

    turn_id: str
    ids: bytes
    cuts: tuple[Cut, ...]
    markers: MarkerTable
    salt: bytes
    session: str
    sampling: Sampling
    accepted_at: float
    deadline_s: float | None = None
    on_miss: Literal["continue", "fail"] = "continue"
    priority: int = 0
    generate: bool = True
    grammar: str = ""


class CancelTurn(msgspec.Struct, frozen=True, tag="cancel"):
    turn_id: str


class ListCheckpoints(msgspec.Struct, frozen=True, tag="list"):
    """Ask for the checkpoints that a session placed or used; answered by Checkpoints with the same query id."""

    query_id: int
    session: str


class PinCheckpoint(msgspec.Struct, frozen=True, tag="pin"):
    """Keep a session's checkpoint from being evicted (pinned), or let it go. checkpoint "": the deepest, or all to let go.

    Answered by Checkpoints with the same query id and the session's list afterwards. Pins outlive the worker where there is a
    disk tier with an index.
    """

    query_id: int
    session: str
    checkpoint: str
    pinned: bool


class ForgetSession(msgspec.Struct, frozen=True, tag="forget"):
    """Unpin and forget which checkpoints a session used; they fall to normal eviction."""

    session: str


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """A turn will come whose context begins with these tokens (u32le): bring its state up, keep it from being evicted.

    key: whoever expects it; a later one with the same key takes its place, Unexpect ends it. Not answered.
    """

    key: str
    ids: bytes
    salt: bytes


class Unexpect(msgspec.Struct, frozen=True, tag="unexpect"):
    """It does not come: what is being read for it is given up. Unknown keys are ignored."""

    key: str


class SetBudgets(msgspec.Struct, frozen=True, tag="budgets"):
    """Change what the tiers may hold until the worker ends; None leaves one as it is. Answered by Tiers with that id."""

    query_id: int
    ram_bytes: int | None = None
    disk_bytes: int | None = None


class ResizeExperts(msgspec.Struct, frozen=True, tag="resize"):
    """Have so many expert slots on the device, KV pages taking or giving what that leaves or needs; None = change nothing.

    Answered by Memory with that id; a move that turns wait beside goes on after the answer.
    """

    query_id: int
    slots: int | None = None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish running turns, accept no more, then exit 0."""


ToWorker = (
    StartTurn
    | CancelTurn
    | ListCheckpoints
    | PinCheckpoint
    | ForgetSession
    | Expect
    | Unexpect
    | SetBudgets
    | ResizeExperts
    | Drain
)


# ── worker → server ──────────────────────────────────────────────────────────────────────────────────────────────


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of loading weights, 0…1, with what is being done now."""

    fraction: float
    what: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The worker is ready.

    rows: turns that it runs at once. kv_token_bytes: of one saved token. sessions: those whose state was found on disk, with
    the position of the deepest checkpoint.
    """

    version: int
    model: str
    model_type: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context: int
    backend: str
    namespace: str
    pid: int
    rows: int = 0
    kv_token_bytes: int = 0
    sessions: dict[str, int] = {}


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The worker exits after this, since its model cannot be loaded, or its device failed while it served. The supervisor does
    not retry a `permanent` one."""

    message: str
    permanent: bool


class Matched(msgspec.Struct, frozen=True, kw_only=True, tag="matched"):
    """What the state cache found. position 0 = nothing. divergence None = the context only appends.

    kind/tier: of the checkpoint used. saved_position: deepest position where the saved context agrees with this one.
    predicted_ttft_s: from now on, as often too much as too little. cautious_ttft_s: few turns take longer; None = the same.
    """

    turn_id: str
    position: int
    tier: str | None
    kind: BoundaryKind | None
    divergence: int | None
    cause: str
    predicted_ttft_s: float
    cautious_ttft_s: float | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Sent when prefill advances and, while queued, at least every second; `queued` is turns ahead of this one.

    eta_s, cautious_s: to the first token, as in Matched.
    """

    turn_id: str
    processed: int
    total: int
    cached: int
    queued: int
    eta_s: float
    cautious_s: float | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens", omit_defaults=True):
    """Generated ids of one step, in order; logprobs is parallel to ids or empty."""

    turn_id: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class StepTokens(msgspec.Struct, frozen=True, tag="step"):
    """Several Tokens of one id each, one behind the other: how the pipe carries what many turns say in one step."""

    turn_ids: tuple[str, ...]
    ids: tuple[int, ...]


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved"):
    """A checkpoint was placed (or found to be there already: written_bytes 0)."""

    turn_id: str
    position: int
    kind: BoundaryKind
    tier: str
    written_bytes: int


class TurnFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """reason: stop (end token), stop_string, length, cancelled. reused: tokens restored, tier: from where. written: tokens
    newly checkpointed. predicted_ttft_s: as predicted when the engine took the turn; None if it never did."""

    turn_id: str
    reason: Literal["stop", "stop_string", "length", "cancelled"]
    prompt_tokens: int
    output_tokens: int
    reused_tokens: int
    written_tokens: int
    queue_s: float
    restore_s: float
    prefill_s: float
    ttft_s: float | None
    decode_s: float
    tier: str | None = None
    predicted_ttft_s: float | None = None


class TurnFailed(msgspec.Struct, frozen=True, tag="failed"):
    """code: context_length_exceeded, invalid_value, deadline_exceeded or server_error; message names numbers, never content.

    unanswered: the worker ended or takes no more turns, and no token of this one was generated: another worker can run it.
    """

    turn_id: str
    code: str
    message: str
    param: str | None = None
    unanswered: bool = False


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The worker was told to end: it finishes its turns and takes no more."""


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `/v1/sessions/{id}/checkpoints`. tier: the fastest that has it; tiers: all of them."""

    id: str
    position: int
    kind: BoundaryKind
    tier: str
    bytes: int
    hits: int
    age_s: float
    tiers: tuple[str, ...] = ()
    pinned: bool = False


class Checkpoints(msgspec.Struct, frozen=True, tag="checkpoints"):
    """found False: the checkpoint that was to be pinned is not one of the session's."""

    query_id: int
    rows: tuple[CheckpointRow, ...]
    found: bool = True


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `/v1/cache`. More than the budget is used while states leave a tier whose budget was made smaller."""

    tier: str
    used_bytes: int
    budget_bytes: int
    checkpoints: int


class Tiers(msgspec.Struct, frozen=True, tag="tiers"):
    """What the tiers hold, fastest first. refused: why the budgets were not changed."""

    query_id: int
    rows: tuple[TierRow, ...]
    refused: str = ""


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in `/v1/memory`. Mirror of engine.types.MemoryReport, which says what each is."""

    slots: int
    wanted_slots: int
    least_slots: int
    most_slots: int
    experts: int
    slot_bytes: int
    pages: int
    wanted_pages: int
    page_tokens: int
    page_bytes: int
    moves: int
    lent_bytes: int
    fixed: str
    trouble: str


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """row None: no memory can change hands there. refused: why the slots were not changed."""

    query_id: int
    row: MemoryRow | None
    refused: str = ""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Periodic report (each second, and after each finished turn): what the predictor and the metrics need."""

    running: int
    waiting: int
    waiting_prefill_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    restore_bytes_per_s: float
    free_pages: int
    total_pages: int
    cache_bytes: dict[str, int]
    cache_checkpoints: dict[str, int]
    counters: dict[str, float]


FromWorker = (
    Loading
    | Hello
    | LoadFailed
    | Draining
    | Matched
    | Progress
    | Tokens
    | Saved
    | TurnFinished
    | TurnFailed
    | Checkpoints
    | Tiers
    | Memory
    | Load
)
