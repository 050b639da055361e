"""Agents of the crash lab: each plays fixed turns on a socket and goes on after whatever happens, as a careful client does.

A turn that failed, or whose socket closed, is asked again with the same idempotency key and the same parent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.agents import TERMINAL
from benchmarks.load.client import Closed, Socket

RETRY_S = 0.2
RETRYABLE = ("server_error", "rate_limit_exceeded")
TURNS = 4
MEETING = 2
"""Agents wait for each other before this turn; the failure comes while it runs."""
TASKS = (
    "Say hello to Ada.",
    "What is 12 plus 30?",
    "Which colour is the sky on a clear day?",
    "Count from one to ten.",
    "Name three animals that live in the sea.",
    "What is the capital of France?",
    "Write one sentence about rain.",
    "Which month comes after May?",
)
GO_ON = ("Say that again in other words.", "Tell me more about it.", "Thank you. Now say goodbye.")


@dataclass
class Answered:
    """A turn that was answered. output: kind and text of each item. response: as the terminal event has it. at: when."""

    status: str
    output: list[tuple[str, str]]
    response: dict[str, Any]
    at: float
    tries: int


@dataclass
class Survivor:
    """One agent. told: every error and every close that it met, in order. speaking: its turn has had a delta."""

    port: int
    number: int
    play: str
    most_tokens: int = 40
    answered: list[Answered] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    speaking: bool = False

    async def run(self, before_turn: Callable[[int], Any]) -> None:
        """All turns. before_turn(number) is awaited before each. Raises RuntimeError for an error that no retry helps."""
        socket: Socket | None = None
        for turn in range(TURNS):
            await before_turn(turn)
            text = TASKS[self.number % len(TASKS)] if not turn else GO_ON[(turn - 1) % len(GO_ON)]
            for tries in range(1, 1000):
                try:
                    if socket is None or socket.code is not None:
                        socket = await Socket.connect(self.port)
                    answer = await self._ask(socket, turn, text, tries)
                except (Closed, OSError) as error:
                    # A refused connection or handshake: nobody is there yet.
                    code = getattr(error, "code", 0)
                    self.told.append(("closed" if code >= 1000 else "no server", str(code)))
                    answer = None
                finally:
                    self.speaking = False
                if answer is not None:
                    self.answered.append(answer)
                    break
                await asyncio.sleep(RETRY_S)
        if socket is not None:
            socket.close()

    async def _ask(self, socket: Socket, turn: int, text: str, tries: int) -> Answered | None:
        body: dict[str, Any] = {
            "type": "response.create",
            "input": [{"role": "user", "content": text}],
            "max_output_tokens": self.most_tokens,
            "reasoning": {"effort": "none"},
            "temperature": 0,
            "prompt_cache_key": f"{self.play}-{self.number}",  # a session of its own, though others say the same
            "metadata": {"idempotency_key": f"{self.play}-{self.number}-{turn}"},
        }
        if self.answered:
            body["previous_response_id"] = self.answered[-1].response["id"]
        socket.send(json.dumps(body))
        while True:
            event = json.loads(await socket.receive())
            kind = event["type"]
            if kind.endswith(".delta"):
                self.speaking = True
            elif kind == "error" or kind == "response.failed":
                error = event["error"] if kind == "error" else event["response"]["error"]
                if error["code"] not in RETRYABLE or not error["message"]:
                    raise RuntimeError(f"agent {self.number}, turn {turn}: {error}")
                self.told.append((error["code"], error["message"]))
                return None
            elif kind in TERMINAL:
                response = event["response"]
                output = [(item["type"], _text(item)) for item in response["output"]]
                return Answered(response["status"], output, response, time.monotonic(), tries)


def _text(item: dict[str, Any]) -> str:
    parts = item.get("content") or ()
    return item.get("name", "") + item.get("arguments", "") + "".join(part.get("text", "") for part in parts)


class Meeting:
    """Where a fixed number of agents wait for each other."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._met = asyncio.Event()

    async def before_turn(self, turn: int) -> None:
        if turn == MEETING:
            self._left -= 1
            if not self._left:
                self._met.set()
            await self._met.wait()

    async def met(self) -> None:
        await self._met.wait()
