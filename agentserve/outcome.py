"""What a turn comes to: why it is incomplete, and the row that is stored of it. Pure functions; turn.py calls them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from agentserve.context import Context
from agentserve.interfaces import StoredResponse
from agentserve.prompt import Prompt
from agentserve.protocol.responses import ResponseBody, encode_body
from agentserve.replay import Cut, encode_cuts
from agentserve.request import TurnRequest
from agentserve.session.lineage import first_words
from agentserve.token_stream import TokenStream
from agentserve.worker.messages import TurnFinished


def why_incomplete(outcome: TurnFinished, stream: TokenStream, *, cancelled: bool, steered: bool) -> str | None:
    """Reason in the words of the protocol; None if the answer is whole. cancelled, steered: by a client."""
    reason = {"length": "max_output_tokens", "cancelled": "cancelled"}.get(outcome.reason)
    if cancelled:
        return reason
    if stream.enough and not stream.steered:
        return None
    return "steered" if stream.steered or (steered and reason == "cancelled") else reason


def stored_row(
    request: TurnRequest, context: Context, prompt: Prompt, body: ResponseBody, generated: np.ndarray, cuts: Sequence[Cut]
) -> StoredResponse:
    """generated: u32le [n]. cuts: how the events were cut, see replay.py."""
    rendered = prompt.rendered
    return StoredResponse(
        id=request.id,
        principal=request.principal.id,
        session=context.session,
        parent=None if context.parent is None else context.parent.id,
        model=request.model,
        status=body.status,
        created_at=float(request.created_at),
        completed_at=time.time(),
        instructions=request.create.instructions,
        tools=context.inherited_tools or encode_body(request.echo.tools),
        input=context.own,
        output=body.output,
        body=encode_body(body),
        prompt_ids=rendered.ids.astype("<u4").tobytes(),
        generated_ids=generated.tobytes(),
        idempotency_key=request.idempotency_key,
        request_digest=request.digest if request.idempotency_key is not None else None,
        context_items=len(context.items),
        own_tokens=first_words(prompt.request.items, rendered),
        follows=context.follows,
        conversation=request.conversation,
        in_conversation=context.conversation,
        stream=encode_cuts(cuts),
    )


def nothing(turn_id: str, prompt_tokens: int) -> TurnFinished:
    """The outcome of a turn that was cancelled before the worker had it."""
    return TurnFinished(
        turn_id=turn_id,
        reason="cancelled",
        prompt_tokens=prompt_tokens,
        output_tokens=0,
        reused_tokens=0,
        written_tokens=0,
        queue_s=0.0,
        restore_s=0.0,
        prefill_s=0.0,
        ttft_s=None,
        decode_s=0.0,
    )
