"""Who may come in: Host, Origin and token are checked before a request or an upgrade reaches any route.

CORS middleware does not run for WebSockets and a browser sends them from any page, so this is plain ASGI around the whole app.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from agentserve.config import ServerConfig, is_loopback
from agentserve.errors import ApiError, ConfigError, Forbidden, InvalidApiKey, UpgradeRequired
from agentserve.interfaces import Principal
from agentserve.paths import make_private
from agentserve.protocol.codec import error_body_for

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Need no token: they say nothing about anybody. Host and Origin are checked all the same."""

WILDCARDS = ("", "0.0.0.0", "::", "[::]")
"""Addresses that mean every interface; browsers take some of them for this machine, so they are no good Host."""

OWNER = "default"
"""The principal of the server's own token; of everybody where none is asked for."""

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w-]+(?:\.[\w-]+)*)\.?)(?::[0-9]{0,5})?", re.ASCII | re.IGNORECASE)

_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\s?#@]+/?", re.ASCII | re.IGNORECASE)


def principal_named(name: str) -> Principal:
    """The same name has the same salt for ever, also after its token is changed."""
    return Principal(name, hashlib.sha256(b"agentserve principal\0" + name.encode()).digest()[:16])


class Tokens:
    """Which token is whose. Compares in constant time and always with every token."""

    def __init__(self, named: Iterable[tuple[str, str]]) -> None:
        self._known = [(token.encode(), principal_named(name)) for name, token in named]

    def owner(self, token: str) -> Principal | None:
        given = token.encode()
        found = None
        for known, principal in self._known:
            if hmac.compare_digest(known, given):
                found = principal
        return found


def load_tokens(config: ServerConfig) -> tuple[Tokens | None, str | None]:
    """Tokens of this server (None = none asked for) and the token if it was generated just now, to be shown once.

    Raises ConfigError if the token file cannot be read or made.
    """
    if config.auth == "none":
        return None, None
    token, fresh = config.token, None
    if token is None:
        path = Path(config.token_file or "token")
        try:
            if not path.exists():
                token = secrets.token_urlsafe(32)
                fresh = token if make_private(path, f"{token}\n".encode()) else None
            if fresh is None:
                token = path.read_bytes().decode("utf-8", "surrogateescape").strip()
        except OSError as exc:
            raise ConfigError(f"cannot use token file {path}: {exc.strerror}") from exc
        if not token:
            raise ConfigError(f"token file {path} is empty; delete it and a new token is made")
    for name, value in [(OWNER, token), *config.tokens.items()]:
        if not value:
            raise ConfigError(f"the token of '{name}' is empty, so that it lets nobody in; leave it out, or give it one")
        if not (value.isascii() and value.isprintable() and " " not in value):
            raise ConfigError(f"the token of '{name}' cannot stand in a header; accepted: printable ASCII without spaces")
    if len(set(config.tokens.values()) | {token}) != len(config.tokens) + 1:
        raise ConfigError("two principals have the same token")
    return Tokens([(OWNER, token), *config.tokens.items()]), fresh


def check_names(config: ServerConfig) -> None:
    """Raises ConfigError for a Host or an Origin that no request could have, which would be refused without a word of why."""
    for number, host in enumerate(config.allowed_hosts):
        named = host.lower().strip("[]")
        if named not in (_host_name(host), _host_name(f"[{named}]")):
            raise ConfigError(f"server.allowed_hosts[{number}]: got '{host[:128]}'; accepted: a name or address without a port")
    for number, origin in enumerate(config.allowed_origins):
        if _ORIGIN.fullmatch(origin) is None:
            what = "a whole origin without a path, such as http://localhost:3000"
            raise ConfigError(f"server.allowed_origins[{number}]: got '{origin[:128]}'; accepted: {what}")


class Guard:
    """ASGI wrapper. Puts the Principal into `scope["state"]["principal"]` or answers with a refusal before `app` sees anything.

    refused: told one word per refusal (host, origin, token, upgrade), for metrics. Raises ConfigError, see check_names.
    """

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        tokens: Tokens | None,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._app = app
        self._config = config
        self._tokens = tokens
        self._refused = refused
        check_names(config)
        own = () if config.host in WILDCARDS else (config.host,)
        self._hosts = frozenset(h.lower().strip("[]") for h in (*config.allowed_hosts, *own))
        self._origins = frozenset(o.lower().rstrip("/") for o in config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            principal = self._admit(scope)
        except ApiError as error:
            reason = error.param or error.code
            self._refused(reason)
            log.info("request refused status=%d reason=%s kind=%s", error.status, reason, scope["type"])
            await refuse(scope, receive, send, error)
            return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Principal:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        self._check_host(headers.get(b"host", []))
        self._check_origin(headers.get(b"origin", []))
        if scope["type"] == "websocket" and not self._config.websocket:
            raise UpgradeRequired("WebSocket is switched off here; use HTTP", "upgrade")
        if self._tokens is None:
            return principal_named(OWNER)
        token = _token(headers)
        if token is not None and (owner := self._tokens.owner(token)) is not None:
            return owner
        if scope["path"] in OPEN_PATHS or (scope["path"] == "/" and scope.get("method") == "HEAD"):
            return principal_named("")
        what = "no token" if token is None else "an unknown token"
        raise InvalidApiKey(f"got {what}; send `Authorization: Bearer …` or `x-api-key: …`", "token")

    def _check_host(self, values: list[bytes]) -> None:
        if len(values) != 1:
            raise Forbidden(f"got {len(values)} Host headers; accepted: one", "host")
        name = _host_name(values[0].decode("latin-1"))
        if not is_loopback(name) and name not in self._hosts:
            raise Forbidden("this Host is not accepted; add it to server.allowed_hosts if it is yours", "host")

    def _check_origin(self, values: list[bytes]) -> None:
        for value in values:
            if value.decode("latin-1").lower().rstrip("/") not in self._origins:
                raise Forbidden("this Origin is not accepted; add it to server.allowed_origins if it is yours", "origin")


def _host_name(host: str) -> str:
    """`[::1]:80` → `::1`, `Name:80` → `name`, what is neither → empty."""
    parts = _HOST.fullmatch(host)
    return "" if parts is None else (parts[1] or parts[2]).lower()


def _token(headers: dict[bytes, list[bytes]]) -> str | None:
    for value in headers.get(b"authorization", []):
        scheme, _, token = value.decode("latin-1").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
    for value in headers.get(b"x-api-key", []):
        if value.strip():
            return value.decode("latin-1").strip()
    return None


async def refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Answer with an HTTP error; for an upgrade this happens instead of accepting it."""
    body = error_body_for(scope["path"], error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    prefix = ""
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008})
            return
        prefix = "websocket."
    await send({"type": f"{prefix}http.response.start", "status": error.status, "headers": headers})
    await send({"type": f"{prefix}http.response.body", "body": body})
