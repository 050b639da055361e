"""Random frames on many sockets for as long as asked: no traceback, no leak, no response out of order.

SOAK_MINUTES sets how long; without it a short run keeps the test itself honest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.fakes.canonical import check
from tests.fakes.server import TOKEN, FakeServer, running, wait_for
from tests.fakes.text import call, think
from tests.fakes.worker import answer, failing

SECONDS = float(os.environ.get("SOAK_MINUTES", "0.05")) * 60
AUTH = {"Authorization": f"Bearer {TOKEN}"}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def junk(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 6:
        return rng.choice([None, True, -1, 1e30, "", "x" * rng.randrange(50), "user", "input_text", "function_call", "\x00é𝄞"])
    if kind < 8:
        keys = ["type", "role", "content", "text", "call_id", "output", "name", "arguments", "inputSchema", "stream_id", "q"]
        return {rng.choice(keys): junk(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]


def frame(rng: random.Random, known: list[str]) -> str | bytes:
    """Mostly a turn that is almost right, sometimes noise."""
    kind = rng.randrange(12)
    if kind == 0:
        return rng.randbytes(rng.randrange(20))
    if kind == 1:
        return json.dumps(junk(rng))
    if kind == 2:
        return json.dumps({"type": "response.cancel", "response_id": rng.choice([*known[-2:], "resp_0", None])})
    if kind == 3:
        whom, said = rng.choice([*known[-2:], "resp_0"]), rng.choice(["stop", "", junk(rng)])
        steer = {"type": "response.steer", "previous_response_id": whom, "input": said}
        watch = {"type": "agentserve.follow", "response_id": whom, "starting_after": rng.randrange(-1, 9), "stream_id": "watch"}
        return json.dumps(rng.choice([steer, watch, {"type": "response.unknown"}]))
    body: dict[str, Any] = {"type": "response.create", "input": "hi"}
    if rng.random() < 0.5:
        body["stream_id"] = rng.choice(["a", "b", "c"])
    if rng.random() < 0.2:
        body["metadata"] = {"idempotency_key": rng.choice("kl")}
    if known and rng.random() < 0.5:
        body["previous_response_id"] = rng.choice(known)
    if rng.random() < 0.3:
        body["agentserve"] = {"events": True}
    if rng.random() < 0.3:
        body["store"] = False
    if kind < 7:
        body[rng.choice(["input", "tools", "metadata", "tool_choice", "text", "stream_id", "generate", "stop", "seed"])] = junk(
            rng
        )
    text = json.dumps(body)
    return text[: rng.randrange(len(text))] if kind == 7 else text


async def one_client(server: FakeServer, rng: random.Random, until: float) -> int:
    """Connects, sends, sometimes leaves in the middle. Returns how many whole responses were checked."""
    loop, checked = asyncio.get_running_loop(), 0
    while loop.time() < until or checked < 2:
        known: list[str] = []
        open_responses: dict[Any, list[dict[str, Any]]] = {}
        async with connect(server.ws_url, additional_headers=AUTH, max_size=None) as socket:
            for _ in range(rng.randrange(1, 40)):
                await socket.send(frame(rng, known))
                checked += await read_some(socket, open_responses, known, 0.002 if rng.random() < 0.7 else 0.05)
            if rng.random() < 0.5:
                checked += await read_some(socket, open_responses, known, 0.5)
    return checked


async def read_some(
    socket: ClientConnection, lanes: dict[Any, list[dict[str, Any]]], known: list[str], patience_s: float
) -> int:
    checked = 0
    while True:
        try:
            event = json.loads(await asyncio.wait_for(socket.recv(), patience_s))
        except (TimeoutError, ConnectionClosed):
            return checked
        lane = event.get("stream_id")
        if event["type"] == "error" or event["type"].startswith("response.steer.") or lane == "watch":
            continue
        if event["type"] == "response.created" and len(known) < 40:
            known.append(event["response"]["id"])  # while it runs it may be steered, cancelled and followed
        lanes.setdefault(lane, []).append(event)
        if event["type"] in TERMINAL:
            known.append(check(lanes.pop(lane), lane)["id"])
            checked += 1


async def test_random_frames_break_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(7)
    with running() as server:
        ids = (*think("hm"), *call("f", "{}"), *map(ord, "done"))
        scripts = [answer("ok"), answer(ids), answer("cut", reason="length"), failing("server_error", "x")]
        server.worker.default = lambda start: [0.001 * rng.random(), *rng.choice(scripts)(start)]
        until = asyncio.get_running_loop().time() + SECONDS
        checked = await asyncio.gather(*(one_client(server, random.Random(i), until) for i in range(8)))
        assert sum(checked) > 8
        await asyncio.to_thread(wait_for, lambda: not server.services.active and len(server.api.sockets) == 0)
        tasks = [t for t in asyncio.all_tasks(server.loop) if t.get_name().startswith(("turn-", "socket-", "sse-", "http-"))]
        assert tasks == []
    assert [r.getMessage() for r in caplog.records] == []
