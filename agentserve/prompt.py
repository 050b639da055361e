"""What a turn asks of the model: its whole context, as it is rendered, what the answer must be, and the worker's order."""

from __future__ import annotations

import asyncio
from asyncio import Future
from dataclasses import dataclass, replace

import numpy as np

from agentserve.constraints.output import OutputRule
from agentserve.constraints.rules import enforces
from agentserve.context import Context, LocalResponses, resolve
from agentserve.errors import TurnFailure
from agentserve.fields import fields_named
from agentserve.interfaces import Rendered, RenderRequest, Text
from agentserve.normalise import head_length
from agentserve.protocol.responses import Normaliser
from agentserve.request import TurnRequest
from agentserve.services import Services
from agentserve.truncation import exchanges, fewest_dropped, without_oldest
from agentserve.worker.messages import StartTurn

MOST_CONTEXT = 4 << 20
"""Tokens that are rendered at most while no worker has said how many its model takes."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given. request: as it was rendered. normalised: what was done to the context before.

    as_sent: uint32 ids of how the context begins as its client sent it, up to its first message, where that is something else;
    None if it is the same, or cannot be rendered.
    """

    request: RenderRequest
    rendered: Rendered
    normalised: tuple[Normaliser, ...] = ()
    as_sent: np.ndarray | None = None


async def output_rule(request: TurnRequest, context: Context, services: Services) -> OutputRule | None:
    """What the answer must be; None if anything is right. Raises ApiError for what cannot be enforced."""
    form, choice = request.form, request.tool_choice
    if not request.generate or not enforces(form, choice, context.tools):
        return None
    one_call = request.create.parallel_tool_calls is False

    def make() -> OutputRule | None:
        check = services.served(request.model).text.check_rule
        return services.rules.rule(form, choice, context.tools, one_call=one_call, check=check)

    with fields_named(request.field_names):
        return await asyncio.get_running_loop().run_in_executor(services.threads, make)


def render_request(request: TurnRequest, context: Context, services: Services, rule: OutputRule | None = None) -> RenderRequest:
    """The whole context of a turn, as it is rendered. Tools that may not be called are still part of it."""
    hello = services.served(request.model).worker.hello
    return RenderRequest(
        instructions=request.create.instructions,
        tools=context.tools,
        items=context.items,
        retain=request.options.retain,
        thinking=request.thinking,
        salt=request.principal.salt,
        prompt=request.generate,
        max_tokens=MOST_CONTEXT if hello is None else hello.max_context,
        rule=rule,
    )


async def render(request: TurnRequest, context: Context, services: Services, rule: OutputRule | None = None) -> Prompt:
    """The context in tokens, and what was rendered: with `truncation: "auto"` as much of it as fits. Raises TurnFailure."""
    sent = render_request(request, context, services, rule)
    if not request.normalisers.names:
        return Prompt(*await _fitting(request, sent, services))

    def normalise() -> tuple[RenderRequest, tuple[Normaliser, ...], np.ndarray | None]:
        shown, changed = request.normalisers.apply(sent)
        return shown, changed, _beginning(sent, services.served(request.model).text) if changed else None

    shown, changed, as_sent = await asyncio.get_running_loop().run_in_executor(services.threads, normalise)
    return Prompt(*await _fitting(request, shown, services), changed, as_sent)


def _beginning(sent: RenderRequest, text: Text) -> np.ndarray | None:
    """Ids of a context up to its first message. With that one, since templates refuse a context without any."""
    first = replace(sent, items=sent.items[: head_length(sent.items) + 1], prompt=False, rule=None)
    try:
        return text.render(first).ids
    except TurnFailure:
        return None


async def _fitting(request: TurnRequest, whole: RenderRequest, services: Services) -> tuple[RenderRequest, Rendered]:
    loop, model = asyncio.get_running_loop(), services.served(request.model)
    hello = model.worker.hello

    def run(wanted: RenderRequest) -> Future[Rendered]:
        return loop.run_in_executor(services.threads, model.text.render, wanted)

    if request.create.truncation != "auto" or hello is None:
        return whole, await run(whole)
    answer = min(request.create.max_output_tokens or services.config.turn.max_output_tokens, hello.max_context // 4)
    starts = exchanges(whole.items)

    async def fits(dropped: int) -> tuple[RenderRequest, Rendered] | None:
        wanted = replace(whole, items=without_oldest(whole.items, starts, dropped))
        try:
            rendered = await run(wanted)
        except TurnFailure as failure:
            if failure.code != "context_length_exceeded":
                raise
            return None
        return (wanted, rendered) if len(rendered.ids) + answer <= hello.max_context else None

    found = await fits(0) or await fewest_dropped(len(starts), fits)
    return found or (whole, await run(whole))


async def count_tokens(request: TurnRequest, services: Services) -> int:
    """Tokens of the context that a turn of this request would have. Raises ApiError, TurnFailure."""
    prompt = await render(request, await resolve(request, services, LocalResponses()), services)
    return len(prompt.rendered.ids)


def start_turn(request: TurnRequest, rendered: Rendered, services: Services, *, session: str, deadline_ms: int) -> StartTurn:
    """What the worker is told."""
    hello = services.served(request.model).worker.hello
    room = None if hello is None else hello.max_context - len(rendered.ids)
    options = request.options
    return StartTurn(
        turn_id=request.id,
        ids=rendered.ids.astype("<u4").tobytes(),
        cuts=rendered.cuts,
        markers=rendered.markers,
        salt=request.principal.salt,
        session=session,
        sampling=request.sampling(services.config, room),
        accepted_at=request.accepted_at,
        deadline_s=deadline_ms / 1000,
        on_miss="continue" if options.ttft_deadline_ms is None else options.on_miss,
        priority=options.priority,
        generate=request.generate,
        grammar=rendered.grammar,
    )
