"""No prompt, output, tool argument, schema or key reaches a log, a metric or an error, by any route and any frame.

Driven over the live tables of routes and frames: one without a body in audit_bodies.py fails. Each body is sent as it is, with
each of its nodes in turn replaced by something else, and while what lies behind the route fails with a secret in its exception.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner
from websockets.sync.client import connect

from agentserve.cli.main import app as command_line
from agentserve.config import StoreConfig
from agentserve.constraints.reasons import stated
from agentserve.logs import FORMAT, OneLine
from agentserve.protocol.decode import _FRAMES
from agentserve.session.store import SqlStore
from tests.agentserve.audit_bodies import BODIES, FRAMES, ITEMS, KEY, NAME, SECRET, Made
from tests.agentserve.route_table import ROUTES
from tests.fakes.server import TOKEN, FakeServer, running, wait_for
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer, failing

AUTH = {"Authorization": f"Bearer {TOKEN}"}
OPEN = ("/healthz", "/readyz", "/")
"""Answered without a token."""


def changed(body: Any) -> Iterator[Any]:
    """The body with one node at a time replaced: by a word, by what has another type, by what is nested too deeply."""

    def places(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for step, value in inner:
            yield (*way, step)
            yield from places(value, (*way, step))

    def at(way: tuple[Any, ...], value: Any) -> Any:
        made = copy.deepcopy(body)
        node = made
        for step in way[:-1]:
            node = node[step]
        node[way[-1]] = value
        return made

    for way in places(body):
        node: Any = body
        for step in way:
            node = node[step]
        yield at(way, {"x": SECRET} if isinstance(node, str) else SECRET)
        if isinstance(node, str) and node != SECRET:
            yield at(way, NAME)
    yield {**body, **dict.fromkeys(list(body)[:1], json.loads("[" * 99 + json.dumps(SECRET) + "]" * 99))}


@dataclass
class Audit:
    """Everything that was refused or failed, and everything that was logged."""

    server: FakeServer
    caplog: pytest.LogCaptureFixture
    errors: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def take(self, response: httpx.Response) -> None:
        self.statuses.append(response.status_code)
        if response.status_code >= 400:
            self.errors.append(response.text)
        elif response.headers.get("content-type", "").startswith("text/event-stream"):
            for line in response.text.splitlines():
                if line.startswith("data: {"):
                    self.event(json.loads(line.removeprefix("data: ")))
        elif response.headers.get("content-type", "").startswith("application/json"):
            self.event(response.json())

    def event(self, event: dict[str, Any]) -> None:
        error = event.get("error") or (event.get("response") or {}).get("error")
        if error:
            self.errors.append(json.dumps(error))

    def close(self) -> None:
        """Nothing secret is in any of it."""
        told = [r for phase in ("setup", "call", "teardown") for r in self.caplog.get_records(phase)]
        ours = ("agentserve", "engine", "statecache")
        records = [r for r in told if r.name.startswith(ours) or r.levelno >= logging.WARNING]
        lines = [OneLine(FORMAT).format(record) for record in records]
        metrics = self.server.services.metrics.render().decode()
        for secret in (SECRET, NAME, KEY, TOKEN):
            assert [line for line in lines if secret in line] == []
            assert [line for line in metrics.splitlines() if secret in line] == []
        assert [text for text in self.errors if any(secret in text for secret in (SECRET, KEY, TOKEN))] == []
        assert all("\n" not in line for line in lines)


class Broken:
    """A store of which every call fails, and says what it was called with."""

    def __init__(self) -> None:
        self.conversations = self

    def __getattr__(self, name: str) -> Any:
        async def fail(*given: Any, **named: Any) -> Any:
            raise ValueError(f"{SECRET} {given} {named}")

        return fail


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    store = SqlStore(StoreConfig(url=f"sqlite:///{tmp_path_factory.mktemp('audit')}/s.db"))
    asyncio.run(store.open())
    with running(store=store) as one:
        one.worker.default = answer((*think(SECRET), *ids_of(SECRET), *call("f", json.dumps({"a": SECRET}))), chunk=64)
        yield one
    asyncio.run(store.close())


@pytest.fixture
def audit(server: FakeServer, caplog: pytest.LogCaptureFixture) -> Iterator[Audit]:
    caplog.set_level(logging.DEBUG)
    one = Audit(server, caplog)
    yield one
    one.close()


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTH) as one:
        yield one


@pytest.fixture
def made(client: httpx.Client) -> Made:
    conversation = client.post("/v1/conversations", json={"items": ITEMS}).json()["id"]
    (item, *_) = client.get(f"/v1/conversations/{conversation}/items").json()["data"]
    response = client.post("/v1/responses", json={"input": SECRET, "prompt_cache_key": SECRET}).json()["id"]
    session = next(s["id"] for s in client.get("/v1/sessions").json()["data"] if s["last_response"] == response)
    return Made(response, session, conversation, item["id"])


def test_every_kind_of_frame_has_a_body_here() -> None:
    assert set(FRAMES) == set(_FRAMES)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_tells(audit: Audit, client: httpx.Client, made: Made, method: str, path: str) -> None:
    bodies = [{}] if method != "POST" else BODIES[path](made)
    query = {"after": NAME, "limit": NAME, "order": NAME, "starting_after": NAME, "key": KEY, "api_key": KEY, "include": SECRET}

    def send(body: Any, **more: Any) -> None:
        told = {"json": body} if method == "POST" else {}
        audit.take(client.request(method, made.path(path), **told, **more))

    for body in bodies:
        send(body)
    if method == "POST":
        for body in changed(bodies[0]):
            send(body)
        for raw in (f'{{"input": "{SECRET}', f'"{SECRET}"', f'{{"{SECRET}": {SECRET}}}', f'{{"a": "{SECRET}\\ud800"}}'):
            audit.take(client.request(method, made.path(path), content=raw))
    for params in (query, {**query, "stream": "true"}, {"stream": "true"}):
        send(bodies[0], params=params)
    send(bodies[0], headers={"Idempotency-Key": KEY})
    send(bodies[-1], headers={"Idempotency-Key": KEY})
    unknown = made.path(path).replace(made.response, NAME).replace(made.session, NAME).replace(made.conversation, NAME)
    audit.take(client.request(method, unknown.replace(made.item, NAME), **({"json": bodies[0]} if method == "POST" else {})))
    wrong = httpx.request(method, audit.server.url + made.path(path), headers={"Authorization": f"Bearer {KEY}"})
    assert wrong.status_code == (200 if path in OPEN else 401)
    audit.take(wrong)
    assert 500 not in audit.statuses, "what a client sends wrongly is no failure of the server"


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_tells_when_what_is_behind_it_fails(audit: Audit, made: Made, method: str, path: str) -> None:
    body = {"json": BODIES[path](made)[0]} if method == "POST" else {}

    def ask() -> httpx.Response:
        """On a connection of its own, since the server closes one on which it failed."""
        return httpx.request(method, audit.server.url + made.path(path), headers=AUTH, **body)

    text, store = audit.server.text, audit.server.services.store
    text.fail = ValueError(SECRET)
    audit.take(ask())
    text.fail = None
    audit.server.worker.scripts.append(failing("server_error", "the worker ended"))
    audit.take(ask())
    audit.server.worker.scripts.clear()
    try:
        audit.server.services.store = Broken()  # type: ignore[assignment]
        audit.take(ask())
        if audit.statuses[-1] == 500:
            wait_for(lambda: any(record.exc_info for record in audit.caplog.records))
    finally:
        audit.server.services.store = store


def test_no_frame_tells(audit: Audit, made: Made) -> None:
    nonsense = [
        f'{{"type": "{NAME}"}}',
        f'{{"type": {{"x": "{SECRET}"}}}}',
        f'"{SECRET}"',
        f'{{"type": "response.create", "x": {SECRET}',
        f'{{"type": "response.create", "stream_id": "{SECRET} {SECRET}"}}',
    ]
    with connect(audit.server.ws_url, additional_headers=AUTH, max_size=None) as socket:

        def send(text: str, kind: str) -> None:
            socket.send(text)
            ends = ("response.completed", "response.failed", "response.incomplete", "error", "response.steer.failed")
            while True:
                event = json.loads(socket.recv(timeout=60))
                audit.event(event)
                if event["type"] in ends:
                    return

        for kind, bodies in FRAMES.items():
            several = bodies(made)
            for body in (*several, *changed(several[0])):
                send(json.dumps({"type": kind, **body}), kind)
        for text in nonsense:
            send(text, "")
        socket.send(SECRET.encode())
        audit.event(json.loads(socket.recv(timeout=60)))


def test_no_key_is_shown_by_launch(audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AGENTSERVE_TOKEN", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, TOKEN if name.startswith("AGENT") else KEY)
    for client, file in (("codex", ".codex/agentserve.config.toml"), ("claude", ".claude/agentserve.settings.json"),
                         ("opencode", ".config/opencode/opencode.json")):  # fmt: skip
        shown = CliRunner().invoke(command_line, ["launch", "--url", audit.server.url, client])
        assert shown.exit_code == 0, shown.output
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f'"apiKey" = "{KEY}\n{{"x": {KEY}')
        broken = CliRunner().invoke(command_line, ["launch", "--url", audit.server.url, client])
        assert broken.exit_code != 0
        audit.errors += [shown.output, broken.output]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("regex parse error:\n    ab(?=x)\n      ^^^\nerror: look-around is not supported", "look-around is not supported"),
        ('at 1(8): unknown name: "ab"\n   1 | start: ab\n', "at 1(8): unknown name"),
        ("Unsatisfiable schema: Regex is empty:  (And (Literal \"ab\"))", "Unsatisfiable schema: Regex is empty"),
        ("at 1(8): failed to compile JSON schema: Invalid type: ab\n", "at 1(8): failed to compile JSON schema"),
        ("Unsatisfiable schema: minLength (5) is greater than maxLength (1)", "Unsatisfiable schema: minLength"),
        ("", "refused"),
        ("\"ab\"", "refused"),
    ],
)  # fmt: skip
def test_what_a_library_says_of_a_grammar_is_told_without_the_grammar(reason: str, told: str) -> None:
    assert stated(reason) == told
