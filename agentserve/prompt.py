"""What a turn asks of the model: its whole context, as it is rendered, and what the answer must be."""

from __future__ import annotations

import asyncio

from agentserve.constraints.output import OutputRule
from agentserve.constraints.rules import enforces
from agentserve.context import Context, LocalResponses, resolve
from agentserve.fields import fields_named
from agentserve.interfaces import RenderRequest
from agentserve.request import TurnRequest
from agentserve.services import Services

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


async def count_tokens(request: TurnRequest, services: Services) -> int:
    """Tokens of the context that a turn of this request would have. Raises ApiError, TurnFailure."""
    context = await resolve(request, services, LocalResponses())
    loop = asyncio.get_running_loop()
    rendered = await loop.run_in_executor(services.threads, services.text.render, render_request(request, context, services))
    return len(rendered.ids)
