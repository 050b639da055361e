"""Wire Structs of the Responses protocol: what a client may ask and the `response` object it gets.

Unknown keys are ignored; a known key with a wrong value is an error that names it. Raw members are looked at by decode.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from agentserve.errors import InvalidValue
from agentserve.protocol.items import Compaction, Message, ResponseItem

ABSENT = Raw(b"null")
Probability = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


Normaliser = Literal["nonce_header", "dates", "tool_order"]
"""What can be made the same in every turn, see normalise.py."""


class TurnOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `agentserve` object of a create body; the same keys work as strings in metadata ("agentserve.events": "1").

    It is ours alone, so a name that it does not have is a mistake and no other server's extension.
    ttft_deadline_ms: milliseconds from acceptance to the first generated token. priority: orders turns of equal slack.
    normalise: None = what the server's settings say.
    """

    events: bool = False
    ttft_deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    on_miss: Literal["continue", "fail"] = "continue"
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    retain: Literal["template", "all"] = "template"
    detach: bool = False
    normalise: tuple[Normaliser, ...] | None = None


class ReasoningConfig(Struct, frozen=True, kw_only=True):
    """effort "none" asks the template for no thinking; other efforts are all the same here."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Form of the answer's text. json_schema: name, description, schema, strict. json_object: nothing more.

    Not in the standard: regex (pattern, for the whole text) and grammar (syntax lark or regex, definition).
    """

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    pattern: str | None = None
    syntax: str | None = None
    definition: str | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ConversationName(Struct, frozen=True):
    id: str


class ContextManagement(Struct, frozen=True, kw_only=True):
    """type: compaction. compact_threshold: tokens of the context from which on it is summed up; None = our own."""

    type: str
    compact_threshold: Annotated[int, Meta(ge=1)] | None = None


class ResponseCreate(Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/responses` and of the `response.create` frame. `stream` means nothing on a WebSocket.

    top_k, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty and stop are not in the standard.
    """

    model: str | None = None
    input: Raw = ABSENT
    instructions: str | None = None
    tools: list[Raw] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    generate: bool | None = None
    stream_id: Any = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: str | None = None
    context_management: list[ContextManagement] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    agentserve: TurnOptions | None = None


MAX_METADATA = 64
MAX_METADATA_KEY = 256
MAX_METADATA_VALUE = 16_384
"""Characters. Metadata is echoed in every event about a response's life, so it must stay small."""


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises InvalidValue."""
    if len(metadata) > MAX_METADATA:
        raise InvalidValue(f"{len(metadata)} entries, at most {MAX_METADATA} are accepted", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise InvalidValue(f"a key of {len(key)} characters, at most {MAX_METADATA_KEY} are accepted", "metadata")
        if len(value) > MAX_METADATA_VALUE:
            what = f"{len(value)} characters, at most {MAX_METADATA_VALUE} are accepted"
            raise InvalidValue(what, f"metadata.{key}")


class InputTokens(Struct, frozen=True, kw_only=True, tag_field="object", tag="response.input_tokens"):
    """Answer of `POST /v1/responses/input_tokens`."""

    input_tokens: int


class CompactedResponse(Struct, frozen=True, kw_only=True, tag_field="object", tag="response.compaction"):
    """Answer of `POST /v1/responses/compact`: the user's messages, then one compaction item."""

    id: str
    created_at: int
    output: tuple[Message | Compaction, ...]
    usage: Usage | None


class ResponseCancel(Struct, frozen=True, kw_only=True):
    """response_id None: whatever is active on the lane."""

    response_id: str | None = None
    stream_id: Any = None


class ResponseSteer(Struct, frozen=True, kw_only=True):
    previous_response_id: str | None = None
    input: Raw = ABSENT
    stream_id: Any = None


class FollowFrame(Struct, frozen=True, kw_only=True):
    """Ours: send a response's events on a lane of this socket, from the one behind `starting_after` on (−1: all)."""

    response_id: str
    starting_after: Annotated[int, Meta(ge=-1)] = -1
    stream_id: Any = None


ClientFrame = ResponseCreate | ResponseCancel | ResponseSteer | FollowFrame

# ── what the server sends ────────────────────────────────────────────────────────────────────────────────────────


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """cached_tokens: restored from a checkpoint. cache_write_tokens: newly checkpointed."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ErrorDetail(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    type: str = "invalid_request_error"
    param: str | None = None


class IncompleteDetails(Struct, frozen=True):
    reason: str


class EchoText(Struct, frozen=True):
    """format: as the client sent it."""

    format: TextFormat = TextFormat(type="text")


encode_body = msgspec.json.Encoder().encode
PLAIN_TEXT = Raw(encode_body(EchoText()))
AUTO = Raw(b'"auto"')


class Echo(Struct, frozen=True, kw_only=True):
    """Of a create body what the response repeats and may be long, as JSON."""

    instructions: Raw
    prompt_cache_key: Raw
    safety_identifier: Raw
    text: Raw
    tool_choice: Raw
    tools: tuple[Raw, ...]
    user: Raw


def echo(create: ResponseCreate, tools: tuple[Raw, ...]) -> Echo:
    """Takes as long as its texts: for the thread that reads large messages."""
    form = None if create.text is None else create.text.format
    return Echo(
        instructions=_json(create.instructions),
        prompt_cache_key=_json(create.prompt_cache_key),
        safety_identifier=_json(create.safety_identifier),
        text=PLAIN_TEXT if form is None else _json(EchoText(form)),
        tool_choice=AUTO if create.tool_choice is None else _json(create.tool_choice),
        tools=tools,
        user=_json(create.user),
    )


def _json(value: Any) -> Raw:
    return ABSENT if value is None else Raw(encode_body(value))


class ResponseBody(Struct, frozen=True, kw_only=True):
    """The `response` object. status: in_progress, queued, completed, incomplete, failed or cancelled. Times: Unix seconds.

    What only echoes the request is JSON already, however long: the object is told several times, on the thread that serves
    sockets.
    stop_sequence (not in the standard): the stop string that ended the text; left out if none did.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    completed_at: int | None = None
    background: bool = False
    conversation: ConversationName | None = None
    error: ErrorDetail | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: Raw = ABSENT
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: tuple[ResponseItem, ...] = ()
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: Raw = ABSENT
    reasoning: ReasoningConfig = ReasoningConfig()
    safety_identifier: Raw = ABSENT
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: Raw = PLAIN_TEXT
    tool_choice: Raw = AUTO
    tools: tuple[Raw, ...] = ()
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: Usage | None = None
    user: Raw = ABSENT
    stop_sequence: str | UnsetType = UNSET


def usage(*, prompt: int, cached: int, written: int, output: int, reasoning: int) -> Usage:
    """Usage with every detail present: clients refuse `{}`."""
    return Usage(
        input_tokens=prompt,
        input_tokens_details=InputTokensDetails(cached, written),
        output_tokens=output,
        output_tokens_details=OutputTokensDetails(reasoning),
        total_tokens=prompt + output,
    )
