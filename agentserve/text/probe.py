"""Finds out, once at load, how a chat template treats what it is given: white space, roles, where an answer begins.

Everything is learned by running the template over opaque contents and looking where they come out, so no template needs to be
known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentserve.text.errors import TemplateError
from agentserve.text.messages import CallId, Habits, Trim, Trims
from agentserve.text.opaque import ContentTable, Document
from agentserve.text.template import ChatTemplate

Messages = list[dict[str, Any]]
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SPACE = "\n \n"
_STRENGTH: dict[Trim, int] = {"none": 0, "lines": 1, "space": 2}


@dataclass(frozen=True, slots=True)
class Traits:
    """What probing found.

    header: text that opens an assistant turn, in history as in the generation prompt ("" if the two have nothing in common).
    turn_close: text that follows an assistant turn in history, up to the next user content.
    calls: renders tool calls and results. thinking_switch: template variable that turns thinking off, None if there is none.
    """

    habits: Habits
    header: str
    turn_close: str
    calls: bool
    thinking_switch: str | None


class _Run:
    """Rendering with named contents; find() gives the text around them."""

    def __init__(self, template: ChatTemplate, build: Callable[[_Run], Messages], prompt: bool = False, pad: str = "") -> None:
        self.table = ContentTable()
        self.names: dict[str, str] = {}
        self.pad = pad
        messages = build(self)
        self.text = template.run(messages, None, self.table, prompt=prompt)

    def content(self, name: str) -> str:
        self.names[name] = self.table.add(name, 0, "probe")
        return _SPACE + self.names[name] + _SPACE if name == self.pad else self.names[name]

    def arguments(self, name: str) -> Document:
        return Document({"a": name}, self.table, 0, name)

    def at(self, name: str) -> int:
        return self.text.find(self.names[name])

    def between(self, first: str, second: str) -> str:
        return self.text[self.at(first) + 1 : self.at(second)]

    def has(self, *names: str) -> bool:
        """All there, in this order."""
        places = [self.at(n) for n in names]
        return min(places) >= 0 and places == sorted(places)


def _attempt(template: ChatTemplate, build: Callable[[_Run], Messages], **options: Any) -> _Run | None:
    try:
        return _Run(template, build, **options)
    except TemplateError:
        return None


@dataclass(frozen=True, slots=True)
class _Form:
    """How messages are given to the template."""

    call_id: CallId
    thinking_key: str = "reasoning_content"
    apart: bool = False


def _dialogue(form: _Form, *, system: bool, calls: bool, more: bool) -> Callable[[_Run], Messages]:
    def build(run: _Run) -> Messages:
        messages: Messages = [{"role": "system", "content": run.content("system")}] if system else []
        messages.append({"role": "user", "content": run.content("user")})
        answer: dict[str, Any] = {"role": "assistant", "content": run.content("text")}
        answer[form.thinking_key] = run.content("reasoning")
        if calls:
            name = run.content("name")
            call_id = form.call_id(name, "call00001", 0)
            function = {"name": name, "arguments": run.arguments("arguments")}
            if form.apart:
                messages.append(answer)
                answer = {"role": "assistant", "content": ""}
            answer["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            messages += [answer, {"role": "tool", "content": run.content("output"), "tool_call_id": call_id}]
            messages.append({"role": "assistant", "content": run.content("answer")})
        else:
            messages.append(answer)
        if more:
            messages.append({"role": "user", "content": run.content("next")})
        return messages

    return build


def _turns(
    *parts: tuple[str, str] | tuple[str, str, str], thinking_key: str = "reasoning_content"
) -> Callable[[_Run], Messages]:
    """(role, name) or (role, name, reasoning name) for each message."""

    def build(run: _Run) -> Messages:
        messages: Messages = []
        for part in parts:
            message: dict[str, Any] = {"role": part[0], "content": run.content(part[1])}
            if len(part) == 3:
                message[thinking_key] = run.content(part[2])
            messages.append(message)
        return messages

    return build


def probe(
    template: ChatTemplate,
    think_open: str = "<think>",
    call_id: CallId = lambda name, call_id, index: call_id,
) -> Traits:
    """Find a template's traits. call_id: what it is given as the id of a call.

    Raises TemplateError if it loses or re-orders contents.
    """
    form = _form(template, call_id)

    def dialogue(*, system: bool, calls: bool, more: bool) -> Callable[[_Run], Messages]:
        return _dialogue(form, system=system, calls=calls, more=more)

    system = calls = True
    base = _attempt(template, dialogue(system=True, calls=True, more=True))
    if base is None or not base.has("user", "text", "name", "output", "answer", "next"):
        calls = False
        base = _attempt(template, dialogue(system=True, calls=False, more=True))
    if base is None or not base.has("system", "user", "text", "next"):
        system = False
        calls = True
        base = _attempt(template, dialogue(system=False, calls=True, more=True))
        if base is None or not base.has("user", "text", "name", "output", "answer", "next"):
            calls = False
            base = _Run(template, dialogue(system=False, calls=False, more=True))
    if not base.has("user", "text", "next"):
        raise TemplateError("the chat template loses or re-orders message contents, so a context cannot be laid out by it")
    late = _attempt(template, _turns(("user", "u"), ("assistant", "a"), ("system", "s"), ("user", "v")))
    more = _attempt(template, _turns(("system", "s"), ("system", "t"), ("user", "u")))
    repeats = _attempt(template, _turns(("user", "u"), ("user", "v")))
    habits = Habits(
        trims=_trims(template, dialogue, system, calls),
        late_system=system and late is not None and late.has("u", "a", "s", "v"),
        repeats=repeats is not None and repeats.has("u", "v"),
        system=system,
        thinking_key=form.thinking_key,
        apart=form.apart,
        more_system=system and more is not None and more.has("s", "t", "u"),
    )
    close = _Run(template, _turns(("user", "u"), ("assistant", "a"), ("user", "v"))).between("a", "v")
    return Traits(habits, _header(template, think_open, form.thinking_key), close, calls, _switch(template))


def _form(template: ChatTemplate, call_id: CallId) -> _Form:
    """The member that thinking is read from, and whether it may stand beside text and calls."""

    def shown(key: str) -> bool:
        run = _attempt(template, _turns(("user", "u"), ("assistant", "a", "r"), thinking_key=key))
        return run is not None and run.has("r", "a")

    key = next((key for key in _THINKING_KEYS if shown(key)), _THINKING_KEYS[0])
    form = _Form(call_id, key)
    if _attempt(template, _dialogue(form, system=False, calls=True, more=True)) is not None:
        return form
    apart = replace(form, apart=True)
    works = _attempt(template, _dialogue(apart, system=False, calls=True, more=True)) is not None
    return apart if works else form


def _trims(template: ChatTemplate, dialogue: Callable[..., Callable[[_Run], Messages]], system: bool, calls: bool) -> Trims:
    fields = ["user", "text", "reasoning"] + ["system"] * system + ["output"] * calls
    found: dict[str, tuple[Trim, Trim]] = {}
    for more in (False, True):
        build = dialogue(system=system, calls=calls, more=more)
        plain = _Run(template, build)
        for name in fields:
            if plain.at(name) < 0:
                continue
            padded = _Run(template, build, pad=name)
            before, after = plain.text[: plain.at(name)], plain.text[plain.at(name) + 1 :]
            at = padded.at(name)
            left = _kind(padded.text[len(before) : at] if padded.text.startswith(before) else "", "\n", from_left=True)
            rest = padded.text[at + 1 :]
            right = _kind(rest[: len(rest) - len(after)] if rest.endswith(after) else "", "\n", from_left=False)
            old_left, old_right = found.get(name, ("none", "none"))
            # A template that trims in one place and not in another: trim always, so that a content never changes its form.
            found[name] = (max(left, old_left, key=_STRENGTH.__getitem__), max(right, old_right, key=_STRENGTH.__getitem__))
    return Trims(found)


def _kind(kept: str, line: str, *, from_left: bool) -> Trim:
    if kept == _SPACE:
        return "none"
    lines_gone = _SPACE.lstrip(line) if from_left else _SPACE.rstrip(line)
    return "lines" if kept == lines_gone else "space"


def _header(template: ChatTemplate, think_open: str, thinking_key: str) -> str:
    """Longest text that opens the answer in the generation prompt and in every form of history."""
    with_prompt = _attempt(template, _turns(("user", "u")), prompt=True)
    without = _attempt(template, _turns(("user", "u")))
    if with_prompt is None or without is None or not with_prompt.text.startswith(without.text):
        return ""
    header = with_prompt.text[len(without.text) :]
    if think_open:
        header = header.split(think_open, 1)[0]
    histories: Sequence[tuple[Callable[[_Run], Messages], str]] = (
        (_turns(("user", "u"), ("assistant", "a")), "a"),
        (_turns(("user", "u"), ("assistant", "a", "r"), thinking_key=thinking_key), "a"),
        (_turns(("user", "u"), ("assistant", "a"), ("user", "v")), "a"),
        (_turns(("user", "u"), ("assistant", "a", "r"), ("user", "v"), thinking_key=thinking_key), "a"),
    )
    for build, name in histories:
        run = _Run(template, build)
        opening = run.between("u", name)
        while header and header not in opening:
            header = header[:-1]
    return header if header.strip() else ""


def _switch(template: ChatTemplate) -> str | None:
    return next((name for name in ("enable_thinking", "thinking") if name in template.free_variables), None)
