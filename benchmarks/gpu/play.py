"""Plays turns on an engine and takes the times that a caller sees: when a step that gave tokens returned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from engine.engine import Engine
from engine.types import Finished, HoldId, Request, SamplingParams, StateSnapshot, TokenEvent


class Words:
    """What is asked and said. programmed: prompts are states of the walk, so that answers go on with it; else any token.

    states: of the walk.
    """

    def __init__(self, vocab: int, states: int, programmed: bool, seed: int = 0) -> None:
        self._vocab, self._states, self._programmed = vocab, states, programmed
        self._random = Random(seed)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` tokens: the walk's next ones after token `after`, or from anywhere."""
        if not self._programmed:
            return [self._random.randrange(self._vocab) for _ in range(count)]
        start = self._random.randrange(self._states) if after is None else (after + 1) % self._states
        return [(start + i) % self._states for i in range(count)]

    def right(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether an answer is the walk's. Anything is right where nothing is programmed."""
        if not self._programmed:
            return True
        return list(tokens) == [(prompt[-1] + 1 + i) % self._states for i in range(len(tokens))]


class EngineFailed(Exception):
    """A request ended with an error."""


@dataclass
class Answer:
    """One request's. submitted_s, first_s, and times of all tokens: seconds of time.perf_counter. hold: of its end."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    submitted_s: float = 0.0
    hold: HoldId | None = None
    position: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.submitted_s

    def gaps_ms(self, first: int = 1, last: int | None = None) -> list[float]:
        """Between tokens, for those with index first … last − 1."""
        stop = len(self.times_s) if last is None else last
        return [1000 * (self.times_s[i] - self.times_s[i - 1]) for i in range(max(1, first), stop)]


class Player:
    """Runs requests on an engine; several at a time if they are started and then advanced."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._answers: dict[str, Answer] = {}
        self._started = 0

    def start(
        self, prompt: Sequence[int], max_tokens: int, restore: HoldId | StateSnapshot | None = None, hold: bool = False
    ) -> Answer:
        self._started += 1
        name = str(self._started)
        answer = self._answers[name] = Answer()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        ids = np.array(prompt, dtype=np.int32)
        cuts = (len(ids),) if hold and max_tokens == 0 else ()
        answer.submitted_s = time.perf_counter()
        self.engine.submit(Request(name, ids, sampling, restore=restore, cuts=cuts, hold_at_end=hold and max_tokens > 0))
        return answer

    def step(self) -> None:
        events = self.engine.step()
        now = time.perf_counter()
        for event in events:
            answer = self._answers.get(event.request_id)
            if answer is None:
                continue
            if isinstance(event, TokenEvent):
                answer.tokens.append(event.token_id)
                answer.times_s.append(now)
            elif isinstance(event, Finished):
                del self._answers[event.request_id]
                if event.reason == "error":
                    raise EngineFailed(str(event.error))
            elif hasattr(event, "hold"):
                answer.hold, answer.position = event.hold, event.position

    def until(self, answer: Answer, tokens: int) -> None:
        """Step until an answer has so many tokens."""
        while len(answer.tokens) < tokens:
            if not self.engine.has_work:
                raise EngineFailed(f"ended after {len(answer.tokens)} tokens, {tokens} were expected")
            self.step()

    def finish(self) -> None:
        """Step until all have ended."""
        while self._answers:
            self.step()

    def run(
        self, prompt: Sequence[int], max_tokens: int, restore: HoldId | StateSnapshot | None = None, hold: bool = False
    ) -> Answer:
        answer = self.start(prompt, max_tokens, restore, hold)
        self.finish()
        return answer

    def stop(self) -> None:
        """End everything that runs."""
        for name in list(self._answers):
            self.engine.cancel(name)
        self.finish()
