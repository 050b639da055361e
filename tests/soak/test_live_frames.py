"""Damaged messages of every kind, by every route and socket of a real server with the demo model behind it.

What must hold: nothing above a warning in its log, no answer that blames the server, memory flat, every descriptor, turn and
socket back, a whole database, and a client beside it that gets to the letter what it got before. SOAK_MINUTES sets how long;
without it a short run keeps the test itself honest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect

from benchmarks.load.client import Closed, Socket
from benchmarks.load.lab import Memory
from benchmarks.load.server import LabServer, lab_server
from tests.agentserve.audit_bodies import BODIES, FRAMES, Made
from tests.soak.at_rest import flat, gave_back, rows_are_whole, settle
from tests.soak.damage import changed, request_bytes, socket_bytes, text_of, whole_request
from tests.soak.test_frames import TERMINAL, frame, read_some

MINUTES = float(os.environ.get("SOAK_MINUTES", "0.1"))
FRAMERS, SOCKETS, CALLERS = 3, 3, 4
"""Clients at a time: sockets with whole frames in canonical order, sockets with anything, HTTP requests."""
PATIENCE_S = 60.0
SETTINGS = """
[model]
aliases = ["*"]
ram_cache_bytes = 33554432
disk_cache_bytes = 67108864
disk_reserve_bytes = 0
[turn]
max_output_tokens = 6
"""
EXPECTED = (" INFO ", "Invalid HTTP request received")
"""Lines of the log that are no sign of a fault."""
ADMIN = ("/v1/memory/", "/v1/cache/")
"""Routes by which an operator changes what is measured here."""
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6},
}
READ = (
    "/v1/responses/{id}",
    "/v1/responses/{id}/input_items",
    "/v1/conversations/{id}",
    "/v1/conversations/{id}/items",
    "/v1/sessions",
    "/v1/sessions/{id}",
    "/v1/sessions/{id}/checkpoints",
    "/v1/sessions/{id}/events",
    "/v1/models",
)


class Fuzz:
    """Damage for as long as asked, and what it was answered, counted."""

    def __init__(self, server: LabServer, made: Made, until: float) -> None:
        self.server = server
        self.url = f"ws://127.0.0.1:{server.port}/v1/responses"
        self.made = made
        self.until = until
        self.outcomes: Counter[str] = Counter()
        self.bodies = {path: bodies(made) for path, bodies in BODIES.items() if not path.startswith(ADMIN)}
        self.frames = [{"type": kind, **body} for kind, bodies in FRAMES.items() for body in bodies(made)]
        self.all = [*self.frames, *(body for bodies in self.bodies.values() for body in bodies)]

    def kinds(self) -> set[str]:
        """The counts of every_kind(): none may be missing."""
        return {
            "checked",
            *FRAMES,
            *(f"POST {path}" for path in self.bodies),
            *(f"GET {path}" for path in READ),
            *(f"stream {path}" for path in STREAMS),
        }

    async def every_kind(self, rng: random.Random) -> None:
        """Each kind of message once, damaged but whole, and its answer waited for, however short the run is."""
        asked = [("POST", path, text_of(rng, changed(rng, rng.choice(b), self.all))) for path, b in self.bodies.items()]
        for method, path, body in [*asked, *(("GET", path, b"") for path in READ)]:
            request = whole_request(method, self.made.path(path), body)
            self._judge(await self._call(request, PATIENCE_S, whole=True), request[:200])
            self.outcomes[f"{method} {path}"] += 1
        for path, whole in STREAMS.items():
            before = self.outcomes["streams"]
            request = whole_request("POST", path, json.dumps({**whole, "model": "demo", "stream": True}).encode())
            self._judge(await self._call(request, PATIENCE_S, whole=True), request)
            self.outcomes[f"stream {path}"] += self.outcomes["streams"] - before
        for kind, bodies in FRAMES.items():
            frames = [changed(rng, {"type": kind, **body}, self.all) for body in bodies(self.made)]
            self.outcomes[kind] += await self._outlived([{**frame, "type": kind} for frame in frames])
        async with connect(self.url, max_size=None, open_timeout=PATIENCE_S) as socket:
            lanes: dict[Any, list[dict[str, Any]]] = {}
            await socket.send(json.dumps({"type": "response.create", "input": "hi"}))
            until = asyncio.get_running_loop().time() + PATIENCE_S
            while not (checked := await read_some(socket, lanes, [], 0.1)):
                assert asyncio.get_running_loop().time() < until, "no answer to a whole frame"
            self.outcomes["checked"] += checked

    async def _outlived(self, frames: list[dict[str, Any]]) -> int:
        """How many of these a socket took, each followed by a turn that is right and ends."""
        socket = await Socket.connect(self.server.port)
        try:
            for damaged in frames:
                socket.send(json.dumps(damaged))
                socket.send(json.dumps({"type": "response.create", "input": "hi", "stream_id": "after"}))
                while True:
                    event = json.loads(await asyncio.wait_for(socket.receive(), PATIENCE_S))
                    self.outcomes[event["type"]] += 1
                    if event.get("stream_id") == "after" and event["type"] in (*TERMINAL, "error"):
                        assert event["type"] in TERMINAL[:2], (damaged, event)
                        break
            return len(frames)
        finally:
            socket.abort()

    def going(self) -> bool:
        return asyncio.get_running_loop().time() < self.until

    async def framer(self, rng: random.Random) -> None:
        """Frames that are almost right; every whole response is checked event by event."""
        while self.going():
            known: list[str] = []
            lanes: dict[Any, list[dict[str, Any]]] = {}
            async with connect(self.url, max_size=None, open_timeout=PATIENCE_S) as socket:
                for _ in range(rng.randrange(1, 30)):
                    await socket.send(frame(rng, known))
                    patience_s = 0.005 if rng.random() < 0.6 else 0.1
                    self.outcomes["checked"] += await read_some(socket, lanes, known, patience_s)
                if rng.random() < 0.5:
                    self.outcomes["checked"] += await read_some(socket, lanes, known, 1.0)

    async def socket(self, rng: random.Random) -> None:
        """Damaged frames of all kinds, whole and not; a socket that the server closes is opened again."""
        while self.going():
            socket = await Socket.connect(self.server.port)
            try:
                for _ in range(rng.randrange(1, 20)):
                    text = text_of(rng, changed(rng, rng.choice(self.frames), self.all))
                    if rng.random() < 0.1:
                        socket.raw(socket_bytes(rng, text))
                    else:
                        socket.send(text.decode("utf-8", "replace"))
                    await self._read(socket, 0.02 if rng.random() < 0.8 else 0.3)
            except Closed as closed:
                self.outcomes[f"closed_{closed.code}"] += 1
            finally:
                socket.abort()

    async def _read(self, socket: Socket, patience_s: float) -> None:
        while True:
            try:
                event = json.loads(await asyncio.wait_for(socket.receive(), patience_s))
            except TimeoutError:
                return
            error = event.get("error") or (event.get("response") or {}).get("error")
            if error:
                self._blamed(error["code"], event)
            self.outcomes[event["type"]] += 1

    async def caller(self, rng: random.Random) -> None:
        """Requests with damaged bodies, heads and lengths; some hang up before their answer."""
        while self.going():
            path = rng.choice([*self.bodies, *READ])
            bodies = self.bodies.get(path, [])
            method = rng.choice(("POST", "POST", "POST", "GET", "DELETE")) if bodies else "GET"
            if method == "DELETE":
                path = "/v1/responses/resp_nothing"
            body = text_of(rng, changed(rng, rng.choice(bodies), self.all)) if bodies and method == "POST" else b""
            request = request_bytes(rng, method, self.made.path(path), body)
            answer = await self._call(request, PATIENCE_S if rng.random() < 0.8 else 0.05)
            if answer:
                self._judge(answer, request[:200])

    async def _call(self, request: bytes, patience_s: float, *, whole: bool = False) -> bytes:
        """What came until the server closed; nothing if the client was the first to go. whole: no part of it is missing."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(request)
            if patience_s == PATIENCE_S and not whole:
                # What is shorter than it says gets no answer while the client stays.
                writer.write_eof()
            return await asyncio.wait_for(reader.read(-1), patience_s)
        except (TimeoutError, ConnectionError):
            assert patience_s < PATIENCE_S, f"no answer within {PATIENCE_S:g} s: {request[:200]!r}"
            return b""
        finally:
            writer.transport.abort()

    def _judge(self, answer: bytes, asked: bytes) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head[9:12])
        self.outcomes[f"http_{status}"] += 1
        assert status < 500, (asked, answer[:500])
        if status >= 400 and b"application/json" in head:
            assert b'"error"' in body, (asked, answer[:500])
        if status == 200 and b"text/event-stream" in head:
            assert not any(blame in body for blame in (b"server_error", b"api_error")), (asked, body[-500:])
            self.outcomes["streams"] += 1

    def _blamed(self, code: str, event: dict[str, Any]) -> None:
        assert code != "server_error", event
        self.outcomes[f"code_{code}"] += 1


async def a_session(client: httpx.AsyncClient) -> list[int]:
    """Three turns, each behind the one before and each with one answer that is right. How long the context was in each."""
    lengths: list[int] = []
    before: str | None = None
    for word in ("seventeen", "twenty-three", "forty"):
        form = {"format": {"type": "regex", "pattern": word}}
        body = {"input": f"Say {word}.", "text": form, "reasoning": {"effort": "none"}, "max_output_tokens": 40}
        reply = await client.post("/v1/responses", json={**body, "previous_response_id": before}, timeout=PATIENCE_S)
        answer = reply.json()
        assert answer.get("status") == "completed", answer
        assert [[part["text"] for part in item["content"]] for item in answer["output"]] == [[word]], answer
        lengths.append(answer["usage"]["input_tokens"])
        before = answer["id"]
    return lengths


async def things(client: httpx.AsyncClient) -> Made:
    """One of each of what routes look for."""
    conversation = (await client.post("/v1/conversations", json={"items": [{"role": "user", "content": "hi"}]})).json()["id"]
    item = (await client.get(f"/v1/conversations/{conversation}/items")).json()["first_id"]
    response = (
        await client.post("/v1/responses", json={"input": "hi", "prompt_cache_key": "fuzzed"}, timeout=PATIENCE_S)
    ).json()
    sessions = (await client.get("/v1/sessions")).json()["data"]
    (session,) = [one["id"] for one in sessions if one["last_response"] == response["id"]]
    return Made(response["id"], session, conversation, item)


async def fuzz(server: LabServer, minutes: float) -> Counter[str]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        expected = await a_session(client)
        made = await things(client)
        await settle(server)
        before, memory = server.descriptors(), Memory(server, kept=True)
        sampling = asyncio.create_task(memory.run())
        fuzz = Fuzz(server, made, asyncio.get_running_loop().time() + minutes * 60)
        kinds = [fuzz.framer] * FRAMERS + [fuzz.socket] * SOCKETS + [fuzz.caller] * CALLERS

        async def beside() -> None:
            while fuzz.going() or not fuzz.outcomes["beside"]:
                assert await a_session(client) == expected, "another client's answers are as they were"
                fuzz.outcomes["beside"] += 1

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(beside())
                group.create_task(fuzz.every_kind(random.Random(len(kinds))))
                for seed, kind in enumerate(kinds):
                    group.create_task(kind(random.Random(seed)))
        finally:
            sampling.cancel()
        assert await a_session(client) == expected
    counters = await settle(server)
    gave_back(counters, before, server.descriptors())
    flat(memory)
    assert {kind for kind in fuzz.kinds() if not fuzz.outcomes[kind]} == set(), "these were not sent, or nothing was checked"
    return fuzz.outcomes


def test_damaged_messages_leave_the_server_and_others_as_they_were(tmp_path: Path) -> None:
    settings, log = tmp_path / "settings.toml", tmp_path / "log"
    settings.write_text(SETTINGS)
    with log.open("wb") as written, lab_server(tmp_path / "state", "demo", ["--config", str(settings)], log=written) as server:
        outcomes = asyncio.run(fuzz(server, MINUTES))
    assert [line for line in log.read_text().splitlines() if not any(expected in line for expected in EXPECTED)] == []
    assert outcomes["closed_1011"] == 0, "the server closed a socket because it broke"
    assert min(outcomes[name] for name in ("beside", "http_200", "http_400", "error")) > 0, outcomes
    print(dict(sorted(outcomes.items())))
    rows_are_whole(tmp_path / "state" / "sessions.db")
