"""Wire Structs of the events that the server sends, standard ones and our `agentserve.*` ones.

`sequence_number` counts from 0 per response; `stream_id` is left out unless the client named a lane.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from agentserve.protocol.items import Part, ResponseItem
from agentserve.protocol.responses import ErrorDetail, ResponseBody


class Event(Struct, frozen=True, kw_only=True):
    """Common to all events of a response."""

    sequence_number: int
    stream_id: str | UnsetType = UNSET


class _Lifecycle(Event, frozen=True, kw_only=True):
    response: ResponseBody


class Created(_Lifecycle, frozen=True, kw_only=True, tag="response.created"):
    pass


class Queued(_Lifecycle, frozen=True, kw_only=True, tag="response.queued"):
    pass


class InProgress(_Lifecycle, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class Completed(_Lifecycle, frozen=True, kw_only=True, tag="response.completed"):
    pass


class Incomplete(_Lifecycle, frozen=True, kw_only=True, tag="response.incomplete"):
    pass


class Failed(_Lifecycle, frozen=True, kw_only=True, tag="response.failed"):
    pass


class OutputItemAdded(Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: ResponseItem


class OutputItemDone(Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: ResponseItem


class ContentPartAdded(Event, frozen=True, kw_only=True, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int
    part: Part


class ContentPartDone(Event, frozen=True, kw_only=True, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int
    part: Part


class OutputTextDelta(Event, frozen=True, kw_only=True, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: tuple[Any, ...] = ()


class OutputTextDone(Event, frozen=True, kw_only=True, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: tuple[Any, ...] = ()


class ReasoningTextDelta(Event, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(Event, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    content_index: int
    text: str


class FunctionCallArgumentsDelta(Event, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class FunctionCallArgumentsDone(Event, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomToolCallInputDelta(Event, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    item_id: str
    output_index: int
    delta: str


class CustomToolCallInputDone(Event, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    item_id: str
    output_index: int
    input: str


# ── ours, only for a client that asked ───────────────────────────────────────────────────────────────────────────


class PrefillProgress(Event, frozen=True, kw_only=True, tag="agentserve.prefill.progress"):
    """Prompt tokens in the state so far; `cached` of them were restored."""

    response_id: str
    processed: int
    total: int
    cached: int
    queued: int
    eta_ms: int


class CheckpointUsed(Struct, frozen=True):
    kind: str
    position: int


class DivergencePart(Struct, frozen=True, kw_only=True):
    """before, after: what stood there and what stands there now, in words (never the text itself unless short and asked)."""

    token_index: int
    item_index: int | None
    cause: str
    before: str | None = None
    after: str | None = None


class NormalisedPart(Struct, frozen=True, kw_only=True):
    """names: what changed the context before the model saw it. saved_tokens: reused ones that could not have been reused
    otherwise; None if the contexts that they come from are no longer in memory."""

    names: tuple[str, ...]
    saved_tokens: int | None


class CacheReport(Event, frozen=True, kw_only=True, tag="agentserve.cache.report"):
    response_id: str
    prompt_tokens: int
    reused_tokens: int
    restored_from: str | None
    checkpoint: CheckpointUsed | None
    divergence: DivergencePart | None = None
    ignored_tools: tuple[str, ...] = ()
    normalised: NormalisedPart | None = None


class DeadlineReport(Event, frozen=True, kw_only=True, tag="agentserve.deadline"):
    """status: on_track, at_risk, met or missed."""

    response_id: str
    deadline_ms: int
    predicted_ttft_ms: int | None
    elapsed_ms: int
    status: str


# ── outside a response ───────────────────────────────────────────────────────────────────────────────────────────


class ErrorFrame(Struct, frozen=True, kw_only=True, tag="error"):
    """A refusal. `code`, `message` and `param` stand at the top too, where the standard's SSE error has them."""

    status: int
    error: ErrorDetail
    stream_id: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    sequence_number: int | UnsetType = UNSET


class SteerError(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    type: str = "invalid_request_error"


class SteerName(Struct, frozen=True, kw_only=True):
    """id: of one submission. previous_response_id: the response that it steers."""

    id: str
    previous_response_id: str


class SteerEcho(Struct, frozen=True, kw_only=True):
    """A submission that comes back. id: if it was accepted before."""

    id: str | UnsetType = UNSET
    previous_response_id: str
    input: Any


class RequiredInput(Struct, frozen=True, kw_only=True):
    """Which result of a call is awaited."""

    type: str
    call_id: str
    name: str | UnsetType = UNSET


class SteerAccepted(Struct, frozen=True, kw_only=True, tag="response.steer.accepted"):
    steer: SteerName
    sequence_number: int = 0
    stream_id: str | UnsetType = UNSET


class SteerPending(Struct, frozen=True, kw_only=True, tag="response.steer.pending"):
    """The response ended with calls; the input is kept for the turn that brings their results."""

    steer: SteerName
    required_input: tuple[RequiredInput, ...]
    reason: str = "waiting_for_required_input"
    sequence_number: int = 0
    stream_id: str | UnsetType = UNSET


class SteerFailed(Struct, frozen=True, kw_only=True, tag="response.steer.failed"):
    error: SteerError
    steer: SteerEcho
    sequence_number: int = 0
    stream_id: str | UnsetType = UNSET


def type_of(event: Struct) -> str:
    """The wire's `type` of an event."""
    return str(type(event).__struct_config__.tag)
