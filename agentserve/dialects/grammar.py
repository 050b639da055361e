"""An OutputRule in a dialect's own syntax: the grammar of a whole answer, from the end of the prompt to the end of the turn.

Holds what dialects have in common that put calls between two markers; what stands between those, each dialect writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from agentserve.constraints.lark import JSON_OPTIONS, LarkWriter, choice, literal
from agentserve.constraints.output import ANY_OBJECT, OutputRule, TextForm
from agentserve.errors import UnsupportedValue

if TYPE_CHECKING:
    from agentserve.dialects.base import Dialect

Thinking = Literal["open", "allowed", "none"]
"""open: the prompt ends inside a thinking block. allowed: one may come first."""


def answer_grammar(dialect: Dialect, rule: OutputRule, writer: LarkWriter, thinking: Thinking) -> str:
    """Raises UnsupportedValue for a strict tool whose arguments this dialect cannot be held to."""
    return writer.grammar(_thinking(dialect, writer, thinking) + _body(dialect, rule, writer))


def _thinking(dialect: Dialect, writer: LarkWriter, thinking: Thinking) -> str:
    markers = dialect.markers
    if thinking == "none" or not markers.think_open:
        return ""
    rest = writer.upto(markers.think_close) + (f" {literal(dialect.after_thinking)}" if dialect.after_thinking else "")
    return f"{rest} " if thinking == "open" else f"({writer.tag(markers.think_open)} {rest})? "


def _body(dialect: Dialect, rule: OutputRule, writer: LarkWriter) -> str:
    if rule.calls == "none" or not rule.schemas:
        return text_form(rule.form, writer)
    one = choice([call_rule(dialect, rule, writer, name) for name in rule.schemas])
    inside = _block(dialect, rule, writer, one)
    single = rule.one_call or dialect.one_call
    if rule.calls == "auto" and rule.form is None:
        first = writer.rule(f"{writer.upto(dialect.markers.call_open)} {inside}")
        if not dialect.markers.call_close:
            # What would follow the block is read as part of it, so only another block may.
            return f"({first} ({_next(dialect, writer, inside)})* | {writer.free()})"
        return f"{first}{'?' if single else '*'} {writer.free()}"
    block = writer.rule(f"{writer.tag(dialect.markers.call_open)} {inside}")
    calls = block if single else f"{block} ({_next(dialect, writer, inside)})*"
    return calls if rule.calls == "required" else f"({calls} | {text_form(rule.form, writer)})"


def _next(dialect: Dialect, writer: LarkWriter, inside: str) -> str:
    return writer.rule(f"{_glue(dialect.between_blocks)}{writer.tag(dialect.markers.call_open)} {inside}")


def _glue(text: str) -> str:
    return f"{literal(text)} " if text else ""


def _block(dialect: Dialect, rule: OutputRule, writer: LarkWriter, one: str) -> str:
    """What stands behind the opening marker, closing marker included."""
    closing = writer.tag(dialect.markers.call_close) if dialect.markers.call_close else ""
    if not dialect.many_in_block:
        return f"{one} {closing}"
    before, between, behind = (_glue(text) for text in dialect.block_space)
    calls = one if rule.one_call else f"{one} ({between}{one})*"
    return f"{before}{calls} {behind}{closing}"


def call_rule(dialect: Dialect, rule: OutputRule, writer: LarkWriter, name: str) -> str:
    """Name of the rule of a call of this tool."""
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
