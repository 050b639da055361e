"""Everything that the server knows about a model's text, behind interfaces.Text. app.py builds one per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from llguidance import LLMatcher

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import OutputRule
from agentserve.dialects.base import Dialect
from agentserve.dialects.grammar import Thinking
from agentserve.dialects.registry import dialect_of, get_dialect
from agentserve.dialects.stream import DialectParser
from agentserve.errors import TurnFailure, UnsupportedValue
from agentserve.interfaces import Rendered, RenderRequest
from agentserve.kept import Kept
from agentserve.protocol.items import OutputItem
from agentserve.text.aliases import AliasBook, NoAliases, OwnAliases
from agentserve.text.errors import TemplateError, TooManyTokens
from agentserve.text.planner import Planner
from agentserve.text.probe import Traits, probe
from agentserve.text.renderer import ExactRendered, Renderer
from agentserve.text.template import ChatTemplate
from agentserve.text.tokenizer import Tokenizer
from statecache.types import MarkerTable


class ModelText:
    """Implements interfaces.Text for one tokenizer and chat template."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, dialect: str | None = None, book: AliasBook | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.dialect: Dialect = get_dialect(dialect or dialect_of(template.source, tokenizer.markers))
        self.traits: Traits = probe(template, self.dialect.markers.think_open, self.dialect.template_call_id)
        self.markers = marker_table(tokenizer, self.dialect, self.traits)
        self.planner = Planner(tokenizer, template, self.traits, self.dialect, self.markers)
        self.renderer = Renderer(tokenizer, self.planner, self.markers, book or NoAliases())

    @classmethod
    def load(cls, directory: Path, *, dialect: str | None = None, book: AliasBook | None = None) -> ModelText:
        """Read a checkpoint directory's tokenizer and template. Raises TokenizerError or TemplateError."""
        tokenizer = Tokenizer.load(directory)
        if book is not None:
            book = OwnAliases(book, xxhash.xxh3_128_digest((directory / "tokenizer.json").read_bytes()))
        return cls(tokenizer, ChatTemplate.load(directory, tokenizer.config), dialect=dialect, book=book)

    @property
    def caches(self) -> Mapping[str, Kept[Any, Any]]:
        """What is kept in memory of contexts that were rendered, beside their encoded texts."""
        return {**self.planner.caches, "cuts": self.renderer.cuts}

    def render(self, request: RenderRequest) -> ExactRendered:
        """Ids of a context.

        Raises TurnFailure: `invalid_prompt` with the template's reason if it refuses, `context_length_exceeded` if it is longer
        than request.max_tokens by so much that the exact length is not worth knowing.
        """
        try:
            rendered = self.renderer.render(request, prompt=request.prompt)
        except TemplateError as error:
            raise TurnFailure("invalid_prompt", str(error), "input") from error
        except TooManyTokens as error:
            message = (
                f"the prompt has {error.tokens} tokens or more; this model serves at most {request.max_tokens} with the answer"
            )
            raise TurnFailure("context_length_exceeded", message, "input") from error
        if request.rule is None or not request.prompt:
            return rendered
        thinking = "open" if rendered.opens_reasoning else "allowed" if request.thinking else "none"
        return replace(rendered, grammar=self.grammar(request.rule, thinking))

    def grammar(self, rule: OutputRule, thinking: Thinking) -> str:
        """Of an answer. Raises UnsupportedValue."""
        markers = self.dialect.markers
        if rule.schemas and not (self.traits.calls and markers.call_open):
            raise UnsupportedValue("the chat template of this model knows no tools", "tools")
        return self.dialect.answer_grammar(rule, LarkWriter(self._marker_id, markers.all), thinking)

    def _marker_id(self, text: str) -> int | None:
        marker = self.tokenizer.markers.get(text)
        return None if marker is None else marker.id

    def check_rule(self, rule: OutputRule) -> None:
        """Raises UnsupportedValue if answers cannot be held to it."""
        reason = LLMatcher.validate_grammar(self.grammar(rule, "open"))
        if reason:
            raise UnsupportedValue(
                f"this cannot be enforced: {reason.splitlines()[0]}", "text.format" if rule.form else "tools"
            )

    def parser(self, request: RenderRequest, rendered: Rendered) -> DialectParser:
        return DialectParser(
            self.dialect,
            self.tokenizer,
            self.markers,
            request.tools,
            opens_reasoning=rendered.opens_reasoning,
            literal=request.rule is not None and request.rule.form is not None,
        )

    def learn(self, request: RenderRequest, rendered: Rendered, output: Sequence[OutputItem], generated: np.ndarray) -> None:
        self.renderer.learn(request, rendered, output, generated)

    def token_text(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)


def marker_table(tokenizer: Tokenizer, dialect: Dialect, traits: Traits) -> MarkerTable:
    """Ids of the dialect's markers under this tokenizer. Turn ends: the marker behind an answer in history, and eos."""
    texts = dialect.markers
    if dialect.turn_ends is not None:
        ends = list(dialect.turn_ends)
    else:
        ends = _ends_in(traits.turn_close, tokenizer)
    eos = tokenizer.special("eos_token")
    if eos and eos not in ends:
        ends.append(eos)
    return MarkerTable(
        think_open=tokenizer.marker_ids(texts.think_open),
        think_close=tokenizer.marker_ids(texts.think_close),
        call_open=tokenizer.marker_ids(texts.call_open),
        call_close=tokenizer.marker_ids(texts.call_close),
        turn_end=tokenizer.marker_ids(*ends),
    )


def _ends_in(close: str, tokenizer: Tokenizer) -> list[str]:
    """The marker that a turn ends with in history, judged by what stands behind an answer there."""
    first = min(
        ((at, t) for t in tokenizer.markers if (at := close.find(t)) >= 0), default=None, key=lambda p: (p[0], -len(p[1]))
    )
    return [first[1]] if first is not None and not close[: first[0]].strip() else []
