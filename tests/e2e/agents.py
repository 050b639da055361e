"""An agent that plays turns against a server, and what its turns must reuse, worked out beside the server.

`Agent` holds its context as a client does, as JSON items, and may edit them between turns. After each turn `Turn` has what the
server said of it, the exact token ids from the sessions database, and an Expected that was worked out here: the context is
rendered by a text model of the test's own, and the journal knows where policy has placed checkpoints in the turns before.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from agentserve.cli.connect import TERMINAL, AgentSocket, Target
from agentserve.cli.private_server import PrivateServer
from agentserve.interfaces import RenderRequest
from agentserve.protocol.decode import decode_input, decode_tools
from agentserve.protocol.items import decode_items
from agentserve.session import rows
from agentserve.session.database import connect
from agentserve.text.model_text import ModelText
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams, TokenEvent
from statecache.boundary import GeneratedBoundaries, prompt_cuts
from statecache.policy import Policy, better_kind
from statecache.types import Boundary, BoundaryKind
from tests.agentserve.text.play import MemoryBook

Json = dict[str, Any]
POLICY = Policy()
PRINCIPALS = 240
MAX_TOKENS = 120
MAX_ROUNDS = 4


def token_of(principal: int) -> str:
    return f"token-of-principal-{principal}"


def settings(backend: str) -> str:
    """TOML of a server with many principals, so that every test and every cold run has its own."""
    tokens = "\n".join(f'p{i} = "{token_of(i)}"' for i in range(PRINCIPALS))
    return f'[server.tokens]\n{tokens}\n[model.engine]\nbackend = "{backend}"\n'


def shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    unequal = np.flatnonzero(a[:n] != b[:n])
    return int(unequal[0]) if len(unequal) else n


@dataclass(frozen=True)
class Expected:
    """reused, kind: of the deepest checkpoint that the context agrees with. shared: tokens that agree with a saved context.

    parts: another token follows there; otherwise the context only goes on from, or ends within, what is saved.
    """

    reused: int
    kind: BoundaryKind | None
    shared: int
    parts: bool


@dataclass
class Journal:
    """Where checkpoints of one principal must lie: kind by prefix, and the saved contexts up to their deepest one."""

    kept: dict[bytes, BoundaryKind] = field(default_factory=dict)
    with_logits: set[bytes] = field(default_factory=set)
    saved: list[np.ndarray] = field(default_factory=list)

    def expect(self, ids: np.ndarray) -> Expected:
        raw = ids.tobytes()
        depth = [shared_tokens(s, ids) for s in self.saved]
        shared = max(depth, default=0)
        # Every checkpoint, not every position: the whole context counts only where its logits were kept.
        reused = max(
            (len(k) // 4 for k in self.kept if raw.startswith(k) and (len(k) < len(raw) or k in self.with_logits)), default=0
        )
        parts = shared < len(ids) and (
            not self.saved or any(d == shared < len(s) for d, s in zip(depth, self.saved, strict=True))
        )
        return Expected(reused, self.kept.get(raw[: 4 * reused]), shared, parts)

    def add(self, ids: np.ndarray, prompt_tokens: int, cuts: Sequence[Boundary]) -> None:
        raw = ids.tobytes()
        for cut in cuts:
            key = raw[: 4 * cut.position]
            self.kept[key] = better_kind(self.kept.get(key, cut.kind), cut.kind)
        self.with_logits.add(raw[: 4 * prompt_tokens])
        self.saved.append(ids[: max(c.position for c in cuts)] if cuts else ids[:0])


@dataclass(frozen=True)
class Turn:
    """One response: what the server told, and the ids it committed."""

    response: Json
    report: Json
    prompt: np.ndarray
    generated: np.ndarray
    expected: Expected
    body: Json
    text: ModelText

    @property
    def reused(self) -> int:
        return self.report["reused_tokens"]

    @property
    def output(self) -> list[Json]:
        return self.response["output"]

    @property
    def calls(self) -> list[Json]:
        return [i for i in self.output if i["type"] == "function_call"]

    @property
    def said(self) -> str:
        return "".join(p["text"] for i in self.output if i["type"] == "message" for p in i["content"])

    @property
    def divergence(self) -> tuple[int, int | None, str] | None:
        """(token, item, cause) as reported."""
        told = self.report["divergence"]
        return None if told is None else (told["token_index"], told["item_index"], told["cause"])

    def shown(self, start: int, end: int | None = None) -> str:
        """Text of some of its tokens, markers included."""
        return self.text.tokenizer.decode(np.concatenate([self.prompt, self.generated])[start:end])


class World:
    """One server with its database, a text model and a cold engine beside it."""

    def __init__(self, server: PrivateServer, model_dir: Path, *, first_principal: int = 0) -> None:
        self.server = server
        self.model_dir = model_dir
        self._database = connect(f"sqlite:///{server.state_dir / 'sessions.db'}")
        self._principals: Iterator[int] = itertools.count(first_principal)
        self._engine: Engine | None = None
        self._markers = self.text().markers
        self._cold = itertools.count()

    def text(self) -> ModelText:
        """A text model that has learned nothing yet."""
        return ModelText.load(self.model_dir, book=MemoryBook())

    def principal(self) -> int:
        number = next(self._principals)
        assert number < PRINCIPALS, "more principals are needed"
        return number

    def target(self, principal: int) -> Target:
        return Target(self.server.target.url, token_of(principal))

    def committed(self, principal: int, response_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and generated ids of a response, as the database has them."""
        with self._database.connect() as connection:
            stored = rows.load(connection, f"p{principal}", [response_id])[response_id]
            prompt = rows.prompt_ids(connection, response_id)
        return np.frombuffer(prompt, "<u4"), np.frombuffer(stored.generated_ids, "<u4")

    def cold(self, prompt: np.ndarray, max_tokens: int = MAX_TOKENS) -> list[int]:
        """What an engine that has never seen anything generates behind these ids, greedily.

        For contexts that another principal cannot repeat, because its text alone gives other tokens.
        """
        if self._engine is None:
            config = EngineConfig(model_dir=self.model_dir, backend="exact", threads=1, kv_tokens=16_384, max_rows=2)
            self._engine = Engine.load(config)
        name = f"cold{next(self._cold)}"
        ends = tuple(sorted({*self._engine.info.eos_token_ids, *self._markers.turn_end}))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=ends)
        self._engine.submit(Request(id=name, token_ids=prompt.astype(np.int32), sampling=sampling, hold_at_end=False))
        tokens: list[int] = []
        while self._engine.has_work:
            tokens += [e.token_id for e in self._engine.step() if isinstance(e, TokenEvent)]
        return tokens

    def close(self) -> None:
        self._database.dispose()


class Agent:
    """A client with one context. items: as it would send them. Greedy, so that a cold run can be compared.

    chained: sends only what is new, behind `previous_response_id`; else everything, every turn.
    options: further members of each create body. held_to_all False: checkpoints may have been evicted.
    """

    def __init__(
        self,
        world: World,
        *,
        instructions: str | None,
        tools: Sequence[Json] = (),
        chained: bool = False,
        options: Json | None = None,
        like: Agent | None = None,
    ) -> None:
        """like: an agent of the same principal, whose checkpoints and sampled ids this one may meet."""
        self.world = world
        self.instructions = instructions
        self.tools = list(tools)
        self.chained = chained
        self.options = dict(options or {})
        self.items: list[Json] = []
        self.principal = world.principal() if like is None else like.principal
        self.journal = Journal() if like is None else like.journal
        self.text = world.text() if like is None else like.text
        self.turns: list[Turn] = []
        self.held_to_all = True
        self._socket = AgentSocket(world.target(self.principal))
        self._sent = 0

    def close(self) -> None:
        self._socket.close()

    def user(self, text: str) -> None:
        self.items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})

    def result(self, call: Json, output: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self) -> Turn:
        """Play a turn and hold the server to what was worked out here: ids, checkpoint and place of the divergence."""
        body = self._body()
        rendered = self.text.render(self._render_request())
        expected = self.journal.expect(rendered.ids)
        response, report = self._play(body)
        prompt, generated = self.world.committed(self.principal, response["id"])
        turn = Turn(response, report, prompt, generated, expected, body, self.text)
        np.testing.assert_array_equal(prompt, rendered.ids, "the server rendered another context")
        self._check(turn)
        self._note(turn)
        self.items += turn.output
        self._sent = len(self.items)
        self.turns.append(turn)
        return turn

    def ask(self, text: str) -> Turn:
        """A user message and everything until the model has answered it; calls get what `answer_calls` gives."""
        self.user(text)
        turn = self.turn()
        for _ in range(MAX_ROUNDS):
            if not turn.calls:
                return turn
            self.answer_calls(turn)
            turn = self.turn()
        raise AssertionError(f"still calling after {MAX_ROUNDS} rounds: {turn.calls}")

    def answer_calls(self, turn: Turn) -> None:
        for call in turn.calls:
            self.result(call, RESULTS.get(call["name"], "error: no such tool"))

    def check_cold(self, turn: Turn) -> None:
        """The newest turn again, under another principal: nothing reused, same ids, same text."""
        assert self.turns[-1] is turn
        stranger = self.world.principal()
        items = self.items[: len(self.items) - len(turn.output)]
        body = {**turn.body, "input": items, "previous_response_id": None}
        with AgentSocket(self.world.target(stranger)) as socket:
            response, report = _exchange(socket, body)
        prompt, generated = self.world.committed(stranger, response["id"])
        assert report["reused_tokens"] == response["usage"]["input_tokens_details"]["cached_tokens"] == 0
        # Whether somebody else has said the same is none of its business.
        assert (report["divergence"]["cause"], report["divergence"]["token_index"]) == ("cold", 0)
        np.testing.assert_array_equal(prompt, turn.prompt, "the same context in other tokens")
        np.testing.assert_array_equal(generated, turn.generated, "the cache changed the answer")
        assert [_bare(i) for i in response["output"]] == [_bare(i) for i in turn.output]

    def check_placed(self) -> None:
        """The checkpoints that the server lists for this principal are those that were worked out, no more and no fewer."""
        target = self.world.target(self.principal)
        placed: set[tuple[str, int, str]] = set()
        for session in target.get("/v1/sessions")["data"]:
            listed = target.get(f"/v1/sessions/{session['id']}/checkpoints")["data"]
            placed |= {(row["id"], row["position"], row["kind"]) for row in listed}
        found = sorted((position, kind) for _, position, kind in placed)
        assert found == sorted((len(k) // 4, str(kind)) for k, kind in self.journal.kept.items())

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _body(self) -> Json:
        body: Json = {
            "input": copy.deepcopy(self.items),
            "tools": self.tools,
            "temperature": 0,
            "max_output_tokens": MAX_TOKENS,
            "agentserve": {"events": True},
            **self.options,
        }
        if self.instructions is not None:
            body["instructions"] = self.instructions
        if self.chained and self.turns:
            body["input"] = copy.deepcopy(self.items[self._sent :])
            body["previous_response_id"] = self.turns[-1].response["id"]
        return body

    def _render_request(self) -> RenderRequest:
        return RenderRequest(
            instructions=self.instructions,
            tools=decode_tools([Raw(msgspec.json.encode(t)) for t in self.tools])[0],
            items=decode_input(Raw(msgspec.json.encode(self.items)), max_items=10_000),
            retain=self.options.get("agentserve", {}).get("retain", "template"),
            thinking=self.options.get("reasoning", {}).get("effort") != "none",
            prompt=self.options.get("generate") is not False,
        )

    def _play(self, body: Json) -> tuple[Json, Json]:
        return _exchange(self._socket, body)

    def _check(self, turn: Turn) -> None:
        expected, report = turn.expected, turn.report
        assert report["prompt_tokens"] == len(turn.prompt)
        if not self.held_to_all:
            assert report["reused_tokens"] <= expected.reused
            return
        assert (report["reused_tokens"], (report["checkpoint"] or {}).get("kind")) == (expected.reused, expected.kind)
        assert turn.response["usage"]["input_tokens_details"]["cached_tokens"] == expected.reused
        told = turn.divergence
        assert (told is not None) == expected.parts, f"{told} was reported, {expected} is so"
        if told is not None:
            assert told[0] == expected.shared

    def _note(self, turn: Turn) -> None:
        """What this turn taught, and where its checkpoints must lie."""
        request = self._render_request()
        rendered = self.text.render(request)
        output = decode_items(msgspec.json.encode(turn.output))
        self.text.learn(request, rendered, output, turn.generated)  # type: ignore[arg-type]
        boundaries = [Boundary(c.position, c.kind, c.item) for c in rendered.cuts]
        parted_at = turn.expected.shared if turn.expected.parts else 0
        cuts = [*prompt_cuts(boundaries, len(turn.prompt), POLICY, after=turn.expected.reused, parted_at=parted_at)]
        scanner = GeneratedBoundaries(self.text.markers, len(turn.prompt), thinking=rendered.opens_reasoning)
        cuts += scanner.push_all(turn.generated.tolist())
        ids = np.concatenate([turn.prompt, turn.generated]).astype(np.uint32)
        if len(turn.generated):
            cuts.append(Boundary(len(ids) - 1, BoundaryKind.TURN))
        self.journal.add(ids, len(turn.prompt), cuts)


def _exchange(socket: AgentSocket, body: Json) -> tuple[Json, Json]:
    """(response, cache report) of one turn."""
    report: Json | None = None
    event: Json = {}
    for event in socket.turn(body):
        if event["type"] == "agentserve.cache.report":
            assert report is None
            report = event
    assert event["type"] in TERMINAL, event
    assert event["type"] != "response.failed", event["response"]["error"]
    assert report is not None
    return event["response"], report


def _bare(item: Json) -> Json:
    """An output item without the ids that are new in every response."""
    return {k: v for k, v in item.items() if k not in ("id", "call_id")}


def tool(name: str, description: str, **types: str) -> Json:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "name": name, "description": description, "parameters": schema}


WEATHER = tool("get_weather", "Get the current weather of a city", city="string")
CALCULATE = tool("calculate", "Evaluate an arithmetic expression", expression="string")
ORDER = tool("get_order", "Look up an order", order_id="string")
RESULTS = {
    "get_weather": json.dumps({"condition": "cloudy", "temperature_c": 17}),
    "calculate": "372",
    "get_order": json.dumps({"status": "shipped"}),
}
