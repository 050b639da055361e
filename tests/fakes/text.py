"""Text without a model: one token per character, control tokens above Unicode. Implements agentserve.interfaces.Text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentserve.constraints.output import OutputRule
from agentserve.interfaces import (
    CallClose,
    CallDelta,
    CallOpen,
    Delta,
    ReasoningDelta,
    Rendered,
    RenderRequest,
    TextDelta,
)
from agentserve.protocol.items import CustomTool, CustomToolCall, FunctionCall, OutputItem
from agentserve.worker.messages import Cut
from statecache.types import BoundaryKind, MarkerTable

THINK, END_THINK, CALL, END_CALL, END = range(0x110000, 0x110005)
MARKERS = MarkerTable((THINK,), (END_THINK,), (CALL,), (END_CALL,), (END,))


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def think(text: str) -> tuple[int, ...]:
    return (THINK, *ids_of(text), END_THINK)


def call(name: str, arguments: str) -> tuple[int, ...]:
    return (CALL, *ids_of(f"{name}\n{arguments}"), END_CALL)


class FakeText:
    """renders: every request seen. learned: (output, generated ids) of every answer. rules: those that were checked."""

    def __init__(self) -> None:
        self.renders: list[RenderRequest] = []
        self.learned: list[tuple[Sequence[OutputItem], tuple[int, ...]]] = []
        self.fail: Exception | None = None
        self.rules: list[OutputRule] = []

    def render(self, request: RenderRequest) -> Rendered:
        self.renders.append(request)
        if self.fail is not None:
            raise self.fail
        head = f"{request.instructions or ''}|{','.join(t.name for t in request.tools)}|"
        ids, starts = list(ids_of(head)), []
        for item in request.items:
            starts.append(len(ids))
            if isinstance(item, FunctionCall):
                ids += call(item.name, item.arguments)
            elif isinstance(item, CustomToolCall):
                ids += call(item.name, item.input)
            else:
                ids += ids_of(item.text)
            ids.append(END)
        cuts = (Cut(len(head), BoundaryKind.SYSTEM), Cut(len(ids), BoundaryKind.PROMPT_END)) if request.items else ()
        return Rendered(np.asarray(ids, dtype=np.uint32), cuts, MARKERS, tuple(starts))

    def check_rule(self, rule: OutputRule) -> None:
        self.rules.append(rule)

    def parser(self, request: RenderRequest, rendered: Rendered) -> FakeParser:
        return FakeParser({t.name for t in request.tools if isinstance(t, CustomTool)})

    def learn(self, request: RenderRequest, rendered: Rendered, output: Sequence[OutputItem], generated: np.ndarray) -> None:
        self.learned.append((output, tuple(generated.tolist())))

    def token_text(self, token_id: int) -> bytes:
        return chr(token_id).encode() if token_id < THINK else b""


class FakeParser:
    def __init__(self, custom: set[str]) -> None:
        self._custom = custom
        self._state = "text"
        self._name = ""

    def push(self, ids: Sequence[int]) -> list[Delta]:
        out: list[Delta] = []
        for i in ids:
            if i == THINK:
                self._state = "think"
            elif i == END_THINK:
                self._state = "text"
            elif i == CALL:
                self._state, self._name = "name", ""
            elif i == END_CALL:
                self._state = "text"
                out.append(CallClose())
            elif i == END:
                pass
            elif self._state == "name":
                if i == 10:
                    self._state = "call"
                    out.append(CallOpen(self._name, self._name in self._custom))
                else:
                    self._name += chr(i)
            else:
                kind = {"think": ReasoningDelta, "text": TextDelta, "call": CallDelta}[self._state]
                out.append(kind(chr(i)))
        return out

    def finish(self) -> list[Delta]:
        return []
