"""Between a client program and a server: passes every WebSocket message on, keeps a copy, and can lose what a socket holds.

What a client saw and sent is then known without asking the client. Plain GET requests are passed on too.
"""

from __future__ import annotations

import contextlib
import http
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve

from agentserve.cli.connect import Target

Frame = dict[str, Any]
HOP = frozenset(
    (
        "host",
        "connection",
        "upgrade",
        "sec-websocket-key",
        "sec-websocket-version",
        "sec-websocket-extensions",
        "content-length",
    )
)
"""Headers that belong to one hop."""


@dataclass(slots=True)
class Link:
    """One socket of the client. sent, received: by it, in order. upstream: its socket at the server, which may change."""

    upstream: ClientConnection
    sent: list[Frame] = field(default_factory=list)
    received: list[Frame] = field(default_factory=list)


class Relay:
    """url: what the client is told. target: how the server is reached through it.

    links: one for each socket that the client opened. forget: asked of each server frame before the client gets it; True
    gives the server a new socket in the place of the old one, with which all is lost that a server keeps per socket.
    """

    def __init__(self, server: Target, forget: Callable[[Frame], bool] = lambda frame: False) -> None:
        self._server = server
        self._forget = forget
        self._listener = serve(self._pass_on, "127.0.0.1", 0, process_request=self._plain, max_size=None, compression=None)
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        self._thread.start()
        self.links: list[Link] = []
        self.changed = threading.Condition()
        self.target = Target(f"http://127.0.0.1:{self._listener.socket.getsockname()[1]}", server.token)

    @property
    def sent(self) -> list[Frame]:
        """Every `response.create` of the client, over all its sockets."""
        return [frame for link in self.links for frame in link.sent if frame["type"] == "response.create"]

    @property
    def received(self) -> list[Frame]:
        return [frame for link in self.links for frame in link.received]

    @property
    def usages(self) -> list[Frame]:
        """Of every response that completed."""
        return [frame["response"]["usage"] for frame in self.received if frame["type"] == "response.completed"]

    def wait_for(self, reached: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Until it holds; asked after each frame. Fails after limit_s."""
        with self.changed:
            assert self.changed.wait_for(reached, limit_s), f"not seen within {limit_s:.0f} s"

    def close(self) -> None:
        self._listener.shutdown()
        self._thread.join()
        for link in self.links:
            link.upstream.close()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self, request: Request) -> ClientConnection:
        passed = [(name, value) for name, value in request.headers.raw_items() if name.lower() not in HOP]
        url = self._server.url.replace("http", "ws", 1) + request.path
        return connect(
            url, additional_headers=Headers(passed), max_size=None, compression=None, proxy=None, user_agent_header=None
        )

    def _plain(self, client: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return None
        asked = urllib.request.Request(self._server.url + request.path, headers=self._server.headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                status, body = http.HTTPStatus(reply.status), reply.read()
        except urllib.error.HTTPError as error:
            status, body = http.HTTPStatus(error.code), error.read()
        headers = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")])
        return Response(status, status.phrase, headers, body)

    def _pass_on(self, client: ServerConnection) -> None:
        assert client.request is not None
        link = Link(self._connect(client.request))
        with self.changed:
            self.links.append(link)
        back = threading.Thread(target=self._pass_back, args=(link, client), daemon=True)
        back.start()
        try:
            for message in client:
                frame = json.loads(message)
                with self.changed:
                    link.sent.append(frame)
                    self.changed.notify_all()
                link.upstream.send(message)
        except ConnectionClosed:
            pass
        finally:
            link.upstream.close()
            back.join()

    def _pass_back(self, link: Link, client: ServerConnection) -> None:
        try:
            while True:
                message = link.upstream.recv()
                frame = json.loads(message)
                if self._forget(frame):
                    assert client.request is not None
                    old, link.upstream = link.upstream, self._connect(client.request)
                    old.close()
                client.send(message)
                with self.changed:
                    link.received.append(frame)
                    self.changed.notify_all()
        except ConnectionClosed:
            client.close(*_how(link.upstream))


def _how(upstream: ClientConnection) -> tuple[int, str]:
    """Close code and reason for the client: as the server closed, 1011 where it vanished."""
    code = upstream.close_code
    return (code, upstream.close_reason or "") if code is not None and code not in (1005, 1006) else (1011, "")


@contextlib.contextmanager
def relay(server: Target, forget: Callable[[Frame], bool] = lambda frame: False) -> Iterator[Relay]:
    """A relay that listens, closed at the end."""
    between = Relay(server, forget)
    try:
        yield between
    finally:
        between.close()
