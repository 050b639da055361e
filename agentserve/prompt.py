"""A turn's whole context, as it is rendered."""

from __future__ import annotations

import asyncio

from agentserve.context import Context, LocalResponses, resolve
from agentserve.interfaces import RenderRequest
from agentserve.request import TurnRequest
from agentserve.services import Services

MOST_CONTEXT = 4 << 20
"""Tokens that are rendered at most while no worker has said how many its model takes."""


def render_request(request: TurnRequest, context: Context, services: Services) -> RenderRequest:
    """The whole context of a turn, as it is rendered."""
    hello = services.worker.hello
    return RenderRequest(
        instructions=request.create.instructions,
        tools=context.tools if request.tool_choice == "auto" else (),
        items=context.items,
        retain=request.options.retain,
        thinking=request.thinking,
        salt=request.principal.salt,
        prompt=request.generate,
        max_tokens=MOST_CONTEXT if hello is None else hello.max_context,
    )


async def count_tokens(request: TurnRequest, services: Services) -> int:
    """Tokens of the context that a turn of this request would have. Raises ApiError, TurnFailure."""
    context = await resolve(request, services, LocalResponses())
    loop = asyncio.get_running_loop()
    rendered = await loop.run_in_executor(services.threads, services.text.render, render_request(request, context, services))
    return len(rendered.ids)
