"""What the REST endpoints share: whose request it is, and lists in pages as the standard has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from agentserve.config import is_loopback
from agentserve.errors import Forbidden, InvalidValue
from agentserve.http import json_response
from agentserve.interfaces import Principal
from agentserve.security import OWNER

T = TypeVar("T")

MAX_PAGE = 100


def principal_of(request: Request) -> Principal:
    return request.state.principal


def check_operator(request: Request) -> None:
    """Only who runs the server, from its own machine, may look at what all share, and change it. Raises Forbidden."""
    if principal_of(request).id != OWNER:
        raise Forbidden("only the server's own token may look at what all principals share", "token")
    peer = request.client
    if peer is None or not is_loopback(peer.host):
        raise Forbidden("only programs on the server's own machine may do this", "host")


def limit_of(request: Request) -> int:
    """`?limit=`, 20 without it. Raises InvalidValue."""
    raw = request.query_params.get("limit", "20")
    if not raw.isascii() or not raw.isdigit() or len(raw) > 6 or not 1 <= int(raw) <= MAX_PAGE:
        raise InvalidValue(f"got '{raw[:16]}'; accepted: 1 to {MAX_PAGE}", "limit")
    return int(raw)


def order_of(request: Request, default: str = "desc") -> str:
    """`?order=`. Raises InvalidValue."""
    order = request.query_params.get("order", default)
    if order not in ("asc", "desc"):
        raise InvalidValue(f"got '{order[:16]}'; accepted: asc, desc", "order")
    return order


def page_of(request: Request, rows: Sequence[T], id_of: Callable[[T], str | None]) -> Response:
    """The page of all `rows` (oldest first) that `order`, `limit` and `after` ask for. Raises InvalidValue."""
    limit = limit_of(request)
    ordered = list(rows) if order_of(request) == "asc" else list(rows)[::-1]
    after = request.query_params.get("after")
    if after is not None:
        place = next((i for i, row in enumerate(ordered) if id_of(row) == after), None)
        if place is None:
            raise InvalidValue("no item of this id in the list", "after")
        ordered = ordered[place + 1 :]
    return page(ordered[:limit], more=len(ordered) > limit, id_of=id_of)


def page(rows: Sequence[T], *, more: bool, id_of: Callable[[T], str | None]) -> Response:
    """A list as it is answered."""
    ends = (id_of(rows[0]), id_of(rows[-1])) if rows else (None, None)
    return json_response({"object": "list", "data": rows, "first_id": ends[0], "last_id": ends[1], "has_more": more})
