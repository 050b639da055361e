"""The model's chat template: a sandboxed jinja2 environment with the extras that Hugging Face templates rely on.

Knows how to run a template over opaque contents; what kind of template it is, probe.py finds out.
Source for the environment: `render_jinja_template` in transformers (same options, filters and globals; a test compares them).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentserve.text.errors import TemplateError
from agentserve.text.opaque import SENTINEL, ContentTable, to_json

_table: ContextVar[ContentTable | None] = ContextVar("contents_of_this_rendering", default=None)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    def dump(value: Any, *, ensure_ascii: bool) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    table = _table.get()
    return dump(value, ensure_ascii=ensure_ascii) if table is None else to_json(value, table, dump, ensure_ascii)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return env


@contextmanager
def _using(table: ContentTable):
    token = _table.set(table)
    try:
        yield
    finally:
        _table.reset(token)


class ChatTemplate:
    """One compiled template.

    source: jinja text. variables: what every rendering gets (bos_token, eos_token …).
    Raises TemplateError if it does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        if SENTINEL.search(source):
            raise TemplateError("the chat template contains private-use characters, which stand for contents here")
        try:
            env = _environment()
            self._template = env.from_string(source)
            self.free_variables = frozenset(jinja2.meta.find_undeclared_variables(env.parse(source)))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.variables = dict(variables or {})

    @classmethod
    def load(cls, directory: Path, config: Mapping[str, Any]) -> ChatTemplate:
        """chat_template.jinja, else `chat_template` of tokenizer_config.json (of a list, `tool_use` before `default`)."""
        path = directory / "chat_template.jinja"
        source: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):
            named = {t["name"]: t["template"] for t in source}
            source = named.get("tool_use") or named.get("default")
        if not isinstance(source, str):
            raise TemplateError(f"{path} is missing, and tokenizer_config.json has no chat_template either")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        variables = {}
        for name in names:
            value = config.get(name)
            variables[name] = value.get("content") if isinstance(value, dict) else value
        return cls(source, {k: v for k, v in variables.items() if v is not None})

    def run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        table: ContentTable,
        *,
        prompt: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Run the template. prompt: add the generation prompt. arguments: template switches such as enable_thinking.

        Raises TemplateError with the template's own message, which templates write about roles and order, if it refuses.
        """
        values = {**self.variables, **(arguments or {})}
        try:
            with _using(table):
                return self._template.render(
                    messages=list(messages), tools=list(tools) if tools else None, add_generation_prompt=prompt, **values
                )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateError(f"the chat template refuses this context: {SENTINEL.sub('…', str(error))}") from error
