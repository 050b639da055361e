"""Simulated agents on real sockets: recorded words, sizes and pauses; edits, cancels, reconnects. Times are seconds.

A turn is asked at its time, whatever the others do (open loop): a session that is not ready gives its place to a new one.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.client import Closed, Socket
from benchmarks.load.lone import CONTEXTS, LoneS, deadline_s, sizes_behind, unhurried
from benchmarks.load.recorded import Deck, Turn
from benchmarks.traces.data import MAGAGENT, MINISWE, records

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
PAUSE_S = 0.5
"""Before a lone turn, in which nobody asks: an agent alone pauses too, and a machine that has just computed is faster."""
CHARACTERS_PER_TOKEN = 1.88
"""Of the demo model's tokenizer on this text; what a turn really had is in its usage."""


@dataclass(frozen=True)
class Behaviour:
    """Shares of turns that are cut short by a cancel or by hanging up, that come over a new socket, and that go on from an
    earlier answer than the last."""

    cancel: float = 0.0
    vanish: float = 0.0
    reconnect: float = 0.0
    edit: float = 0.0


@dataclass
class Asked:
    """One turn. suffix: tokens that it adds. behind: tokens of the prompt before it, again: of the answer to that one.
    lone_s: what it takes alone, as far as that is known. predicted, warned: as the first of the server's own events said.
    ends: terminal event, or what cut it short."""

    at: float
    suffix: int
    behind: int
    lone_s: float
    again: int = 0
    created: float | None = None
    ttft: float | None = None
    predicted: float | None = None
    warned: bool | None = None
    warned_after: float | None = None
    prompt: int = 0
    cached: int = 0
    output: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(when, how long) between two deltas."""
    ends: str = ""
    response_id: str = ""

    @property
    def new(self) -> int:
        """Tokens to compute. The answer's are among them: the template shows one that is over without the empty thinking that
        it began with, so that its saved state is of another context."""
        return self.suffix + self.again

    @property
    def deadline_s(self) -> float:
        return deadline_s(self.lone_s)


def first_token_came(event: dict[str, Any]) -> bool:
    """Whether the server says so, of a token that need not be seen: a call's first delta comes a dozen tokens later, behind its
    marker and its name, and the model makes calls that nobody declared. (A deadline is missed when it passes, token or not.)"""
    match event["type"]:
        case "agentserve.deadline":
            return event["status"] == "met"
        case "agentserve.prefill.progress":
            return event["processed"] == event["total"]  # the step that computes the last of the prompt draws a token
    return False


class Corpus:
    """Recorded text, cut to size."""

    def __init__(self) -> None:
        parts = [r["input"] for name in (MINISWE, MAGAGENT) for r in records(name, limit=40) if r["input"].strip()]
        self._text = "\n".join(parts)

    def words(self, rng: random.Random, tokens: int) -> str:
        size = max(4, round(tokens * CHARACTERS_PER_TOKEN))
        begin = rng.randrange(max(1, len(self._text) - size))
        return self._text[begin : begin + size]


class Session:
    """A conversation over one socket at a time. chain: answers so far, the newest last, each with the tokens of its prompt and
    its own."""

    def __init__(self, port: int, corpus: Corpus, rng: random.Random, behaviour: Behaviour, most_context: int) -> None:
        self._port = port
        self._corpus = corpus
        self._rng = rng
        self.behaviour = behaviour
        self._most_context = most_context
        self._socket: Socket | None = None
        self._chain: list[tuple[str, int, int]] = []
        self.busy = False

    @property
    def length(self) -> int:
        """Tokens of its context."""
        return self.behind + self.again

    @property
    def behind(self) -> int:
        """Tokens of the prompt that was answered last."""
        return self._chain[-1][1] if self._chain else 0

    @property
    def again(self) -> int:
        """Tokens of that answer."""
        return self._chain[-1][2] if self._chain else 0

    @property
    def answers(self) -> int:
        """Turns that its context consists of."""
        return len(self._chain)

    def back_to(self, answers: int) -> None:
        """Go on from an earlier answer: the first `answers` of them stay."""
        del self._chain[answers:]

    async def ask(self, suffix: int, output: int, lone_s: LoneS = unhurried) -> Asked:
        """One turn to its end, or to where it is cut short. Errors of the server are results, not exceptions. lone_s: what its
        deadline follows from."""
        rng, behaviour = self._rng, self.behaviour
        self.busy = True
        try:
            if rng.random() < behaviour.reconnect:
                self.close()
            if len(self._chain) > 1 and rng.random() < behaviour.edit:
                self._chain.pop()
            if self.length + suffix + output > self._most_context:
                self._chain.clear()
            return await self._turn(suffix, output, lone_s(suffix + self.again, self.behind))
        finally:
            self.busy = False

    async def _turn(self, suffix: int, output: int, lone_s: float) -> Asked:
        rng, behaviour = self._rng, self.behaviour
        asked = Asked(time.monotonic(), suffix, self.behind, lone_s, self.again)
        cut_at = rng.randrange(1, output + 1) if rng.random() < behaviour.cancel + behaviour.vanish else 0
        vanish = rng.random() < behaviour.vanish / max(1e-9, behaviour.cancel + behaviour.vanish)
        body: dict[str, Any] = {
            "type": "response.create",
            "input": [{"role": "user", "content": self._corpus.words(rng, suffix)}],
            "max_output_tokens": output,
            "reasoning": {"effort": "none"},
            "temperature": 0,
            "agentserve": {"events": True, "ttft_deadline_ms": max(1, round(asked.deadline_s * 1000))},
        }
        if self._chain:
            body["previous_response_id"] = self._chain[-1][0]
        try:
            if self._socket is None or self._socket.code is not None:
                self._socket = await Socket.connect(self._port)
            socket = self._socket
            asked.at = time.monotonic()
            socket.send(json.dumps(body))
            deltas, last = 0, 0.0
            while not asked.ends:
                event = json.loads(await socket.receive())
                now = time.monotonic()
                kind = event["type"]
                if kind.endswith(".delta"):
                    if asked.ttft is None:
                        asked.ttft = now - asked.at
                    if deltas:
                        asked.gaps.append((now, now - last))
                    last, deltas = now, deltas + 1
                    if deltas == cut_at:
                        if vanish:
                            socket.abort()
                            self._socket = None
                            asked.ends = "vanished"
                        else:
                            socket.send(json.dumps({"type": "response.cancel", "response_id": asked.response_id}))
                else:
                    self._event(asked, kind, event, now)
        except (Closed, OSError) as error:
            asked.ends = f"closed {getattr(error, 'code', 0)}"
            self._socket = None
        return asked

    def _event(self, asked: Asked, kind: str, event: dict[str, Any], now: float) -> None:
        if kind == "response.created":
            asked.created = now - asked.at
            asked.response_id = event["response"]["id"]
        elif asked.ttft is None and first_token_came(event):
            asked.ttft = now - asked.at
        elif kind == "agentserve.deadline" and asked.warned is None:
            asked.predicted = event["predicted_ttft_ms"] / 1000
            asked.warned = event["status"] != "on_track"
            asked.warned_after = now - asked.at
        elif kind in TERMINAL:
            response = event["response"]
            usage = response.get("usage")
            if usage:
                asked.prompt, asked.output = usage["input_tokens"], usage["output_tokens"]
                asked.cached = usage["input_tokens_details"]["cached_tokens"]
            asked.ends = response["status"]
            if kind != "response.failed" and usage:
                self._chain.append((response["id"], usage["input_tokens"], usage["output_tokens"]))
            elif response.get("error"):
                asked.ends = response["error"]["code"]
        elif kind == "error" and event["error"].get("param") == "response_id":
            pass  # of a cancel that came after the end of the turn before this one
        elif kind == "error":
            asked.ends = event["error"]["code"]
            self._chain.clear()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Crowd:
    """Sessions on one server. lone_s: TTFT of a turn that has the server to itself; deadlines follow from it."""

    def __init__(self, port: int, *, seed: int, behaviour: Behaviour, most_context: int, lone_s: LoneS = unhurried) -> None:
        self._port = port
        self._corpus = Corpus()
        self._rng = random.Random(seed)
        self._behaviour = behaviour
        self._most_context = most_context
        self._lone_s = lone_s
        self.sessions: list[Session] = []

    def _session(self) -> Session:
        seed = self._rng.randrange(1 << 30)
        session = Session(self._port, self._corpus, random.Random(seed), self._behaviour, self._most_context)
        self.sessions.append(session)
        return session

    async def alone(self, sizes: Sequence[int], rounds: int, output: int) -> list[Asked]:
        """One session, one turn after the other."""
        session, asked = self._session(), []
        for _ in range(rounds):
            for size in sizes:
                asked.append(await session.ask(size, output))
        session.close()
        return asked

    async def behind(
        self, output: int, times: Callable[[int], int], contexts: int = CONTEXTS, pause_s: float = PAUSE_S
    ) -> list[Asked]:
        """Turns alone: each size, as often as `times` says, behind nothing and behind contexts that are evenly spread up to the
        longest one. All by chance: what is asked of one context twice in a row finds it in the processor's caches, and a
        machine that is slow for a while is so for all sizes."""
        sessions = [self._session() for _ in range(contexts)]
        turns = list[tuple[Session, int]]()
        for place, session in enumerate(sessions):
            if wanted := self._most_context * place // contexts:
                await session.ask(wanted, 1)
            for size in sizes_behind(session.length, self._most_context - output):
                turns += [(session, size)] * times(size)
        asked = await self._one_by_one(self._rng.sample(turns, len(turns)), output, pause_s)
        for session in sessions:
            session.close()
        return asked

    async def apart(
        self, work: Sequence[Turn], sessions: Sequence[Session], output: int, rounds: int = 1, pause_s: float = PAUSE_S
    ) -> list[Asked]:
        """Turns of each session, alone like those; all go on from where they were."""
        turns = list[tuple[Session, int]]()
        for session in (*sessions,) * rounds:
            turn = self._rng.choice(work)
            if session.length + turn.suffix + output <= self._most_context:
                turns.append((session, turn.suffix))
        return await self._one_by_one(turns, output, pause_s)

    async def _one_by_one(self, turns: Sequence[tuple[Session, int]], output: int, pause_s: float) -> list[Asked]:
        asked = []
        for session, size in turns:
            await asyncio.sleep(pause_s)
            answers = session.answers
            asked.append(await session.ask(size, output, self._lone_s))
            session.back_to(answers)
        return asked

    async def grown(self, agents: int) -> list[Session]:
        """Sessions in the middle of their work: contexts of any length up to the longest."""
        sessions = [self._session() for _ in range(agents)]
        for session in sessions:
            await session.ask(self._rng.randrange(16, self._most_context - 16), 1)
        return sessions

    async def closed(
        self, agents: int, work: Sequence[Turn], seconds: float, sessions: Sequence[Session] = ()
    ) -> tuple[float, list[Turn]]:
        """Turns per second when every agent asks again as soon as it has its answer: what the server can do, and of which
        turns. sessions: that are there already; others begin anew."""
        begun = time.monotonic()
        done, deck = 0, Deck(work, self._rng)

        async def agent(session: Session) -> None:
            nonlocal done
            while time.monotonic() < begun + seconds:
                turn = deck.draw()
                asked = await session.ask(turn.suffix, turn.output)
                done += not asked.ends.startswith("closed")

        sessions = [*sessions, *(self._session() for _ in range(agents - len(sessions)))]
        await asyncio.gather(*(agent(session) for session in sessions))
        for session in sessions:
            session.close()
        return done / (time.monotonic() - begun), deck.drawn

    async def open(
        self, agents: int, work: Sequence[Turn], per_second: float, seconds: float, sessions: Sequence[Session] = ()
    ) -> list[Asked]:
        """Turns at Poisson times. `agents` sessions take them in turn, first those that are there; if all are busy, another one
        joins."""
        loop = asyncio.get_running_loop()
        for session in sessions:
            session.behaviour = self._behaviour
        ready = [*sessions, *(self._session() for _ in range(agents - len(sessions)))]
        asked, deck = list[asyncio.Task[Asked]](), Deck(work, self._rng)
        at, until = loop.time(), loop.time() + seconds
        while at < until:
            at += self._rng.expovariate(per_second)
            await asyncio.sleep(max(0.0, at - loop.time()))
            free = [session for session in ready if not session.busy]
            session = self._rng.choice(free) if free else self._session()
            if not free:
                ready.append(session)
            turn = deck.draw()
            session.busy = True
            asked.append(asyncio.create_task(session.ask(turn.suffix, turn.output, self._lone_s)))
        answers = list(await asyncio.gather(*asked))
        for session in ready:
            session.close()
        return answers

    async def paused(self, agents: int, work: Sequence[Turn], seconds: float, hurry: float) -> list[Asked]:
        """Each agent pauses as recorded, divided by `hurry`, between its turns; none begins after `seconds`."""
        until = time.monotonic() + seconds
        answers: list[Asked] = []

        async def agent(session: Session) -> None:
            while True:
                turn = self._rng.choice(work)
                await asyncio.sleep(turn.pause / 1e6 / hurry)
                if time.monotonic() > until:
                    return
                answers.append(await session.ask(turn.suffix, turn.output, self._lone_s))

        sessions = [self._session() for _ in range(agents)]
        await asyncio.gather(*(agent(session) for session in sessions))
        for session in sessions:
            session.close()
        return answers
