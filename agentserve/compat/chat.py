"""Chat Completions over the turn that Responses uses: its body → a TurnRequest, the turn's events → its chunks.

Decides nothing about a turn. Shapes and the messages are in protocol/chat.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response

from agentserve.config import Config
from agentserve.errors import InvalidValue, UnsupportedValue
from agentserve.fields import fields_named
from agentserve.http import answer_turn, headers_of, json_response, read_as
from agentserve.protocol import server_events as ev
from agentserve.protocol.chat import (
    BEGUN,
    CalledFunction,
    ChatCreate,
    ChatError,
    ChatUsage,
    Choice,
    Completion,
    CompletionDetails,
    Logprobs,
    PromptDetails,
    ResponseFormat,
    Said,
    ToolCall,
    decode_messages,
)
from agentserve.protocol.codec import encode
from agentserve.protocol.decode import convert
from agentserve.protocol.items import CustomToolCall, FunctionCall, Message, Reasoning, encode_items
from agentserve.protocol.responses import ErrorDetail, ReasoningConfig, ResponseBody, ResponseCreate, TextConfig, TextFormat
from agentserve.request import TurnRequest, accept
from agentserve.services import Services

WAITING = b": waiting\n\n"
"""A comment: resets idle timers, and no client shows it."""
DONE = b"data: [DONE]\n\n"
FIELDS = {"text.format.schema": "response_format.json_schema.schema", "text.format": "response_format", "input": "messages"}


async def create_completion(request: Request, services: Services) -> Response:
    """`POST /v1/chat/completions`."""
    principal, headers = request.state.principal, headers_of(request)

    def make(chat: ChatCreate) -> tuple[TurnRequest, bool]:
        with fields_named(FIELDS):
            create, items = to_create(chat, services.config)
        turn = accept(create, principal, services.config, headers, websocket=False, items=items, field_names=FIELDS)
        return turn, chat.stream_options is not None and chat.stream_options.include_usage

    turn, include_usage = await read_as(request, services, ChatCreate, make)
    wire = ChatWire(turn.create.model, include_usage=include_usage)
    return await answer_turn(request, turn, services, wire)


def to_create(chat: ChatCreate, config: Config) -> tuple[ResponseCreate, tuple[Any, ...]]:
    """The create body that asks the same, and its items. Raises InvalidValue, UnsupportedValue."""
    _refuse_unsupported(chat)
    items = decode_messages(chat.messages, max_items=config.limits.items)
    no_thinking = (chat.chat_template_kwargs or {}).get("enable_thinking") is False
    effort = "none" if no_thinking else chat.reasoning_effort
    form = chat.response_format
    create = ResponseCreate(
        model=chat.model,
        input=Raw(encode_items(items)),
        tools=chat.tools,
        tool_choice=_tool_choice(chat.tool_choice),
        parallel_tool_calls=chat.parallel_tool_calls,
        store=chat.store,
        stream=chat.stream,
        include=["message.output_text.logprobs"] if chat.logprobs else None,
        max_output_tokens=chat.max_completion_tokens or chat.max_tokens,
        metadata=chat.metadata,
        prompt_cache_key=chat.prompt_cache_key,
        reasoning=None if effort is None else ReasoningConfig(effort=effort),
        text=None if form is None else TextConfig(format=_format(form)),
        temperature=chat.temperature,
        top_p=chat.top_p,
        top_logprobs=chat.top_logprobs if chat.logprobs else None,
        user=chat.user,
        safety_identifier=chat.safety_identifier,
        top_k=None if chat.top_k == -1 else chat.top_k,
        min_p=chat.min_p,
        seed=chat.seed,
        repetition_penalty=chat.repetition_penalty,
        presence_penalty=chat.presence_penalty,
        frequency_penalty=chat.frequency_penalty,
        stop=chat.stop or None,
        agentserve=chat.agentserve,
    )
    return create, items


def _refuse_unsupported(chat: ChatCreate) -> None:
    if chat.n not in (None, 1):
        raise UnsupportedValue(f"{chat.n} choices are not supported; accepted: 1", "n")
    if chat.logit_bias:
        raise UnsupportedValue("a bias is not supported; accepted: none", "logit_bias")
    if chat.functions:
        raise UnsupportedValue("'functions' is not supported; accepted: tools", "functions")
    if chat.continue_final_message:
        raise UnsupportedValue(f"{BEGUN}; accepted: false", "continue_final_message")
    if chat.add_generation_prompt is False:
        raise UnsupportedValue(f"{BEGUN}; accepted: true", "add_generation_prompt")
    if "audio" in (chat.modalities or ()):
        raise UnsupportedValue("'audio' is not supported; accepted: text", "modalities")


def _tool_choice(choice: Any) -> Any:
    """A named choice has its name one level deeper here."""
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        return {"type": "function", "name": choice["function"].get("name")}
    return choice


def _format(form: ResponseFormat) -> TextFormat:
    """A schema and what belongs to it stand one level deeper here."""
    if form.type == "json_schema":
        if form.json_schema is None:
            raise InvalidValue("missing", "response_format.json_schema")
        return convert({**form.json_schema, "type": form.type}, TextFormat, "response_format.json_schema")
    return TextFormat(type=form.type, pattern=form.pattern, syntax=form.syntax, definition=form.definition)


class ChatWire:
    """Implements http.Wire.

    model: the name that the client used, None if it used none.
    include_usage: a last chunk with usage and no choices, as asked by `stream_options`.
    """

    def __init__(self, model: str | None = None, *, include_usage: bool = False) -> None:
        self._model = model
        self._include_usage = include_usage
        self._head: dict[str, Any] = {}
        self._calls = -1

    def event(self, event: ev.Event) -> bytes:
        match event:
            case ev.OutputTextDelta():
                marks = Logprobs(content=event.logprobs) if event.logprobs else None
                return self._chunk(Said(content=event.delta), logprobs=marks)
            case ev.ReasoningTextDelta():
                return self._chunk(Said(reasoning_content=event.delta))
            case ev.FunctionCallArgumentsDelta():
                return self._call(ToolCall(index=self._calls, function=CalledFunction(arguments=event.delta)))
            case ev.CustomToolCallInputDelta():
                return self._call(ToolCall(index=self._calls, custom=CalledFunction(input=event.delta)))
            case ev.OutputItemAdded(item=FunctionCall() | CustomToolCall() as item):
                self._calls += 1
                return self._call(msgspec.structs.replace(_called(item), index=self._calls))
            case ev.Created():
                self._head = self._start(event.response)
                return self._chunk(Said(role="assistant", content="", refusal=None))
            case ev.InProgress() | ev.Queued():
                return WAITING
            case ev.Completed() | ev.Incomplete():
                return self._end(event.response)
            case ev.Failed() if event.response.error is not None:
                return _data(ChatError(event.response.error)) + DONE
        return b""

    def whole(self, body: ResponseBody) -> Response:
        texts = [item for item in body.output if isinstance(item, Message)]
        thinking = "".join(item.text for item in body.output if isinstance(item, Reasoning))
        calls = tuple(_called(item) for item in body.output if isinstance(item, FunctionCall | CustomToolCall))
        marks = tuple(m for item in texts for part in item.content for m in getattr(part, "logprobs", ()))
        message = Said(
            role="assistant",
            content="".join(item.text for item in texts) if texts or not calls else None,
            refusal=None,
            reasoning_content=thinking or UNSET,
            tool_calls=calls or UNSET,
        )
        choice = Choice(message=message, logprobs=Logprobs(content=marks) if marks else None, finish_reason=finish_reason(body))
        return json_response(Completion(object="chat.completion", choices=(choice,), usage=_usage(body), **self._start(body)))

    def failed(self, error: ErrorDetail, status: int) -> Response:
        return json_response(ChatError(error), status)

    def _start(self, body: ResponseBody) -> dict[str, Any]:
        """What all chunks have in common. Under its id the same answer can be read at `/v1/responses/resp_…`."""
        identity = "chatcmpl-" + body.id.removeprefix("resp_")
        return {"id": identity, "created": body.created_at, "model": self._model or body.model}

    def _chunk(self, delta: Said, *, logprobs: Logprobs | None = None, finish: str | None = None) -> bytes:
        choice = Choice(delta=delta, logprobs=logprobs, finish_reason=finish)
        usage = None if self._include_usage else UNSET
        return _data(Completion(object="chat.completion.chunk", choices=(choice,), usage=usage, **self._head))

    def _call(self, call: ToolCall) -> bytes:
        return self._chunk(Said(tool_calls=(call,)))

    def _end(self, body: ResponseBody) -> bytes:
        out = self._chunk(Said(), finish=finish_reason(body))
        if self._include_usage:
            out += _data(Completion(object="chat.completion.chunk", choices=(), usage=_usage(body), **self._head))
        return out + DONE


def finish_reason(body: ResponseBody) -> str:
    """Why an answer ended, in this API's words."""
    if body.incomplete_details is not None and body.incomplete_details.reason == "max_output_tokens":
        return "length"
    calls = any(isinstance(item, FunctionCall | CustomToolCall) for item in body.output)
    return "tool_calls" if calls else "stop"


def _called(item: FunctionCall | CustomToolCall) -> ToolCall:
    if isinstance(item, FunctionCall):
        function = CalledFunction(name=item.name, arguments=item.arguments)
        return ToolCall(id=item.call_id, type="function", function=function)
    return ToolCall(id=item.call_id, type="custom", custom=CalledFunction(name=item.name, input=item.input))


def _usage(body: ResponseBody) -> ChatUsage | None:
    used = body.usage
    if used is None:
        return None
    return ChatUsage(
        prompt_tokens=used.input_tokens,
        completion_tokens=used.output_tokens,
        total_tokens=used.total_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=used.input_tokens_details.cached_tokens),
        completion_tokens_details=CompletionDetails(reasoning_tokens=used.output_tokens_details.reasoning_tokens),
    )


def _data(value: msgspec.Struct) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
