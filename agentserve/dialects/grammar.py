"""An OutputRule in a dialect's own syntax: the grammar of a whole answer, from the end of the prompt to the end of the turn.

Holds what dialects have in common that put calls between two markers; what stands between those, each dialect writes.
"""

from __future__ import annotations

from typing import Literal

from agentserve.constraints.lark import JSON_OPTIONS, LarkWriter, choice, literal
from agentserve.constraints.output import ANY_OBJECT, OutputRule, TextForm
from agentserve.dialects.base import Dialect
from agentserve.errors import UnsupportedValue

Thinking = Literal["open", "allowed", "none"]
"""open: the prompt ends inside a thinking block. allowed: one may come first."""


def answer_grammar(dialect: Dialect, rule: OutputRule, writer: LarkWriter, thinking: Thinking) -> str:
    """Raises UnsupportedValue for a strict tool whose arguments this dialect cannot be held to."""
    return writer.grammar(thinking_part(dialect, writer, thinking) + _body(dialect, rule, writer))


def thinking_part(dialect: Dialect, writer: LarkWriter, thinking: Thinking) -> str:
    markers = dialect.markers
    if thinking == "none" or not markers.think_open:
        return ""
    rest = writer.upto(markers.think_close) + (f" {literal(dialect.after_thinking)}" if dialect.after_thinking else "")
    return f"{rest} " if thinking == "open" else f"({writer.marker(markers.think_open)} {rest})? "


def _body(dialect: Dialect, rule: OutputRule, writer: LarkWriter) -> str:
    if rule.calls == "none" or not rule.schemas:
        return text_form(rule.form, writer)
    open_marker = writer.marker(dialect.markers.call_open)
    one = choice([_call(dialect, rule, writer, name) for name in rule.schemas])
    if rule.calls == "auto" and rule.form is None:
        some = writer.rule(f"{writer.upto(dialect.markers.call_open)} {_block(dialect, rule, writer, one)}")
        return f"{some}{'?' if rule.one_call else '*'} {writer.free()}"
    block = writer.rule(f"{open_marker} {_block(dialect, rule, writer, one)}")
    calls = block if rule.one_call else f"{block} ({_glue(dialect.between_blocks)}{block})*"
    return calls if rule.calls == "required" else f"({calls} | {text_form(rule.form, writer)})"


def _glue(text: str) -> str:
    return f"{literal(text)} " if text else ""


def _block(dialect: Dialect, rule: OutputRule, writer: LarkWriter, one: str) -> str:
    """What stands behind the opening marker, closing marker included."""
    closing = writer.marker(dialect.markers.call_close) if dialect.markers.call_close else ""
    if not dialect.many_in_block:
        return f"{one} {closing}"
    head, glue, tail = (_glue(text) for text in dialect.block_space)
    calls = one if rule.one_call else f"{one} ({glue}{one})*"
    return f"{head}{calls} {tail}{closing}"


def _call(dialect: Dialect, rule: OutputRule, writer: LarkWriter, name: str) -> str:
    try:
        return writer.rule(dialect.call_rule(writer, name, rule.schemas[name]))
    except UnsupportedValue:
        if name in rule.exact:
            raise
        return writer.rule(dialect.call_rule(writer, name, ANY_OBJECT))


def text_form(form: TextForm | None, writer: LarkWriter) -> str:
    """The answer's text."""
    if form is None:
        return writer.free()
    if form.kind == "json":
        return writer.json(form.content, JSON_OPTIONS)
    if form.kind == "regex":
        return writer.terminal(f"/{form.content}/")
    return writer.side_grammar(form.content)
