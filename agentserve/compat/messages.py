"""Anthropic's Messages over the turn that Responses uses: its body → a TurnRequest, the turn's events → its events.

Decides nothing about a turn. Shapes and the content blocks are in protocol/messages.py.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response

from agentserve.config import Config
from agentserve.fields import fields_named
from agentserve.http import FAILED_STATUS, answer_turn, count, headers_of, json_response, read_as
from agentserve.protocol import messages as ms
from agentserve.protocol import server_events as ev
from agentserve.protocol.codec import messages_error, sse
from agentserve.protocol.decode import convert
from agentserve.protocol.items import Compaction, CustomToolCall, FunctionCall, Message, Reasoning, ResponseItem, encode_items
from agentserve.protocol.responses import ErrorDetail, ReasoningConfig, ResponseBody, ResponseCreate, TextConfig, TextFormat
from agentserve.request import TurnRequest, accept
from agentserve.services import Services
from agentserve.text.messages import call_arguments

FIELDS = {"text.format": "output_config.format", "input": "messages", "stop": "stop_sequences"}
OUR_METADATA = ("agentserve.", "idempotency_key")


async def create_message(request: Request, services: Services) -> Response:
    """`POST /v1/messages`."""
    turn = await _accept(request, services)
    return await answer_turn(request, turn, services, MessagesWire(turn.create.model))


async def count_message_tokens(request: Request, services: Services) -> Response:
    """`POST /v1/messages/count_tokens`: by the renderer that a turn uses."""
    return json_response(ms.TokenCount(await count(await _accept(request, services), services)))


async def _accept(request: Request, services: Services) -> TurnRequest:
    principal, headers = request.state.principal, headers_of(request)

    def make(body: ms.MessagesCreate) -> TurnRequest:
        with fields_named(FIELDS):
            create, items = to_create(body, services.config)
        return accept(create, principal, services.config, headers, websocket=False, items=items, field_names=FIELDS)

    return await read_as(request, services, ms.MessagesCreate, make)


def to_create(body: ms.MessagesCreate, config: Config) -> tuple[ResponseCreate, tuple[Any, ...]]:
    """The create body that asks the same, and its items. Raises InvalidValue, UnsupportedValue."""
    items = ms.decode_messages(body.messages, max_items=config.limits.items)
    choice = body.tool_choice
    thinking = body.thinking is not None and body.thinking.type != "disabled"
    metadata = body.metadata if isinstance(body.metadata, dict) else {}
    form = None if body.output_config is None else body.output_config.format
    create = ResponseCreate(
        model=body.model,
        input=Raw(encode_items(items)),
        instructions=ms.decode_system(body.system),
        tools=ms.decode_tools(body.tools),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        stream=body.stream,
        max_output_tokens=body.max_tokens,
        metadata={k: v for k, v in metadata.items() if isinstance(v, str) and k.startswith(OUR_METADATA)} or None,
        reasoning=None if thinking else ReasoningConfig(effort="none"),
        text=None if form is None else TextConfig(format=_format(form)),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
        agentserve=body.agentserve,
    )
    return create, items


def _format(form: dict[str, Any]) -> TextFormat:
    """A schema that is asked for here is to be kept exactly."""
    if form.get("type") == "json_schema":
        form = {**form, "strict": True}
    return convert(form, TextFormat, "text.format")


def _tool_choice(choice: ms.Choice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "name": choice.name}
    return {"any": "required"}.get(choice.type, choice.type)


class MessagesWire:
    """Implements http.Wire. One content block per output item, in order.

    model: the name that the client used, None if it used none. Under another name Claude Code takes the answer for another
    model's, and leaves its thinking out of what it sends back.
    """

    def __init__(self, model: str | None = None) -> None:
        self._model = model

    def event(self, event: ev.Event) -> bytes:
        match event:
            case ev.OutputTextDelta():
                return sse(ms.BlockDelta(index=event.output_index, delta=ms.TextDelta(event.delta)))
            case ev.ReasoningTextDelta():
                return sse(ms.BlockDelta(index=event.output_index, delta=ms.ThinkingDelta(event.delta)))
            case ev.FunctionCallArgumentsDelta() | ev.CustomToolCallInputDelta():
                return sse(ms.BlockDelta(index=event.output_index, delta=ms.InputDelta(event.delta)))
            case ev.OutputItemAdded():
                return sse(ms.BlockStart(index=event.output_index, content_block=_block(event.item, begun=True)))
            case ev.OutputItemDone():
                stop = sse(ms.BlockStop(index=event.output_index))
                if isinstance(event.item, Reasoning):
                    signature = ms.SignatureDelta(event.item.id or "")
                    return sse(ms.BlockDelta(index=event.output_index, delta=signature)) + stop
                return stop
            case ev.Created():
                model = self._model or event.response.model
                return sse(ms.MessageStart(ms.Answer(id=_id(event.response), model=model)))
            case ev.InProgress() | ev.Queued():
                return sse(ms.Ping())
            case ev.Completed() | ev.Incomplete():
                reason, stopped = stop_reason(event.response)
                ending = ms.Ending(stop_reason=reason, stop_sequence=stopped)
                return sse(ms.MessageDelta(delta=ending, usage=_usage(event.response))) + sse(ms.MessageStop())
            case ev.Failed() if event.response.error is not None:
                error = event.response.error
                return sse(messages_error(error.message, FAILED_STATUS.get(error.code, 500), error.code))
        return b""

    def whole(self, body: ResponseBody) -> Response:
        reason, stopped = stop_reason(body)
        answer = ms.Answer(
            id=_id(body),
            model=self._model or body.model,
            content=[_block(item) for item in body.output],
            stop_reason=reason,
            stop_sequence=stopped,
            usage=_usage(body),
        )
        return json_response(answer)

    def failed(self, error: ErrorDetail, status: int) -> Response:
        return json_response(messages_error(error.message, status, error.code), status)


def stop_reason(body: ResponseBody) -> tuple[str, str | None]:
    """Why an answer ended, in this API's words, and the stop sequence that ended it."""
    if body.incomplete_details is not None and body.incomplete_details.reason == "max_output_tokens":
        return "max_tokens", None
    if body.stop_sequence is not UNSET:
        return "stop_sequence", str(body.stop_sequence)
    calls = any(isinstance(item, FunctionCall | CustomToolCall) for item in body.output)
    return ("tool_use" if calls else "end_turn"), None


def _block(item: ResponseItem, *, begun: bool = False) -> ms.Block:
    """An output item as a content block; one that has only begun is empty."""
    if isinstance(item, Message):
        return ms.TextBlock("" if begun else item.text)
    if isinstance(item, Reasoning):
        return ms.ThinkingBlock("", "") if begun else ms.ThinkingBlock(item.text, item.id or "")
    assert not isinstance(item, Compaction)  # nothing in this API asks for one
    return ms.ToolUseBlock(item.call_id, item.name, {} if begun else call_arguments(item))


def _id(body: ResponseBody) -> str:
    """Under its id the same answer can be read at `/v1/responses/resp_…`."""
    return "msg_" + body.id.removeprefix("resp_")


def _usage(body: ResponseBody) -> ms.MessagesUsage:
    used = body.usage
    if used is None:
        return ms.MessagesUsage()
    cached = used.input_tokens_details.cached_tokens
    return ms.MessagesUsage(
        input_tokens=used.input_tokens - cached, cache_read_input_tokens=cached, output_tokens=used.output_tokens
    )
