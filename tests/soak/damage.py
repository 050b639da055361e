"""Messages and what becomes of them on a bad day: values that are others, texts that are cut, bytes that are no frame.

Every function is decided by the `random.Random` that it is given.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

TINY: list[Any] = [None, True, 0, -1, 7, 1e30, "", " ", "user", "assistant", "input_text", "function_call", "\x00é𝄞\ud800"]
WORDS = ("type", "role", "content", "text", "call_id", "output", "name", "arguments", "input", "tools", "stream", "stream_id")
HEADS = ("idempotency-key: k", "session-id: \x01", "X: " + "y" * 70_000, ": nothing", "agentserve-events: 1")
QUERY = "?starting_after=x&limit=0&after=%ff"


def junk(rng: random.Random, depth: int = 0) -> Any:
    """A small value of any kind."""
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind < 6:
        return rng.choice(TINY)
    if kind == 6:
        return rng.choice('xé\n\\"{<') * rng.randrange(300)
    if kind < 9:
        return {rng.choice(WORDS): junk(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every node below `value`."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            left.append(node[key])
    return found


def changed(rng: random.Random, body: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The body with up to three of its nodes replaced, removed, repeated, wrapped, or taken from another body."""
    body = copy.deepcopy(body)
    for _ in range(rng.randrange(1, 4)):
        nodes = places(body)
        if not nodes:
            break
        node, key = rng.choice(nodes)
        kind = rng.randrange(7)
        if kind < 2:
            node[key] = junk(rng)
        elif kind == 2:
            del node[key]
        elif kind == 3 and isinstance(node, list):
            node[key:key] = [copy.deepcopy(node[key])] * rng.randrange(1, 5)
        elif kind == 4:
            for _ in range(rng.choice((1, 3, 80))):
                node[key] = [node[key]] if rng.random() < 0.5 else {rng.choice(WORDS): node[key]}
        elif kind == 5 and isinstance(node, dict):
            node[rng.choice(WORDS)] = junk(rng)
        else:
            elsewhere = places(rng.choice(others))
            if elsewhere:
                there, name = rng.choice(elsewhere)
                node[key] = copy.deepcopy(there[name])
    return body


def text_of(rng: random.Random, body: Any) -> bytes:
    """As JSON: mostly whole, else cut or with some of it overwritten, doubled or put in."""
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    kind, at = rng.randrange(12), rng.randrange(len(data))
    upto = min(len(data), at + rng.randrange(1, 9))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.randbytes(upto - at) + data[upto:]
    if kind == 2:
        return data[:upto] + data[at:]
    if kind == 3:
        return data[:at] + rng.choice((b"\\ud800", b"\\u", b"1e999", b"[" * 2000, b'"', b"\xff", b"\x00", b",,")) + data[at:]
    return data


def socket_bytes(rng: random.Random, text: bytes) -> bytes:
    """A frame, or what is almost one: of a wrong kind or length, in pieces, unmasked, cut, or nothing of the sort."""
    kind = rng.randrange(8)
    first = 0x81
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 40))
    if kind == 1:
        first = rng.randrange(256)
    if kind == 2 and len(text) > 2:
        at = rng.randrange(1, len(text))
        return _frame(0x01, text[:at]) + _frame(0x89, b"between") + _frame(rng.choice((0x80, 0x81, 0x00)), text[at:])
    if kind == 3:
        return _frame(first, text, masked=False)
    if kind == 4:
        return _frame(first, text)[: rng.randrange(1, len(text) + 2)]
    if kind == 5:
        return _frame(first, text, size=rng.choice((0, 1, len(text) + 9, 1 << 30, 1 << 62)))
    if kind == 6:
        return _frame(0x88, rng.choice((b"", b"\x03", struct.pack("!H", rng.randrange(65536)) + b"\xff")))
    return _frame(first, text)


def _frame(first: int, payload: bytes, *, masked: bool = True, size: int | None = None) -> bytes:
    mask = 0x80 if masked else 0
    return struct.pack("!BBQ", first, mask | 127, len(payload) if size is None else size) + bytes(4 if masked else 0) + payload


def whole_request(method: str, path: str, body: bytes) -> bytes:
    """An HTTP request that closes its connection, whatever its body is."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1") + body


def request_bytes(rng: random.Random, method: str, path: str, body: bytes) -> bytes:
    """An HTTP request that closes its connection: mostly whole, else with a head or a body that is not as it says."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", "Content-Type: application/json"]
    length, kind = len(body), rng.randrange(14)
    if kind == 0:
        length = rng.choice((0, length // 2, length + 5, 1 << 40))
    if kind == 1:
        lines.append("Transfer-Encoding: chunked")
        whole = b"%x\r\n%b\r\n" % (len(body), body)
        body = whole + rng.choice((b"0\r\n\r\n", b"", b"zz\r\n", b"ffffffffffffffffff\r\n"))
    else:
        lines.append(f"Content-Length: {length}")
    if kind == 2:
        lines.append(rng.choice(HEADS))
    if kind == 3:
        lines[0] = rng.choice((f"{method} {path}{QUERY} HTTP/1.1", f"{method} {path}", "\x16\x03\x01"))
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
