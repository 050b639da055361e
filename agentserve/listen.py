"""The listening sockets, bound before anything else is started, so that a port in use is said at once and in one line."""

from __future__ import annotations

import errno
import socket

from agentserve.errors import ConfigError

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""How a machine without IPv6 refuses `::1`, which `localhost` names too."""


def listen(host: str, port: int) -> list[socket.socket]:
    """A bound socket for each address of `host`; not listening yet. port 0: any free one, the same for all.

    Raises ConfigError with address and reason.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"server.host '{host}' has no address: {getattr(error, 'strerror', None) or error}") from error
    bound: list[socket.socket] = []
    refusal: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            bound.append(_bind(family, kind, protocol, (address[0], port or _port_of(bound), *address[2:])))
        except OSError as error:
            refusal = error
            if error.errno not in _NOT_HERE:
                bound = _closed(bound)
                break
    if not bound:
        why = refusal.strerror if refusal is not None else "it has no address"
        what_to_do = "; choose another: --port" if refusal is not None and refusal.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {why}{what_to_do}")
    return bound


def _bind(family: int, kind: int, protocol: int, address: tuple[str | int, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


def _port_of(bound: list[socket.socket]) -> int:
    return bound[0].getsockname()[1] if bound else 0


def _closed(bound: list[socket.socket]) -> list[socket.socket]:
    for one in bound:
        one.close()
    return []
