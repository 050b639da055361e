"""A create body that has been checked: options, items, tools, what names its session.

Everything that can be refused before a response exists is refused here, as an ApiError that names the field.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
from msgspec import UNSET, UnsetType

from agentserve.config import Config
from agentserve.errors import InvalidValue, ModelNotFound, UnsupportedValue
from agentserve.events import new_id
from agentserve.fields import fields_named
from agentserve.interfaces import Principal
from agentserve.normalise import Normalisers
from agentserve.protocol.decode import decode_input, decode_tools, options_of
from agentserve.protocol.items import IgnoredTool, InputItem, Item, Tool
from agentserve.protocol.machine import stream_id_of
from agentserve.protocol.responses import (
    ConversationName,
    Echo,
    ReasoningConfig,
    ResponseBody,
    ResponseCreate,
    TextFormat,
    TurnOptions,
    check_metadata,
    echo,
)
from agentserve.protocol.tool_choice import ToolChoice, tool_choice
from agentserve.session_ids import begun_session, named_session
from agentserve.worker.messages import Sampling

SESSION_HEADERS = ("session-id", "x-claude-code-session-id")
MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
"""Every token is compared with every stop string, on the thread that computes."""
MOST = (1 << 31) - 1
"""Counts above it mean the same; JSON has no largest integer, the worker's frames do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One accepted turn. accepted_at: `time.monotonic()`. tools None: the parent's, if there is one.

    max_output_tokens: as asked, None = the server's default. top_logprobs None = none wanted. field_names: of fields that the
    client knows by another name than Responses. session: the one that the client names. begins: that of contexts that begin
    like this, where neither client nor parent names one. aside: the server's own question, no turn of the session.
    """

    id: str
    principal: Principal
    stream_id: str | UnsetType
    accepted_at: float
    created_at: int
    create: ResponseCreate
    options: TurnOptions
    items: tuple[InputItem, ...]
    tools: tuple[Tool, ...] | None
    ignored_tools: tuple[IgnoredTool, ...]
    echo: Echo
    tool_choice: ToolChoice
    model: str
    top_logprobs: int | None
    session: str | None
    begins: str
    idempotency_key: str | None
    digest: bytes
    field_names: Mapping[str, str] = field(default_factory=dict)
    normalisers: Normalisers = field(default_factory=Normalisers)
    aside: bool = False

    @property
    def store(self) -> bool:
        return self.create.store is not False

    @property
    def conversation(self) -> str | None:
        named = self.create.conversation
        return named.id if isinstance(named, ConversationName) else named

    @property
    def sealed_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in (self.create.include or ())

    @property
    def generate(self) -> bool:
        return self.create.generate is not False

    @property
    def thinking(self) -> bool:
        reasoning = self.create.reasoning
        return reasoning is None or reasoning.effort != "none"

    def sampling(self, config: Config, room: int | None) -> Sampling:
        """room: tokens that still fit into the context, None if not known."""
        c = self.create
        wanted = c.max_output_tokens or config.turn.max_output_tokens
        return Sampling(
            max_tokens=0 if not self.generate else min(wanted, MOST) if room is None else max(1, min(wanted, room)),
            temperature=config.turn.temperature if c.temperature is None else c.temperature,
            top_p=config.turn.top_p if c.top_p is None else c.top_p,
            top_k=min(c.top_k or 0, MOST),
            min_p=c.min_p or 0.0,
            seed=c.seed,
            repetition_penalty=1.0 if c.repetition_penalty is None else c.repetition_penalty,
            presence_penalty=c.presence_penalty or 0.0,
            frequency_penalty=c.frequency_penalty or 0.0,
            logprobs=self.top_logprobs,
        )

    def compacts_at(self, max_context: int | None) -> int | None:
        """Tokens of context from which on it is summed up, None = never. max_context: of the model, None if not known.

        At the latest at three quarters of that: the question, the summary and an answer have to fit.
        """
        if not self.create.context_management or not self.generate:
            return None
        wanted = [one.compact_threshold for one in self.create.context_management if one.compact_threshold is not None]
        latest = [] if max_context is None else [max_context - max_context // 4]
        return min(wanted + latest, default=None)

    @property
    def form(self) -> TextFormat | None:
        return None if self.create.text is None else self.create.text.format

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.create.stop
        return (stop,) if isinstance(stop, str) else tuple(stop or ())

    def body(self, config: Config) -> ResponseBody:
        """The response object at its creation."""
        c = self.create
        return ResponseBody(
            id=self.id,
            created_at=self.created_at,
            status="in_progress",
            background=c.background is True,
            conversation=None if self.conversation is None else ConversationName(self.conversation),
            instructions=self.echo.instructions,
            max_output_tokens=c.max_output_tokens,
            metadata=c.metadata or {},
            model=self.model,
            parallel_tool_calls=c.parallel_tool_calls is not False,
            previous_response_id=c.previous_response_id,
            prompt_cache_key=self.echo.prompt_cache_key,
            reasoning=c.reasoning or ReasoningConfig(),
            safety_identifier=self.echo.safety_identifier,
            store=self.store,
            temperature=config.turn.temperature if c.temperature is None else c.temperature,
            text=self.echo.text,
            tool_choice=self.echo.tool_choice,
            tools=self.echo.tools,
            top_logprobs=c.top_logprobs or 0,
            top_p=config.turn.top_p if c.top_p is None else c.top_p,
            truncation=c.truncation or "disabled",
            user=self.echo.user,
        )


def accept(
    create: ResponseCreate,
    principal: Principal,
    config: Config,
    headers: Mapping[str, str],
    *,
    websocket: bool,
    items: tuple[Item, ...] | None = None,
    field_names: Mapping[str, str] = MappingProxyType({}),
) -> TurnRequest:
    """Check a create body. headers: of the request or upgrade, lower case. Raises ApiError.

    items: its `input` if that is decoded already, as for the other APIs. field_names: how those call fields of Responses, for
    errors.
    """
    with fields_named(field_names):
        return _accept(create, principal, config, headers, websocket, items, field_names)


def _accept(
    create: ResponseCreate,
    principal: Principal,
    config: Config,
    headers: Mapping[str, str],
    websocket: bool,
    items: tuple[Item, ...] | None,
    field_names: Mapping[str, str],
) -> TurnRequest:
    _refuse_unsupported(create)
    options = options_of(create, events_header=headers.get("agentserve-events") == "1")
    if create.background:
        options = msgspec.structs.replace(options, detach=True)
    tools, ignored, as_sent = decode_tools(create.tools)
    metadata = create.metadata or {}
    check_metadata(metadata)
    _check_stop(create.stop)
    wants_logprobs = bool(create.top_logprobs) or "message.output_text.logprobs" in (create.include or ())
    # A socket's headers belong to all of its turns, so that a key there would make every second turn a conflict.
    key = metadata.get("idempotency_key") or (None if websocket else headers.get("idempotency-key"))
    given = decode_input(create.input, max_items=config.limits.items) if items is None else items
    normalisers = Normalisers(
        config.turn.normalise if options.normalise is None else options.normalise, config.turn.nonce_headers
    )
    session = _session(create, principal, headers)
    begins = session is None and create.previous_response_id is None and create.conversation is None
    return TurnRequest(
        id=new_id("resp"),
        principal=principal,
        stream_id=stream_id_of(create.stream_id) if websocket else UNSET,
        accepted_at=time.monotonic(),
        created_at=int(time.time()),
        create=create,
        options=options,
        items=given,
        tools=None if create.tools is None else tools,
        ignored_tools=ignored,
        echo=echo(create, as_sent),
        tool_choice=tool_choice(create.tool_choice),
        model=_model(create.model, config),
        top_logprobs=(create.top_logprobs or 0) if wants_logprobs else None,
        session=session,
        begins=begun_session(principal.id, create.instructions, given, normalisers) if begins else "",
        idempotency_key=key,
        digest=_digest(create),
        field_names=field_names,
        normalisers=normalisers,
    )


def _refuse_unsupported(create: ResponseCreate) -> None:
    if create.conversation is not None and create.previous_response_id is not None:
        raise InvalidValue("a conversation knows its last response; accepted: one of the two", "previous_response_id")
    if create.conversation is not None and create.store is False:
        raise InvalidValue("a turn of a conversation is kept in it; accepted: store true", "store")
    if create.background and create.store is False:
        raise InvalidValue("a background response is looked up later, so it must be stored; accepted: store true", "background")
    for i, one in enumerate(create.context_management or ()):
        if one.type != "compaction":
            raise UnsupportedValue(f"got '{one.type[:64]}'; accepted: compaction", f"context_management[{i}].type")
    if create.truncation not in (None, "disabled", "auto"):
        raise InvalidValue(f"got '{create.truncation[:64]}'; accepted: disabled, auto", "truncation")


def _check_stop(stop: str | list[str] | None) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidValue(f"{len(stops)} strings, at most {MAX_STOPS} are accepted", "stop")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_LENGTH:
            raise InvalidValue(f"{len(one)} characters; accepted: 1 to {MAX_STOP_LENGTH}", "stop")


def _model(name: str | None, config: Config) -> str:
    """Its own name of the model that a client means. Raises ModelNotFound with all that are served."""
    if name is None:
        return config.model.name
    served = config.served
    for model in (*(m for m in served if name in (m.name, *m.aliases)), *(m for m in served if "*" in m.aliases)):
        return model.name
    raise ModelNotFound(name[:128], tuple(known for m in served for known in (m.name, *m.aliases)))


def _session(create: ResponseCreate, principal: Principal, headers: Mapping[str, str]) -> str | None:
    hint = f"key:{create.prompt_cache_key}" if create.prompt_cache_key else header_session(headers)
    return None if hint is None else named_session(principal.id, hint)


def header_session(headers: Mapping[str, str]) -> str | None:
    """What the headers call the session; None if they name none."""
    for name in SESSION_HEADERS:
        if headers.get(name):
            return f"header:{headers[name]}"
    return None


def _digest(create: ResponseCreate) -> bytes:
    """Of what the client asked, for idempotency keys; transport members do not count."""
    plain = msgspec.structs.replace(create, stream=None, stream_id=None)
    return hashlib.sha256(msgspec.json.encode(plain)).digest()
