"""Wire Structs of Chat Completions, and its messages → context items. Images and audio are refused by name.

Unknown keys are ignored; a known key with a wrong value is an error that names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from agentserve.errors import InvalidValue, UnsupportedValue
from agentserve.protocol.decode import decode, decode_parts, kind_of
from agentserve.protocol.items import (
    CustomToolCall,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputText,
    Part,
    Reasoning,
    ReasoningText,
)
from agentserve.protocol.responses import ErrorDetail, Penalty, Probability, TurnOptions

# ── what a client asks ───────────────────────────────────────────────────────────────────────────────────────────


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """pattern, syntax, definition: as in Responses, for the types regex and grammar, which are not in the standard."""

    type: str = "text"
    json_schema: dict[str, Any] | None = None
    pattern: str | None = None
    syntax: str | None = None
    definition: str | None = None


class ChatCreate(Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`.

    chat_template_kwargs: other servers' switch for thinking, `{"enable_thinking": false}`; its other members are ignored.
    """

    messages: list[Raw]
    model: str | None = None
    tools: list[Raw] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    modalities: list[str] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    store: bool | None = None
    agentserve: TurnOptions | None = None


BEGUN = "an answer that is begun by the client is not supported"


class _Head(Struct, frozen=True):
    role: Any = None


class _Text(Struct, frozen=True, kw_only=True):
    """A message of system, developer, user or tool."""

    content: Raw = Raw(b"null")
    tool_call_id: str = ""


class _Function(Struct, frozen=True, kw_only=True):
    name: str
    arguments: str = "{}"


class _Custom(Struct, frozen=True, kw_only=True):
    name: str
    input: str = ""


class _Call(Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function", "custom"] = "function"
    function: _Function | None = None
    custom: _Custom | None = None


class _Assistant(Struct, frozen=True, kw_only=True):
    """reasoning_content, or `reasoning` as some clients call it: thinking that the client kept. prefix: begins the answer."""

    content: Raw = Raw(b"null")
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[_Call] | None = None
    function_call: Any = None
    audio: Any = None
    prefix: bool | None = None


def decode_messages(raws: list[Raw], *, max_items: int) -> tuple[Item, ...]:
    """`messages` as context items, oldest first, each where it stood. Raises InvalidValue, UnsupportedValue."""
    if not raws:
        raise InvalidValue("no messages; accepted: at least one", "messages")
    if len(raws) > max_items:
        raise InvalidValue(f"{len(raws)} messages, at most {max_items} are accepted", "messages")
    items: list[Item] = []
    for i, raw in enumerate(raws):
        items += _message(raw, f"messages[{i}]")
    return tuple(items)


def _message(raw: Raw, where: str) -> list[Item]:
    role = decode(raw, _Head, where).role
    if role in ("system", "developer", "user"):
        content = _content(decode(raw, _Text, where).content, f"{where}.content")
        return [Message(role=role, content=content)]
    if role == "assistant":
        return _assistant(decode(raw, _Assistant, where), where)
    if role == "tool":
        wire = decode(raw, _Text, where)
        if not wire.tool_call_id:
            raise InvalidValue("a tool message names the call that it answers", f"{where}.tool_call_id")
        content = _content(wire.content, f"{where}.content")
        output = content[0].text if len(content) == 1 else content
        return [FunctionCallOutput(call_id=wire.tool_call_id, output=output)]
    accepted = "accepted: system, developer, user, assistant, tool"
    if role == "function":
        raise UnsupportedValue(f"role 'function' is not supported; {accepted}", f"{where}.role")
    got = f"'{role[:64]}'" if isinstance(role, str) else f"`{kind_of(role)}`"
    raise InvalidValue(f"got {got}; {accepted}", f"{where}.role")


def _content(raw: Raw, where: str) -> tuple[Part, ...]:
    head = bytes(memoryview(raw)[:1])
    if head == b'"':
        return (InputText(decode(raw, str, where)),)
    if head == b"[":
        return decode_parts(raw, where)
    raise InvalidValue("Expected `str` or an array of content parts", where)


def _assistant(wire: _Assistant, where: str) -> list[Item]:
    if wire.function_call is not None:
        raise UnsupportedValue("'function_call' is not supported; accepted: tool_calls", f"{where}.function_call")
    if wire.audio is not None:
        raise UnsupportedValue("'audio' is not supported by this model; accepted: content", f"{where}.audio")
    if wire.prefix:
        raise UnsupportedValue(f"{BEGUN}; accepted: false", f"{where}.prefix")
    items: list[Item] = []
    thinking = wire.reasoning_content or (wire.reasoning if isinstance(wire.reasoning, str) else None)
    if thinking:
        items.append(Reasoning(content=(ReasoningText(thinking),)))
    content = () if bytes(memoryview(wire.content)[:1]) == b"n" else _content(wire.content, f"{where}.content")
    text = "".join(part.text for part in content) or wire.refusal or ""
    if text:
        items.append(Message(role="assistant", content=(OutputText(text),)))
    for i, call in enumerate(wire.tool_calls or ()):
        at = f"{where}.tool_calls[{i}]"
        if call.type == "function":
            if call.function is None:
                raise InvalidValue("missing", f"{at}.function")
            items.append(FunctionCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments))
        else:
            if call.custom is None:
                raise InvalidValue("missing", f"{at}.custom")
            items.append(CustomToolCall(call_id=call.id, name=call.custom.name, input=call.custom.input))
    return items or [Message(role="assistant", content=())]


# ── what the server sends ────────────────────────────────────────────────────────────────────────────────────────


class CalledFunction(Struct, frozen=True, kw_only=True):
    """arguments, input: the whole of it, or what came since the last chunk."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True, kw_only=True):
    """index: of the call within the answer, only in chunks."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledFunction | UnsetType = UNSET


class Said(Struct, frozen=True, kw_only=True):
    """The message of an answer, or what a chunk adds to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


class Logprobs(Struct, frozen=True, kw_only=True):
    content: tuple[Any, ...]
    refusal: None = None


class Choice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: Said | UnsetType = UNSET
    delta: Said | UnsetType = UNSET
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class PromptDetails(Struct, frozen=True, kw_only=True):
    """cached_tokens: restored from a checkpoint."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class ChatUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Completion(Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk of a streamed one. created: Unix seconds. usage UNSET: the client did not ask for it."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: ChatUsage | UnsetType | None = UNSET
    service_tier: str = "default"
    system_fingerprint: None = None


class ChatError(Struct, frozen=True):
    error: ErrorDetail
