"""`POST /v1/responses/compact`: the model sums a conversation up, and the client goes on with the summary in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.context import LocalResponses, resolve
from agentserve.errors import InvalidValue, ServerError
from agentserve.events import new_id
from agentserve.http import ResponsesWire, answer_turn, error_response, headers_of, json_response, read_as
from agentserve.interfaces import Principal
from agentserve.protocol.items import Compaction, Item, Message
from agentserve.protocol.responses import CompactedResponse, ResponseBody, ResponseCreate
from agentserve.request import TurnRequest, accept
from agentserve.room import question, summing_up
from agentserve.sealing import is_summary
from agentserve.services import Services


async def compact(request: Request, services: Services) -> Response:
    """Body: that of a create. Answers with the user's messages and one compaction item."""
    principal: Principal = request.state.principal
    headers = headers_of(request)

    def make(create: ResponseCreate) -> TurnRequest:
        return accept(summing_up(create), principal, services.config, headers, websocket=False)

    turn = await read_as(request, services, ResponseCreate, make)
    context = await resolve(turn, services, LocalResponses())
    if not context.items:
        raise InvalidValue("nothing to compact: there are no items", "input")
    asked = replace(turn, items=(*turn.items, question()), aside=True)
    return await answer_turn(request, asked, services, _Compacted(services, principal, context.items))


class _Compacted(ResponsesWire):
    """Writes the answer of the turn that sums up."""

    def __init__(self, services: Services, principal: Principal, items: Sequence[Item]) -> None:
        self._services = services
        self._principal = principal
        self._kept = tuple(i for i in items if isinstance(i, Message) and i.role == "user" and not is_summary(i))

    def whole(self, body: ResponseBody) -> Response:
        summary = "".join(item.text for item in body.output if isinstance(item, Message)).strip()
        if not summary and body.incomplete_details is not None and body.incomplete_details.reason == "max_output_tokens":
            what = "no room for a summary behind the thinking; accepted: more tokens, or reasoning.effort 'none'"
            return error_response(InvalidValue(what, "max_output_tokens"))
        if not summary:
            return error_response(ServerError("the model wrote no summary; retry"))
        sealed = self._services.seal.seal(self._principal.id, "compaction", summary)
        kept = tuple(msgspec.structs.replace(m, id=m.id or new_id("msg"), status="completed") for m in self._kept)
        output = (*kept, Compaction(id=new_id("cmp"), encrypted_content=sealed))
        made = CompactedResponse(id=body.id, created_at=body.created_at, output=output, usage=body.usage)
        return json_response(made)
