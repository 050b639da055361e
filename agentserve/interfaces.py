"""What a turn needs from its neighbours: text, storage and the worker. Shapes only; app.py picks the classes.

turn.py is written against these, tests/fakes/ has small ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from agentserve.constraints.output import OutputRule
from agentserve.protocol.items import InputItem, Item, OutputItem, ResponseItem, Tool
from agentserve.protocol.responses import ResponseBody
from agentserve.worker.messages import (
    CheckpointRow,
    Cut,
    Hello,
    Load,
    Matched,
    Memory,
    Progress,
    Saved,
    StartTurn,
    Tiers,
    Tokens,
    TurnFailed,
    TurnFinished,
)
from statecache.types import MarkerTable

TurnFrame = Matched | Progress | Tokens | Saved | TurnFinished | TurnFailed


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. id: stable name for ownership. salt: isolation digest that goes to the state cache."""

    id: str
    salt: bytes


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """A whole context. items: oldest first, without the instructions.

    retain "all" keeps earlier thinking even where the chat template drops it. thinking False asks the template for none.
    salt separates aliases of principals. prompt False: end with the last item, nothing is to be generated.
    max_tokens: a context that is clearly longer is refused without looking at all of it; None = no limit.
    rule: what the answer must be, None = anything. No part of the context.
    """

    instructions: str | None
    tools: tuple[Tool, ...]
    items: tuple[Item, ...]
    retain: Literal["template", "all"] = "template"
    thinking: bool = True
    salt: bytes = b""
    prompt: bool = True
    max_tokens: int | None = None
    rule: OutputRule | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of a context. ids: uint32 [n]. cuts: rising positions.

    item_starts: first token of each item (rising, parallel to the items), so that a token index finds its item; tokens before
    the first belong to the instructions and tools. opens_reasoning: the prompt ends inside an open thinking block.
    grammar: what the answer must be, in the worker's notation; "" if the request has no rule.
    """

    ids: np.ndarray
    cuts: tuple[Cut, ...]
    markers: MarkerTable
    item_starts: tuple[int, ...] = ()
    opens_reasoning: bool = False
    grammar: str = ""


class ReasoningDelta(msgspec.Struct, frozen=True):
    text: str


class TextDelta(msgspec.Struct, frozen=True):
    text: str


class CallOpen(msgspec.Struct, frozen=True):
    """A tool call has begun and its name is known. custom: the tool takes free text, so `input` instead of `arguments`."""

    name: str
    custom: bool = False


class CallDelta(msgspec.Struct, frozen=True):
    """More of the call's arguments, as JSON text (or free text of a custom tool)."""

    text: str


class CallClose(msgspec.Struct, frozen=True):
    """The call is whole."""


Delta = ReasoningDelta | TextDelta | CallOpen | CallDelta | CallClose


class StreamParser(Protocol):
    """Turns generated ids into deltas, whatever the chunking. A change of kind closes what was open before it."""

    def push(self, ids: Sequence[int]) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]:
        """What was held back; called once, after the last push."""
        ...


class Text(Protocol):
    """Chat template, tokenizer and dialect of the served model. `render` takes long: call it in a thread."""

    def render(self, request: RenderRequest) -> Rendered: ...

    def check_rule(self, rule: OutputRule) -> None:
        """Raises UnsupportedValue if this model's answers cannot be held to it. May take long."""
        ...

    def parser(self, request: RenderRequest, rendered: Rendered) -> StreamParser: ...

    def learn(self, request: RenderRequest, rendered: Rendered, output: Sequence[OutputItem], generated: np.ndarray) -> None:
        """Remember the exact ids (uint32 [m]) behind an answer, so that the next render splices them back."""
        ...

    def token_text(self, token_id: int) -> bytes:
        """Bytes of one token, for logprobs."""
        ...


# ── storage ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A context that the server keeps. created_at: Unix seconds. last_response: the last turn of it.

    version: counts edits. told: the version whose items last_response and those before it say, −1 for none.
    """

    id: str
    created_at: float
    metadata: dict[str, str]
    last_response: str | None = None
    version: int = 0
    told: int = -1


class InConversation(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation that a turn extends, as it was when the turn began. new_items: how many of the turn's input are new."""

    id: str
    version: int
    last_response: str | None
    new_items: int


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One committed turn. body: the final `response` object as JSON. prompt_ids, generated_ids: little-endian uint32.

    input: items of this turn only (not of its parents). created_at, completed_at: Unix seconds.
    context_items: items of its whole context. own_tokens: prompt position behind the first user message; what shares less is
    another conversation. follows: the response whose context this one goes on from though it names no parent; the store
    finds it. stream: how its events were cut (see replay.py). conversation: the id of the one that it
    extended. in_conversation: what its turn saw of that when it began, for the commit.
    """

    id: str
    principal: str
    session: str
    parent: str | None
    model: str
    status: str
    created_at: float
    completed_at: float
    instructions: str | None
    tools: bytes
    input: tuple[InputItem, ...]
    output: tuple[ResponseItem, ...]
    body: bytes
    prompt_ids: bytes
    generated_ids: bytes
    idempotency_key: str | None = None
    request_digest: bytes | None = None
    context_items: int = 0
    own_tokens: int = 0
    follows: str | None = None
    stream: bytes | None = None
    conversation: str | None = None
    in_conversation: InConversation | None = None


LINEAGE = 1024
LISTED_LINEAGE = 16
"""Responses of a session that are named: all of thousands of turns for each session of a page would be megabytes."""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `/v1/sessions`. Times are Unix seconds. stored: False if its turns are known until the server ends only.

    lineage: the last response and those before it, oldest first, of one session at most LINEAGE, of each of a list at most
    LISTED_LINEAGE; lineage_has_more: there are older ones.
    """

    id: str
    created_at: int
    updated_at: int
    turns: int
    last_response: str | None
    context_tokens: int
    reused_tokens: int = 0
    lineage: tuple[str, ...] = ()
    lineage_has_more: bool = False
    stored: bool = True


class Conversations(Protocol):
    """Conversations of principals. None or False: there is no such one, or it is another principal's."""

    async def create(self, principal: str, metadata: dict[str, str], items: Sequence[InputItem]) -> Conversation: ...

    async def get(self, principal: str, conversation_id: str) -> Conversation | None: ...

    async def update(self, principal: str, conversation_id: str, metadata: dict[str, str]) -> Conversation | None: ...

    async def delete(self, principal: str, conversation_id: str) -> bool: ...

    async def items(self, principal: str, conversation_id: str) -> tuple[InputItem, ...] | None: ...

    async def page(
        self, principal: str, conversation_id: str, *, limit: int, after: str | None, ascending: bool
    ) -> tuple[InputItem, ...] | None:
        """At most `limit` items behind the one of id `after`, in one order or the other. InvalidValue if there is none such."""
        ...

    async def item(self, principal: str, conversation_id: str, item_id: str) -> InputItem | None: ...

    async def add(
        self, principal: str, conversation_id: str, items: Sequence[InputItem], most: int
    ) -> tuple[InputItem, ...] | None:
        """Append. most: items that the conversation may have then; InvalidValue if it would have more."""
        ...

    async def replace(self, principal: str, conversation_id: str, item_id: str, item: InputItem | None) -> bool: ...


class Store(Protocol):
    """Durable sessions, responses and items. Every read is scoped to a principal; foreign ids are absent."""

    @property
    def conversations(self) -> Conversations: ...

    async def get(self, principal: str, response_id: str) -> StoredResponse | None: ...

    async def chain(self, principal: str, response_id: str) -> tuple[StoredResponse, ...] | None:
        """The response and its ancestors, oldest first; None if the id is unknown or an ancestor was deleted."""
        ...

    async def commit(self, response: StoredResponse) -> None:
        """Durable when this returns. Creates the session at its first turn."""
        ...

    async def delete(self, principal: str, response_id: str) -> bool: ...

    async def by_idempotency_key(self, principal: str, key: str) -> StoredResponse | None: ...

    async def stored_bytes(self, principal: str) -> int:
        """What the principal's responses and conversations take."""
        ...

    async def begin_background(self, principal: str, body: ResponseBody) -> None:
        """Remember a response that nobody waits for, until it is committed; durable when this returns."""
        ...

    async def fail_background(self, body: ResponseBody) -> None:
        """It will not be committed; body: as it ended."""
        ...

    async def in_background(self, principal: str, response_id: str) -> ResponseBody | None:
        """One that is not committed: as it began, or how it failed. Those of a server that was stopped have failed."""
        ...

    async def sessions(self, principal: str, limit: int, after: str | None) -> tuple[SessionRow, ...]: ...

    async def kept_sessions(self, principal: str, ids: Sequence[str]) -> frozenset[str]: ...

    async def session(self, principal: str, session_id: str) -> SessionRow | None: ...

    async def delete_session(self, principal: str, session_id: str) -> bool: ...


# ── worker ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Worker(Protocol):
    """The server's side of the pipe. A worker that dies yields TurnFailed `server_error` for each running turn."""

    @property
    def ready(self) -> bool: ...

    @property
    def hello(self) -> Hello | None: ...

    @property
    def load(self) -> Load | None: ...

    def run(self, start: StartTurn, on_tokens: Callable[[Tokens], bool] | None = None) -> AsyncGenerator[TurnFrame, None]:
        """Frames of one turn, ending with TurnFinished or TurnFailed. Closing it early cancels the turn.

        on_tokens: may be offered Tokens frames as they arrive, in order; True means taken. It must not block or raise.
        """
        ...

    def cancel(self, turn_id: str) -> None: ...

    async def checkpoints(self, session: str) -> tuple[CheckpointRow, ...]: ...

    async def pin(self, session: str, checkpoint: str, pinned: bool) -> tuple[CheckpointRow, ...] | None: ...

    async def tiers(self, *, ram_bytes: int | None = None, disk_bytes: int | None = None) -> Tiers | None:
        """What the tiers hold, after their budgets were changed (None = not). None: no worker answers."""
        ...

    async def memory(self, slots: int | None = None) -> tuple[Memory | None, ...]:
        """How each worker's device memory is divided, after the expert slots were changed (None = not). None: no answer."""
        ...

    def forget(self, session: str) -> None: ...

    def expect(self, key: str, ids: bytes, salt: bytes, session: str = "") -> None:
        """A session's turn whose context begins with these tokens (u32le) will probably come. key: who expects it."""
        ...

    def unexpect(self, key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class DivergenceReport:
    """Where and why a context left the best saved one. item: index into the items, −1 for instructions and tools."""

    token_index: int
    item: int
    cause: str
    before: str | None = None
    after: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
