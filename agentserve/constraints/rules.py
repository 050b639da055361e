"""A request's `text.format`, `tool_choice` and tools → its OutputRule, checked.

Made before the response exists, so that what cannot be enforced is refused like any other wrong field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash
from llguidance import LLMatcher, LLTokenizer

from agentserve.constraints.free_text import NotOnePiece, terminals
from agentserve.constraints.lark import COMPACT, JSON_OPTIONS, between_slashes, has_outer_bar
from agentserve.constraints.output import ANY_OBJECT, TEXT_GRAMMAR, OutputRule, Schema, TextForm
from agentserve.constraints.reasons import stated
from agentserve.constraints.schemas import check, enforceable
from agentserve.errors import InvalidValue, UnsupportedValue
from agentserve.kept import PER_JSON_BYTE, Kept
from agentserve.protocol.items import CUSTOM_INPUT, CustomTool, FunctionTool, Tool
from agentserve.protocol.responses import TextFormat
from agentserve.protocol.tool_choice import ToolChoice

MAX_GRAMMAR = 64 << 10
_BYTES = LLTokenizer("byte")
"""Each byte is a token: enough to ask whether a grammar has a first one."""
FREE_TEXT_INPUT: Schema = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


class Rules:
    """Rules of requests, the newest ones remembered: a client sends the same tools with every turn. Thread-safe."""

    def __init__(self, kept_bytes: int = 32 << 20) -> None:
        self._kept: Kept[bytes, OutputRule] = Kept(kept_bytes)

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    def rule(
        self,
        form: TextFormat | None,
        choice: ToolChoice,
        tools: Sequence[Tool],
        *,
        one_call: bool,
        check: Callable[[OutputRule], None] = lambda rule: None,
    ) -> OutputRule | None:
        """None if there is nothing to enforce. May take long: call it in a thread.

        check: of a new rule, by whoever has to write it as a grammar. Raises InvalidValue, UnsupportedValue.
        """
        if not enforces(form, choice, tools):
            return None
        said = msgspec.json.encode((form, choice, tools, one_call))  # integers of any size
        key = xxhash.xxh3_128_digest(said)
        known = self._kept.get(key)
        if known is not None:
            return known
        made = _rule(form, choice, tools, one_call)
        check(made)
        self._kept.put(key, made, PER_JSON_BYTE * len(said))
        return made


def enforces(form: TextFormat | None, choice: ToolChoice, tools: Sequence[Tool]) -> bool:
    """Whether a request limits its answer at all. Cheap."""
    if form is not None and form.type != "text":
        return True
    if choice.mode != "auto":
        return True  # also without tools: a model may make a call that nobody offered
    strict = any(tool.strict is True if isinstance(tool, FunctionTool) else _has_grammar(tool) for tool in tools)
    return bool(tools) and (choice.names is not None or strict)


def _rule(form: TextFormat | None, choice: ToolChoice, tools: Sequence[Tool], one_call: bool) -> OutputRule:
    names = [tool.name for tool in tools]
    for name in choice.names or ():
        if name not in names:
            raise InvalidValue(
                f"no tool '{name[:128]}' in this turn; accepted: {', '.join(names)[:512] or 'none'}", "tool_choice"
            )
    if choice.mode == "required" and not tools:
        raise InvalidValue("a call is required, and there are no tools", "tool_choice")
    allowed = [] if choice.mode == "none" else [t for t in tools if choice.names is None or t.name in choice.names]
    return OutputRule(
        form=None if form is None else _form(form),
        calls=choice.mode,
        schemas={tool.name: _arguments(tool) for tool in allowed},
        exact=frozenset(t.name for t in allowed if (_has_grammar(t) if isinstance(t, CustomTool) else t.strict)),
        one_call=one_call,
    )


def _arguments(tool: Tool) -> Schema:
    """What a call's arguments are held to. Those of a tool that is not strict: to as much of its schema as can be."""
    if isinstance(tool, CustomTool):
        return _free_text(tool)
    where = f"tools.{tool.name}.parameters"
    schema = tool.parameters or {**ANY_OBJECT, "properties": {}, "additionalProperties": not tool.strict}
    clean = _checked(schema, where, exact=tool.strict is True, fallback=ANY_OBJECT, options=COMPACT)
    kind = clean.get("type", "object")
    if kind != "object" and kind != ["object"]:
        if tool.strict:
            raise InvalidValue("arguments are an object; accepted: object", f"{where}.type")
        return ANY_OBJECT
    return {**clean, "type": "object"}


def _has_grammar(tool: CustomTool) -> bool:
    return (tool.format or {}).get("type", "text") != "text"


def _free_text(tool: CustomTool) -> Schema:
    """The one argument of a custom tool, with the grammar of its `format`."""
    if not _has_grammar(tool):
        return FREE_TEXT_INPUT
    where, form = f"tools.{tool.name}.format", tool.format or {}
    if form["type"] != "grammar":
        raise UnsupportedValue(f"got '{str(form['type'])[:64]}'; accepted: text, grammar", f"{where}.type")
    inner = form["grammar"] if isinstance(form.get("grammar"), dict) else form  # Chat Completions has it one level deeper
    syntax, definition, at = inner.get("syntax"), inner.get("definition"), f"{where}.definition"
    if syntax not in ("lark", "regex"):
        raise InvalidValue("accepted: lark, regex", f"{where}.syntax")
    if not isinstance(definition, str):
        raise InvalidValue(f"Expected `str`, got `{type(definition).__name__}`", at)
    grammar = _lark(definition, at) if syntax == "lark" else f"start: /{_regex(definition, at)}/"
    for in_json in (True, False):
        try:
            reason = LLMatcher.validate_grammar(f"start: XR_START\n{terminals(grammar, 'X', in_json=in_json)}")
        except NotOnePiece as error:
            raise UnsupportedValue(f"{error} cannot be enforced in the text of a tool", at) from None
        if reason:
            what = "it cannot be matched as one piece, as the text of a tool must be (a rule that leads back to itself cannot)"
            raise UnsupportedValue(f"{what}: {stated(reason)}", at)
    return {**FREE_TEXT_INPUT, "properties": {CUSTOM_INPUT: {"type": "string", TEXT_GRAMMAR: grammar}}}


def _form(form: TextFormat) -> TextForm | None:
    where = "text.format"
    if form.type == "text":
        return None
    if form.type == "json_object":
        return TextForm("json", ANY_OBJECT)
    if form.type == "json_schema":
        if form.schema is None:
            raise InvalidValue("missing", f"{where}.schema")
        schema = _checked(form.schema, f"{where}.schema", exact=form.strict is True, fallback={}, options=JSON_OPTIONS)
        return TextForm("json", schema)
    if form.type == "regex":
        return TextForm("regex", _regex(form.pattern, f"{where}.pattern"))
    if form.type == "grammar":
        if form.syntax == "regex":
            return TextForm("regex", _regex(form.definition, f"{where}.definition"))
        if form.syntax == "lark":
            return TextForm("lark", _lark(form.definition, f"{where}.definition"))
        raise InvalidValue("accepted: lark, regex", f"{where}.syntax")
    accepted = "accepted: text, json_object, json_schema, regex, grammar"
    raise UnsupportedValue(f"'{form.type[:64]}' is not supported; {accepted}", f"{where}.type")


def _checked(schema: Any, where: str, *, exact: bool, fallback: Schema, options: dict[str, Any]) -> Schema:
    def refusal(part: Schema) -> str:
        return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps({**part, "x-guidance": options})))

    if exact:
        clean = enforceable(schema, where, exact=True)
        check(clean, where, refusal)
        return clean
    try:
        clean = enforceable(schema, where, exact=False)
        check(clean, where, refusal)
    except UnsupportedValue:
        return fallback
    return clean


def _text(value: str | None, where: str) -> str:
    if not value:
        raise InvalidValue("missing", where)
    if len(value) > MAX_GRAMMAR:
        raise InvalidValue(f"{len(value)} characters, at most {MAX_GRAMMAR} are accepted", where)
    return value


def _regex(pattern: str | None, where: str) -> str:
    """A pattern for the whole text, as it may stand between slashes; so anchors at its ends say nothing."""
    pattern = _text(pattern, where)
    if not has_outer_bar(pattern):
        pattern = pattern.removeprefix("^")
        pattern = pattern[:-1] if pattern.endswith("$") and not pattern.endswith("\\$") else pattern
    try:
        inner = between_slashes(pattern)
    except ValueError as error:
        raise InvalidValue(f"not a regular expression: it {error}", where) from None
    reason = LLMatcher.validate_grammar(f"start: /{inner}/")
    if reason:
        raise InvalidValue(f"not a regular expression that can be enforced: {stated(reason)}", where)
    return inner


def _lark(definition: str | None, where: str) -> str:
    definition = _text(definition, where)
    reason = LLMatcher.validate_grammar(definition)
    if reason:
        raise InvalidValue(f"not a grammar that can be enforced: {stated(reason)}", where)
    matcher = LLMatcher(_BYTES, definition, log_level=0)
    if not matcher.is_error():  # it is one if the grammar names tokens of a model
        matcher.compute_bitmask()
        if matcher.get_error().startswith("NoExtensionBias"):
            raise InvalidValue("no text has this form: its rules only lead back to themselves", where)
    return definition
