"""A client of a running server, for `chat` and `demo`: one WebSocket, turn by turn, and a few REST calls.

Blocking and small. Events are the JSON objects of the wire, as any client sees them.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

if TYPE_CHECKING:
    from agentserve.config import Config

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
Event = dict[str, Any]


class Unreachable(Exception):
    """No server answers, or it refuses; the text says which. hint: what to do about it, empty if nothing is known."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def advice(self) -> str:
        """The text, and on a line of its own what to do."""
        return f"{self}\n{self.hint}".rstrip()


START_ONE = "Is it running? Start one with: agentserve serve"
FIND_TOKEN = (
    "The token is printed at the server's first start and kept as `token` in its state directory. "
    "Give it with --token or AGENTSERVE_TOKEN, or name the directory with --state-dir."
)


@dataclass(frozen=True, slots=True)
class Target:
    """url: `http://host:port`, without path. token: None if the server asks for none."""

    url: str
    token: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def get(self, path: str, timeout_s: float = 10.0) -> Any:
        """GET a JSON document. Raises Unreachable."""
        return self._ask(urllib.request.Request(self.url + path, headers=self.headers), timeout_s)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 30.0) -> Any:
        """POST a JSON object. Raises Unreachable, also when it is refused."""
        headers = {**self.headers, "content-type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers), timeout_s)

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise _refused(self.url, error.code, _rest(error)) from None
        except urllib.error.URLError as error:
            raise Unreachable(f"no server at {self.url}: {_reason(error.reason)}", START_ONE) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url} does not answer as a server does: {error}") from None

    def readiness(self) -> dict[str, Any]:
        """What /readyz says; `{"status": "unreachable"}` if nothing answers yet."""
        try:
            with urllib.request.urlopen(self.url + "/readyz", timeout=5) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            try:
                return json.loads(_rest(error))
            except ValueError:
                return {"status": "unreachable", "reason": f"answered {error.code}"}
        except (OSError, ValueError, http.client.HTTPException) as error:
            return {"status": "unreachable", "reason": str(error)}


def local_target(config: Config, url: str | None = None, token: str | None = None) -> Target:
    """The server that the settings describe, with the token that it keeps. url, token: instead of theirs."""
    server = config.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    address = url or f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    secret = token or server.token
    if secret is None and server.auth == "token" and server.token_file and Path(server.token_file).is_file():
        secret = Path(server.token_file).read_text(encoding="utf-8", errors="replace").strip()
    return Target(address.rstrip("/").removesuffix("/v1"), secret)


class AgentSocket:
    """One `WS /v1/responses`. A context manager. Raises Unreachable when it cannot be opened or breaks."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        headers = {**target.headers, "agentserve-events": "1"}
        try:
            self._socket: ClientConnection = connect(
                f"{scheme}://{parts.netloc}/v1/responses",
                additional_headers=headers,
                max_size=None,
                compression=None,
                ping_interval=None,
                proxy=None,
            )
        except InvalidStatus as error:
            raise _refused(target.url, error.response.status_code, bytes(error.response.body or b"")) from None
        except OSError as error:
            raise Unreachable(f"no server at {target.url}: {_reason(error)}", START_ONE) from None

    def __enter__(self) -> AgentSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def turn(self, body: Mapping[str, Any]) -> Iterator[Event]:
        """Create a response and yield its events up to the terminal one, or an `error` event if it was refused."""
        try:
            self._socket.send(json.dumps({"type": "response.create", **body}))
        except ConnectionClosed as error:
            raise Unreachable(f"the server closed the connection: {error}") from None
        yield from self.rest()

    def rest(self) -> Iterator[Event]:
        """Further events of the response that is running."""
        try:
            while True:
                event = json.loads(self._socket.recv())
                yield event
                if event["type"] in TERMINAL or event["type"] == "error":
                    return
        except ConnectionClosed as error:
            raise Unreachable(f"the server closed the connection: {error}") from None

    def cancel(self) -> None:
        """Ask for the end of the running response; its terminal event still comes."""
        self._socket.send(json.dumps({"type": "response.cancel"}))


def _rest(error: urllib.error.HTTPError) -> bytes:
    """The body of a refusal; nothing where the server ended before it came."""
    try:
        return error.read()
    except (OSError, http.client.HTTPException):
        return b""


def _refused(url: str, status: int, body: bytes) -> Unreachable:
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = body[:300].decode(errors="replace")
    return Unreachable(f"the server at {url} answered {status}: {said}", FIND_TOKEN if status == 401 else "")


def _reason(error: object) -> str:
    """ "Connection refused" rather than "[Errno 111] Connection refused"."""
    return getattr(error, "strerror", None) or str(error)


@dataclass(slots=True)
class TurnFigures:
    """What one response cost, as its events told."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    restored_from: str | None = None
    checkpoint: str | None = None
    divergence: str | None = None
    deadline_ms: int | None = None
    deadline: str | None = None
    ttft_ms: int | None = None
    seconds: float = 0.0


class Meter:
    """Reads the figures off a turn's events. ttft_ms is the server's own; without its event, the time seen here."""

    def __init__(self) -> None:
        self.figures = TurnFigures()
        self._began = time.monotonic()

    def see(self, event: Event) -> None:
        kind, figures = event["type"], self.figures
        if kind == "agentserve.cache.report":
            figures.prompt_tokens = event["prompt_tokens"]
            figures.reused_tokens = event["reused_tokens"]
            figures.restored_from = event["restored_from"]
            if event.get("checkpoint"):
                figures.checkpoint = f"{event['checkpoint']['kind']} @ {event['checkpoint']['position']}"
            if event.get("divergence"):
                figures.divergence = f"{event['divergence']['cause']} @ {event['divergence']['token_index']}"
        elif kind == "agentserve.deadline":
            figures.deadline_ms, figures.deadline = event["deadline_ms"], event["status"]
            if event["status"] in ("met", "missed"):
                figures.ttft_ms = event["elapsed_ms"]
        elif kind.endswith(".delta") and figures.ttft_ms is None:
            figures.ttft_ms = round((time.monotonic() - self._began) * 1000)
        elif kind in TERMINAL:
            figures.seconds = time.monotonic() - self._began
            usage = event["response"].get("usage")
            if usage:
                figures.prompt_tokens, figures.output_tokens = usage["input_tokens"], usage["output_tokens"]
                figures.reused_tokens = usage["input_tokens_details"]["cached_tokens"]


def failure_of(event: Event) -> str | None:
    """Why a turn did not complete, in words; None if it did."""
    if event["type"] == "error":
        return f"{event['error']['code']}: {event['error']['message']}"
    response = event.get("response") or {}
    if event["type"] == "response.failed":
        error = response.get("error") or {}
        return f"{error.get('code')}: {error.get('message')}"
    if event["type"] == "response.incomplete":
        return f"incomplete: {(response.get('incomplete_details') or {}).get('reason')}"
    return None
