"""How a context that is too long makes room: what the model is asked, and what goes on of the context.

A compaction that is made within a turn replaces everything before it: it carries, sealed, the context that goes on. That is
what system and developer messages said, the newest user messages, the summary, and what the model has not answered yet.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from agentserve.context import Context
from agentserve.errors import TurnFailure
from agentserve.events import new_id
from agentserve.prompt import Prompt, output_rule, render
from agentserve.protocol.items import (
    Compaction,
    CustomToolCallOutput,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
)
from agentserve.protocol.responses import ReasoningConfig, ResponseCreate
from agentserve.protocol.tool_choice import tool_choice
from agentserve.request import TurnRequest
from agentserve.sealing import Carried, Seal, is_summary, summary_message
from agentserve.services import Services

log = logging.getLogger(__name__)

MAX_SUMMARY_TOKENS = 2048
KEPT_BYTES_PER_TOKEN = 2
"""Of user messages that are kept, for each token of the threshold: they take about half of it, and less in most scripts."""
QUESTION = (
    "The conversation so far has to make room. Write what is needed to go on without it, as plain text and without calling a "
    "tool: what is to be done, what was decided and why, what was found out (names, paths, numbers), what is done, and what "
    "comes next. The user's own messages are kept and need no repetition."
)


def summing_up(create: ResponseCreate) -> ResponseCreate:
    """A create body, for the turn that sums its context up."""
    return msgspec.structs.replace(
        create,
        store=False,
        stream=None,
        background=None,
        generate=None,
        tool_choice="none",
        text=None,
        stop=None,
        conversation=None,
        context_management=None,
        max_output_tokens=min(create.max_output_tokens or MAX_SUMMARY_TOKENS, MAX_SUMMARY_TOKENS),
    )


def question() -> Message:
    """What is asked behind the whole context, so that everything before it is restored."""
    return Message(role="user", content=(InputText(QUESTION),))


def asking(request: TurnRequest, context: Context) -> tuple[TurnRequest, Context]:
    """The pass within a turn that sums its context up. It does not think: its tokens are for the summary."""
    create = msgspec.structs.replace(
        summing_up(msgspec.structs.replace(request.create, max_output_tokens=None)), reasoning=ReasoningConfig(effort="none")
    )
    asked = replace(
        request, id=new_id("resp"), create=create, tool_choice=tool_choice("none"), top_logprobs=None, idempotency_key=None
    )
    return asked, replace(context, items=(*context.items, question()))


async def make_room(
    request: TurnRequest,
    context: Context,
    prompt: Prompt,
    services: Services,
    said: Callable[[TurnRequest, Prompt], Awaitable[str]],
) -> tuple[Compaction, Context] | None:
    """Sum a context up that is over the threshold of `context_management`: the item that tells of it, and what goes on.

    said: what the model says to a prompt. None if there is nothing to do, or nothing comes of it: then the turn goes on from
    the context as it is. Raises TurnFailure.
    """
    hello = services.served(request.model).worker.hello
    threshold = request.compacts_at(None if hello is None else hello.max_context)
    if threshold is None or len(prompt.rendered.ids) < threshold:
        return None
    around = going_on(context.items, threshold)
    if around is None:
        return None
    asked, longer = asking(request, context)
    try:
        summary = await said(asked, await render(asked, longer, services, await output_rule(asked, longer, services)))
    except TurnFailure as failure:
        if failure.code != "context_length_exceeded":
            raise
        summary = ""
    log.info("context summed up response=%s tokens=%d summary=%d", request.id, len(prompt.rendered.ids), len(summary))
    return compacted(context, summary, around, services.seal, request.principal.id) if summary else None


def going_on(items: Sequence[Item], threshold: int) -> tuple[tuple[Item, ...], tuple[Item, ...]] | None:
    """What is kept before a summary and what stands behind it; None if there would be nothing to sum up."""
    at = _unanswered(items)
    room, kept = threshold * KEPT_BYTES_PER_TOKEN, []
    for item in reversed(items[:at]):
        if not isinstance(item, Message) or item.role == "assistant" or is_summary(item):
            continue
        if item.role == "user":
            room -= len(item.text.encode("utf-8", "surrogatepass"))
            if room < 0:
                continue
        kept.append(item)
    if len(kept) == at:
        return None
    return tuple(reversed(kept)), tuple(items[at:])


def _unanswered(items: Sequence[Item]) -> int:
    """Where what the model has not answered yet begins: the newest messages, or results with the calls that they are for."""
    at, results = len(items), False
    while at and not _said_by_model(items[at - 1]):
        at -= 1
        results = results or isinstance(items[at], FunctionCallOutput | CustomToolCallOutput)
    while results and at and _said_by_model(items[at - 1]):
        at -= 1
    return at


def _said_by_model(item: Item) -> bool:
    if isinstance(item, Message):
        return item.role == "assistant"
    return not isinstance(item, FunctionCallOutput | CustomToolCallOutput)


def compacted(
    context: Context, summary: str, around: tuple[tuple[Item, ...], tuple[Item, ...]], seal: Seal, principal: str
) -> tuple[Compaction, Context]:
    """The item that tells of it, and the context that goes on. around: see going_on."""
    name = new_id("cmp")
    kept, behind = around
    items = (*kept, summary_message(name, summary), *behind)
    sealed = seal.seal_context(principal, Carried(session=context.session, items=items))
    return Compaction(id=name, encrypted_content=sealed), replace(context, items=items)
