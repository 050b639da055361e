"""What a turn asks of the model: its whole context, as it is rendered, and what the answer must be."""

from __future__ import annotations

import asyncio
from asyncio import Future
from dataclasses import replace

from agentserve.constraints.output import OutputRule
from agentserve.constraints.rules import enforces
from agentserve.context import Context, LocalResponses, resolve
from agentserve.errors import TurnFailure
from agentserve.fields import fields_named
from agentserve.interfaces import Rendered, RenderRequest
from agentserve.request import TurnRequest
from agentserve.services import Services
from agentserve.truncation import exchanges, fewest_dropped, without_oldest

MOST_CONTEXT = 4 << 20
"""Tokens that are rendered at most while no worker has said how many its model takes."""


async def output_rule(request: TurnRequest, context: Context, services: Services) -> OutputRule | None:
    """What the answer must be; None if anything is right. Raises ApiError for what cannot be enforced."""
    form, choice = request.form, request.tool_choice
    if not request.generate or not enforces(form, choice, context.tools):
        return None
    one_call = request.create.parallel_tool_calls is False

    def make() -> OutputRule | None:
        return services.rules.rule(form, choice, context.tools, one_call=one_call, check=services.text.check_rule)

    with fields_named(request.field_names):
        return await asyncio.get_running_loop().run_in_executor(services.threads, make)


def render_request(request: TurnRequest, context: Context, services: Services, rule: OutputRule | None = None) -> RenderRequest:
    """The whole context of a turn, as it is rendered. Tools that may not be called are still part of it."""
    hello = services.worker.hello
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


async def render(
    request: TurnRequest, context: Context, services: Services, rule: OutputRule | None = None
) -> tuple[RenderRequest, Rendered]:
    """The context in tokens, and what was rendered: with `truncation: "auto"` as much of it as fits. Raises TurnFailure."""
    loop, hello = asyncio.get_running_loop(), services.worker.hello
    whole = render_request(request, context, services, rule)

    def run(wanted: RenderRequest) -> Future[Rendered]:
        return loop.run_in_executor(services.threads, services.text.render, wanted)

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
    _, rendered = await render(request, await resolve(request, services, LocalResponses()), services)
    return len(rendered.ids)
