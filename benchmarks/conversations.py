"""Conversations of exact sizes in tokens, played on an in-process server: for scenarios that others were measured in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentserve.interfaces import RenderRequest
from agentserve.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputText,
    Item,
    Message,
    OutputItem,
    Reasoning,
    ReasoningText,
)
from benchmarks.in_process import SALT, Played, Server
from benchmarks.traces.compose import write

TOOLS = (FunctionTool(name="read", description="Read a file.", parameters={"type": "object", "properties": {"path": {}}}),)


@dataclass(frozen=True)
class Sizes:
    """In tokens. instructions: system prompt and tools. first: prompt of turn 1. step: growth a turn, of which the model says
    `said`, `thought` of it thinking. system: the long system prompt of two sessions; asked: what the first message adds.
    """

    instructions: int = 600
    first: int = 860
    step: int = 248
    said: int = 48
    thought: int = 20
    system: int = 1_500
    asked: int = 60

    def prompt(self, turn: int) -> int:
        """Prompt of a turn, from 1, when everything is only appended."""
        return self.first + (turn - 1) * self.step


class Words:
    """Text by the token: words and spaces, each one token of the demo model, the words different every time."""

    def __init__(self, server: Server, seed: int) -> None:
        tokenizer = server.text.tokenizer
        texts = (tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
        words = (text.decode() for text in texts if text.isascii() and text.isalpha() and len(text) > 2)
        self._words = [word for word in words if len(tokenizer.encode(f" {word} {word}")) == 4]
        self._random = random.Random(seed)

    def fit(self, measure: Callable[[str], int], target: int) -> str:
        """Text for which measure(text) is the target, or as near as this tokenizer allows."""
        pieces: list[str] = []
        for _ in range(12):
            missing = target - measure("".join(pieces))
            if missing == 0:
                break
            del pieces[len(pieces) + min(0, missing) :]
            for _ in range(missing):
                pieces.append(self._random.choice(self._words) if len(pieces) % 2 else " ")
        return "".join(pieces)


class Conversation:
    """One session. items: its context, as a client holds it. turns: what was played."""

    def __init__(
        self, server: Server, sizes: Sizes, *, seed: int = 1, system_tokens: int = 0, like: Conversation | None = None
    ):
        """system_tokens: instead of sizes.instructions. like: another one with the same system prompt."""
        self.server = server
        self.sizes = sizes
        self.words = Words(server, seed)
        self.turns: list[Played] = []
        self.items: list[Item] = []
        if like is not None:
            self.instructions = like.instructions
        else:
            self.instructions = "x" + self.words.fit(
                lambda text: self._tokens([], "x" + text, prompt=False), system_tokens or sizes.instructions
            )

    def moved(self, server: Server) -> Conversation:
        """This session on another server."""
        other = Conversation(server, self.sizes, seed=99, like=self)
        other.items, other.words = list(self.items), self.words
        return other

    def ask(self, prompt_tokens: int) -> None:
        """A user message that makes the prompt that long."""
        text = self.words.fit(lambda text: self._tokens([*self.items, _user(text)]), prompt_tokens)
        self.items.append(_user(text))

    def turn(self) -> Played:
        """The model thinks and calls a tool."""
        tokenizer = self.server.text.tokenizer
        thought = self.words.fit(lambda text: len(tokenizer.encode(text)), self.sizes.thought)
        number = sum(isinstance(item, FunctionCall) for item in self.items)
        path = self.words.fit(lambda text: len(write(self.server.text, _answer(thought, number, text))), self.sizes.said)
        output = _answer(thought, number, path)
        played = self.server.turn(self.items, output, instructions=self.instructions, tools=TOOLS)
        self.items += output
        self.turns.append(played)
        return played

    def result(self, prompt_tokens: int) -> None:
        """The result of the newest call, which makes the prompt that long."""
        call = next(item for item in reversed(self.items) if isinstance(item, FunctionCall))
        text = self.words.fit(
            lambda text: self._tokens([*self.items, FunctionCallOutput(call_id=call.call_id, output=text)]), prompt_tokens
        )
        self.items.append(FunctionCallOutput(call_id=call.call_id, output=text))

    def play(self, turns: int) -> None:
        """So many turns that only append, the last one with its result behind it."""
        for _ in range(turns):
            if not self.items:
                self.ask(self.sizes.first)
            before = len(self.turn().prompt)
            self.result(before + self.sizes.step)

    # ── edits ────────────────────────────────────────────────────────────────────────────────────────────────────

    def drop_first_thinking(self) -> None:
        self.items.remove(next(item for item in self.items if isinstance(item, Reasoning)))

    def replace_first_result(self, text: str = "[old output removed]") -> None:
        at = next(i for i, item in enumerate(self.items) if isinstance(item, FunctionCallOutput))
        old = self.items[at]
        assert isinstance(old, FunctionCallOutput)
        self.items[at] = FunctionCallOutput(call_id=old.call_id, output=text)

    def _tokens(self, items: Sequence[Item], instructions: str | None = None, *, prompt: bool = True) -> int:
        text = self.instructions if instructions is None else instructions
        request = RenderRequest(text, TOOLS, tuple(items), salt=SALT)
        return len(self.server.text.render(replace(request, prompt=prompt)).ids)


def _user(text: str) -> Message:
    return Message(role="user", content=(InputText(text),))


def _answer(thought: str, number: int, path: str) -> list[OutputItem]:
    return [
        Reasoning(content=(ReasoningText(thought),)),
        FunctionCall(call_id=f"call_{number}", name="read", arguments=json.dumps({"path": path})),
    ]
