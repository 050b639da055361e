"""Context edits on the fast backend, against a cold run of the same schedule: how far may the numbers be apart?

Fast kernels round differently with the number of rows that they are given, so a restored state is compared with a cold run
whose chunks end where the chunks and decode steps behind that state ended. What is left is a state taken inside a chunk.
TOLERANCE bounds the log-probabilities of the two best tokens at each step, as far as they are LIKELY: where the model is sure,
the second best is one in ten million, and bf16 rounds its logit by more than says anything. Where the two are closer than it,
either is right. Measured with AVX-512 in bf16: 0.0 in every case. A cold run in one chunk gave the same tokens, but up to 0.9
for unlikely ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from agentserve.protocol.items import FunctionCall, FunctionCallOutput, FunctionTool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import CutReached, Request, SamplingParams, StateSnapshot, TokenEvent
from statecache.boundary import prompt_cuts
from statecache.policy import Policy
from statecache.types import Boundary
from tests.agentserve.text.play import Agent as TextAgent
from tests.agentserve.text.play import output, request, user
from tests.e2e.conftest import DEMO_MODEL

TOLERANCE = 0.13
"""A logit of 16 to 32 has steps of an eighth in bf16."""
LIKELY = -8.0
WEATHER = FunctionTool(
    name="get_weather",
    description="Get the current weather of a city",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


@dataclass(frozen=True)
class Saved:
    """A state and the ends of the chunks and decode steps that led to it."""

    state: StateSnapshot
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """Generated ids, and for each the log-probabilities of the two best tokens, best first."""

    ids: list[int]
    best: list[tuple[tuple[int, float], ...]]


class FastAgent(TextAgent):
    """Plays turns on an engine through the shipped model's template and keeps every state that policy asks for."""

    def __init__(self, engine: Engine) -> None:
        super().__init__("demo", request(user("What is the weather in Lisbon?"), tools=(WEATHER,), instructions="Be brief."))
        self.engine = engine
        self.saved: dict[bytes, Saved] = {}
        self.runs = 0

    def turn(self) -> tuple[Said, Said, int]:
        """(said from the deepest saved state, said by a cold run of the same schedule, tokens reused)."""
        ids = self.render().ids
        raw = ids.tobytes()
        deepest = max((k for k in self.saved if raw.startswith(k) and len(k) < len(raw)), key=len, default=b"")
        found = self.saved.get(deepest)
        warm = self.run(ids, found, keep=True)
        cold = self.run(ids, None, edges=() if found is None else found.edges)
        self.take(warm.ids)
        return warm, cold, len(deepest) // 4

    def run(self, ids: np.ndarray, restore: Saved | None, *, edges: Sequence[int] = (), keep: bool = False) -> Said:
        n, after = len(ids), 0 if restore is None else restore.state.position
        boundaries = [Boundary(c.position, c.kind, c.item) for c in self.rendered.cuts]
        cuts = [c.position for c in prompt_cuts(boundaries, n, Policy(), after=after)]
        self.runs += 1
        name = f"run{self.runs}"
        self.engine.submit(
            Request(
                id=name,
                token_ids=ids.astype(np.int32),
                sampling=SamplingParams(max_tokens=60, temperature=0.0, logprobs=2, stop_token_ids=self.text.markers.turn_end),
                restore=None if restore is None else restore.state,
                cuts=tuple(cuts) if keep else (),
                edges=tuple(edges),
                hold_at_end=keep,
            )
        )
        said, held = Said([], []), []
        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    said.ids.append(event.token_id)
                    said.best.append(event.top_logprobs)
                elif isinstance(event, CutReached):
                    held.append(event)
        whole = np.concatenate([ids, np.array(said.ids, np.uint32)])
        chunk = self.engine.config.chunk_tokens
        steps = [] if restore is None else list(restore.edges)
        steps += [*range((after // chunk + 1) * chunk, n, chunk), *range(n, len(whole))]
        for cut in held:
            led = tuple(e for e in steps if e < cut.position)
            self.saved[whole[: cut.position].tobytes()] = Saved(self.engine.copy_out(cut.hold), (*led, cut.position))
            self.engine.release(cut.hold)
        return said


def apart(warm: Said, cold: Said) -> float:
    """Largest difference of log-probabilities up to where a near tie was decided otherwise. Fails where it was no tie."""
    largest = 0.0
    for mine, yours, a, b in zip(warm.ids, cold.ids, warm.best, cold.best, strict=False):
        known = dict(b)
        largest = max([largest, *(abs(p - known[t]) for t, p in a if t in known and max(p, known[t]) > LIKELY)])
        if mine != yours:
            assert b[0][1] - b[1][1] <= TOLERANCE, "another token, and not for want of difference"
            return largest
    assert len(warm.ids) == len(cold.ids)
    return largest


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(
        EngineConfig(model_dir=DEMO_MODEL, backend="cpu", threads=1, kv_tokens=16_384, max_rows=2, decode_gap_ms=0)
    )


@pytest.fixture
def agent(engine: Engine) -> FastAgent:
    """Has asked, called, and been answered."""
    one = FastAgent(engine)
    first, cold, _ = one.turn()
    assert apart(first, cold) <= TOLERANCE
    one.add(output("call_0", '{"condition": "cloudy", "temperature_c": 17}'))
    second, cold, reused = one.turn()
    assert reused > len(first.ids)
    assert apart(second, cold) <= TOLERANCE
    return one


def test_dropped_thinking(agent: FastAgent) -> None:
    agent.add(user("And in Oslo?"))
    warm, cold, reused = agent.turn()
    assert reused > 0
    assert apart(warm, cold) <= TOLERANCE


def test_cleared_tool_output(agent: FastAgent) -> None:
    index = next(i for i, item in enumerate(agent.items) if isinstance(item, FunctionCallOutput))
    agent.items = [*agent.items[:index], output("call_0", "[cleared]")]
    warm, cold, reused = agent.turn()
    assert reused > 0
    assert apart(warm, cold) <= TOLERANCE


def test_compaction(agent: FastAgent) -> None:
    agent.items = [user("Summary: it is cloudy in Lisbon. What is the weather in Oslo?")]
    warm, cold, reused = agent.turn()
    assert reused > 0
    assert apart(warm, cold) <= TOLERANCE


def test_a_growing_context(agent: FastAgent) -> None:
    agent.request = request(*agent.items, tools=(WEATHER,), instructions="Be brief.", retain="all")
    for city in ("Oslo", "Rome"):
        agent.add(user(f"What is the weather in {city}?"))
        warm, cold, reused = agent.turn()
        assert reused > 0
        assert apart(warm, cold) <= TOLERANCE
        called = [i for i in agent.items if isinstance(i, FunctionCall)][-1]
        agent.add(output(called.call_id, "cloudy"))
