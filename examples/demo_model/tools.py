"""Concrete tools made from kinds: a declaration with its own names and style, and calls bound to values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from examples.demo_model import special, sums, surprises, texts, values
from examples.demo_model.grammar import expand
from examples.demo_model.kinds import Arg, Kind
from examples.demo_model.values import is_held_out, pick

SURPRISE = 0.22  # share of results that the kind does not foresee
OPAQUE = 0.07  # share of tools whose name says nothing
NAME_ATTEMPTS = 200
TYPES = {"integer": "integer", "number": "number", "boolean": "boolean", "array": "array", "string": "string"}


def styled(name: str, style: str) -> str:
    """The snake_case name in another naming style."""
    if style == "snake":
        return name
    parts = [part for part in name.split("_") if part]
    if style == "camel":
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if style == "pascal":
        return "".join(part.capitalize() for part in parts)
    return {"dash": "-", "dot": ".", "flat": ""}[style].join(parts)


@dataclass(frozen=True)
class Tool:
    kind: Kind
    name: str
    params: dict[str, str]  # argument key -> declared name
    optional: frozenset[str]  # keys of optional arguments that are declared
    declaration: dict  # {"name", "description", "parameters"}
    fields: dict[str, str]  # result field -> name used in JSON results
    form: str  # "json" or "text"


@dataclass(frozen=True)
class Call:
    """A tool with values: what the model must write, and what the tool will say."""

    tool: Tool
    arguments: dict[str, object]
    slots: dict[str, str]  # every word a request or an answer may use
    result: str
    say: str  # the answer drawn from the result
    must: tuple[str, ...]  # values of the result that the answer repeats


def toolbox_style(rng: Random) -> dict:
    """Naming habits that all tools of one session share."""
    return {
        "case": pick(rng, ("snake",) * 6 + ("camel", "camel", "dash", "pascal", "dot")),
        "prefix": pick(rng, ("", "", "", "", "", "", "", "", "mcp_", values.syllables(rng, 1, 2) + "_", pick(rng, ("app", "api", "my", "svc", "srv", "fs", "tool", "x")) + "_")),
        "titles": rng.random() < 0.1,
        "closed": rng.random() < 0.2,
        "describe": rng.random(),
        "returns": rng.random() < 0.1,
        "arg_case": pick(rng, ("snake",) * 5 + ("camel", "camel", "pascal")),
    }  # fmt: skip


def make_tool(kind: Kind, rng: Random, held_out: bool, style: dict, taken: set[str]) -> Tool:
    """Declare a tool of this kind. Its name belongs to the asked split and is not in `taken`, which it joins."""
    for attempt in range(NAME_ATTEMPTS):
        opaque = rng.random() < OPAQUE
        if opaque:
            base = pick(
                rng,
                (
                    f"tool_{values.digits(rng, 1, 2)}",
                    f"fn_{values.letters(rng, 2, 3)}",
                    values.syllables(rng),
                    f"{values.syllables(rng, 1, 2)}_{values.syllables(rng, 1, 2)}",
                    f"f{rng.randint(1, 99)}",
                ),
            )
        else:
            base = expand(kind.names, rng).strip("_").replace("__", "_")
            if rng.random() < 0.06:
                base += pick(rng, ("_v2", "_tool", "_api", "_fn", "_now", "_by_id", "_x", "2"))
        if attempt > 20:  # a kind with few names: all may be of the other split or taken
            base += "_" + values.letters(rng, 2, 3)
        name = styled(style["prefix"] + base, style["case"])
        if name and name not in taken and is_held_out(name) == held_out:
            break
    else:
        raise ValueError(f"no name of the right split for {kind.key} in {NAME_ATTEMPTS} attempts")
    taken.add(name)
    params: dict[str, str] = {}
    optional: set[str] = set()
    properties: dict[str, dict] = {}
    required: list[str] = []
    for item in kind.args:
        if item.optional and rng.random() < 0.4:
            continue
        chosen = styled(expand(item.names, rng), style["arg_case"])
        while chosen in properties:
            chosen += "_2"
        params[item.key] = chosen
        properties[chosen] = _schema(item, rng, style, chosen)
        if item.optional:
            optional.add(item.key)
        else:
            required.append(chosen)
    description = " ".join(expand(kind.desc, rng).split())
    r = rng.random()
    if r < 0.1:
        description = f"{pick(rng, ('Use this to', 'Tool to', 'Call this to', 'Helper to', 'Can'))} {description[0].lower() + description[1:]}"
    if r > 0.6:
        description += pick(rng, (".", ".", ".", ". Read only.", ". Fast.", ". Returns JSON.", ". Returns text."))
    if not opaque and rng.random() < 0.03:
        description = ""
    parameters: dict = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        parameters["required"] = required
    if style["closed"]:
        parameters["additionalProperties"] = False
    if style["titles"]:
        parameters["title"] = name + "_args"
    fields = {key: styled(pick(rng, names), style["arg_case"]) for key, names, _ in kind.out}
    form = "json" if rng.random() < 0.5 else "text"
    if kind.key in ("read_file", "file_key", "list_dir", "run", "logs"):
        form = "json" if rng.random() < 0.2 else "text"
    return Tool(
        kind,
        name,
        params,
        frozenset(optional),
        {"name": name, "description": description, "parameters": parameters},
        fields,
        form,
    )


def _schema(item: Arg, rng: Random, style: dict, name: str) -> dict:
    schema: dict = {"type": TYPES[item.type]}
    if item.maker.startswith("pick:") and item.type == "string" and rng.random() < 0.8:
        schema["enum"] = item.maker[5:].split(",")
    if item.type == "array":
        schema["items"] = {"type": "string"}
    if item.desc and rng.random() < 0.35 + 0.6 * style["describe"]:
        schema["description"] = expand(item.desc, rng)
    if style["titles"]:
        schema = {"title": name.replace("_", " ").title(), **schema}
    return schema


def _argument(item: Arg, rng: Random, held_out: bool) -> tuple[object, str]:
    """(value for the call, words for the request)."""
    if item.maker == "bool":
        return True, "true"
    if item.maker == "calc":
        value = special.expression(rng)
        return value, special.spoken(value, rng)
    if item.maker == "wordcalc":
        return sums.one_step(rng)
    if item.maker == "sqlq":
        value = special.sql(rng)
        return value, value
    if item.maker in ("people", "wordlist"):
        maker = values.first_name if item.maker == "people" else values.word
        names: list[str] = []
        while len(names) < 2 or (len(names) < 4 and rng.random() < 0.4):
            name = maker(rng)
            if name not in names:
                names.append(name)
        return names, special.and_list(names)
    value = values.make(item.maker, rng, held_out)
    if item.key == "state" and item.maker == "pick:on,off":
        return value, str(value)
    return value, str(value)


def bind(
    tool: Tool,
    rng: Random,
    held_out: bool,
    fixed: dict[str, str] | None = None,
    lines: int = 0,
    fail: bool = False,
    keep: bool = False,
) -> Call:
    """Choose argument values and make the result.

    fixed: argument key -> text that must be used (a value found by an earlier call).  lines: lines of a settings file.  keep: the result must show every field.
    """
    arguments: dict[str, object] = {}
    slots: dict[str, str] = {}
    for item in tool.kind.args:
        if fixed and item.key in fixed:
            text = fixed[item.key]
            value: object = int(text) if item.type == "integer" else float(text) if item.type == "number" else text
        elif item.key in tool.optional:
            if rng.random() < 0.6:
                continue
            value, text = _argument(item, rng, held_out)
            slots["+" + item.key] = expand(item.mention, rng, {item.key: text})
        elif item.key not in tool.params:
            continue
        else:
            value, text = _argument(item, rng, held_out)
        if isinstance(value, float) and value == int(value) and item.type == "integer":
            value = int(value)
        slots[item.key] = text
        arguments[tool.params[item.key]] = value
    if fail:
        result, reason = _failure(tool, rng, slots)
        say = expand(
            "That did not work: {r}.|The tool reported an error: {r}.|I could not do that: {r}.|It failed: {r}.",
            rng,
            {"r": reason},
        )
        slots["reason"] = reason
        return Call(tool, arguments, slots, result, say, (reason,))
    fields: dict[str, object] = {}
    shown: list[str] = []  # every value that an answer may take from the result
    for key, _, maker in tool.kind.out:
        value = _field(maker, rng, held_out, slots, arguments, lines)
        fields[key] = value
        if isinstance(value, list):
            slots[key + "_and"] = special.and_list(value)
            slots[key] = pick(rng, ("\n", "\n", ", ", "  ")).join(value)
            shown += value
        else:
            slots[key] = value if isinstance(value, str) else str(value)
            shown.append(slots["ask_value"] if maker == "kvfile" else slots[key])
    if "ask_value" not in slots and not keep and rng.random() < SURPRISE:
        shown_fields = {tool.fields[key]: value for key, value in fields.items()}
        return Call(tool, arguments, slots, *surprises.surprise(rng, held_out, shown_fields, tool.form == "json"))
    result = expand(tool.kind.text, rng, slots) if tool.form == "text" else _json_result(tool, fields, arguments, rng)
    say, must = "", ()
    for _ in range(6):
        say = answer(tool.kind, slots, rng)
        must = tuple(value for value in shown if value in say)
        if all(value in result for value in must):
            break
    else:  # the text form hides something that every answer needs
        result = _json_result(tool, fields, arguments, rng)
    return Call(tool, arguments, slots, result, say, must)


def answer(kind: Kind, slots: dict[str, str], rng: Random) -> str:
    """An answer in words, its first letter capital unless it starts with a value."""
    text = expand(kind.say, rng, slots)
    if not any(value and text.startswith(value) for value in slots.values()):
        text = text[:1].upper() + text[1:]
    return text


def _json_result(tool: Tool, fields: dict[str, object], arguments: dict[str, object], rng: Random) -> str:
    shown: dict[str, object] = {tool.fields[key]: value for key, value in fields.items()}
    r = rng.random()
    if r < 0.12:
        shown = {pick(rng, ("ok", "success")): True, **shown}
    elif r < 0.18:
        shown[pick(rng, ("source", "cached", "took_ms", "request"))] = pick(
            rng, (rng.randint(1, 900), "cache", "live", values.alnum(rng, 4, 6))
        )
    elif r < 0.24 and arguments:
        name = next(iter(arguments))
        shown = {name: arguments[name], **{k: v for k, v in shown.items() if k != name}}
    elif r < 0.28:
        shown = {pick(rng, ("result", "data", "output")): shown}
    elif r < 0.34:
        shown = {pick(rng, ("results", "items", "data", "matches")): [shown]}
    return json.dumps(shown, ensure_ascii=False, indent=1 if rng.random() < 0.08 else None)


def _field(maker: str, rng: Random, held_out: bool, slots: dict, arguments: dict, lines: int) -> object:
    if maker == "calc":
        first = next(iter(arguments.values()))
        try:
            answer = special.evaluate(str(first))
        except (ZeroDivisionError, ValueError):
            answer = "0"
        return float(answer) if "." in answer else int(answer)
    if maker.startswith("op:"):
        left, right = list(arguments.values())[:2]
        answer = special.evaluate(f"{left} {maker[3]} {right}")
        return float(answer) if "." in answer else int(answer)
    if maker == "kvfile":
        count = lines or rng.choice((1, 2, 3, 3, 4, 5, 7))
        content, slots["ask_key"], slots["ask_value"] = special.settings_file(rng, count)
        return content
    if maker == "files":
        return special.listing(rng)
    if maker == "namelist":
        return texts.names(rng, rng.choice((1, 2, 2, 3, 3, 4, 5)))
    if maker == "longlist":
        return texts.long_listing(rng, texts.names(rng, rng.choice((1, 1, 2, 2, 3, 4, 5))))
    if maker == "hits":
        return texts.hits(rng, slots["pattern"], slots["path"])
    if maker == "grepline":
        shown = pick(
            rng, ("{p}:{n}: {t} = None", "{p}:{n}: {t}", "{p}:{n}:{t} = {n}", "{p}:{n}: # {t}", "line {n}: {t}", "{n}: {t}")
        )
        return shown.format(p=slots["where"], n=rng.randint(1, 400), t=slots["text"])
    if maker == "under":
        return f"{slots['path'].rstrip('/')}/{values.make('file', rng, held_out)}"
    if maker == "orderrows":
        return texts.order_rows(rng)
    if maker == "cmdout":
        return texts.output_of(rng, slots["command"])
    if maker == "pathof":
        return f"{values.folder(rng).rstrip('/')}/{slots['name']}"
    if maker == "shellout":
        return special.shell_output(rng, slots["command"])
    if maker == "logline":
        return special.log_line(rng)
    if maker == "reverse":
        return slots["text"][::-1]
    if maker == "upper":
        return slots["text"].upper()
    return values.make(maker, rng, held_out)


def _failure(tool: Tool, rng: Random, slots: dict[str, str]) -> tuple[str, str]:
    """(what the tool returns, the reason in it)."""
    value = next((v for k, v in slots.items() if not k.startswith("+")), tool.name)
    reason = pick(
        rng,
        ("{v} not found", "no such {a}: {v}", "permission denied", "timeout after {n} s", "unknown {a} {v}", "service unavailable", "connection refused",
         "access denied for {v}", "rate limit exceeded", "internal error {n}", "{v} does not exist", "invalid {a}", "not allowed", "{v} is locked", "quota exceeded", "network error", "no entry", "no entry for {v}", "nothing found", "no result",
         "{v} is unknown", "not available", "no such entry", "try again later", "{v} is empty", "no rights for {v}", "bad request", "out of service", "not found"),
    ).format(v=value if len(value) < 40 and '"' not in value and "\n" not in value else "input", a=next(iter(tool.params.values()), "input"), n=rng.randint(2, 599))  # fmt: skip
    r = rng.random()
    if r < 0.4:
        return f"{pick(rng, ('Error', 'error', 'ERROR', 'Failed'))}: {reason}", reason
    if r < 0.85:
        return json.dumps({pick(rng, ("error", "error", "message", "failure")): reason}, ensure_ascii=False), reason
    return json.dumps({"ok": False, "error": reason}, ensure_ascii=False), reason


def call_json(call: Call) -> str:
    return json.dumps({"name": call.tool.name, "arguments": call.arguments}, ensure_ascii=False)
