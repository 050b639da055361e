"""Results that a kind does not foresee: missing, extra and foreign fields, lists, bare text. The answer repeats what is there."""

from __future__ import annotations

import json
import re
from random import Random

from examples.demo_model import special, values
from examples.demo_model import vocabulary as v
from examples.demo_model.values import pick

KEYS = ["name", "title", "result", "match", "price", "cost", "total", "amount", "id", "ref", "reference", "confirmation", "number", "count", "found", "status", "state", "date", "when", "eta", "place", "location", "address", "owner", "contact", "rating", "score", "url", "link", "time", "text", "summary", "note", "message", "remaining", "left", "file", "path", "duration", "minutes", "code", "wind", "humidity", "pressure", "color", "size", "version", "author", "email", "phone", "level", "unit", "speed", "weight", "height", "days", "hours", "balance", "points", "salary", "value", "output", "answer", "info", "details", "kind", "type", "category", "language", "country", "city", "team", "manager", "room", "floor", "seat", "gate", "platform", "channel", "user", "role"]  # fmt: skip
MAKERS = ("id", "slug", "word", "sentence", "number", "amount", "path", "url", "date", "clock", "person", "city", "title", "email", "version", "plain", "thing", "product", "ip", "number", "word", "invented")  # fmt: skip


def spoken_key(key: str) -> str:
    """camelCase or snake_case as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).replace("_", " ").replace("-", " ").lower()


def _value(rng: Random, held_out: bool) -> object:
    if rng.random() < 0.08:
        return rng.random() < 0.5
    return values.make(pick(rng, MAKERS), rng, held_out)


def _text(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _fields(rng: Random, held_out: bool, own: dict[str, object]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in own.items():
        if rng.random() < 0.45 and not isinstance(value, list) and "\n" not in str(value):
            fields[key] = value
    while not fields or (len(fields) < 4 and rng.random() < 0.45):
        key = pick(rng, KEYS)
        if rng.random() < 0.2:
            key = pick(rng, v.THINGS) + pick(rng, ("", "_id", "_name", "_count", "s"))
        fields[key] = _value(rng, held_out)
    items = list(fields.items())
    rng.shuffle(items)
    return dict(items)


def _pairs(fields: dict[str, object], rng: Random) -> str:
    form = pick(rng, ("{k} {v}", "{k}: {v}", "{k} {v}", "the {k} is {v}", "{k} is {v}"))
    return (
        special.and_list([form.format(k=spoken_key(k), v=_text(x)) for k, x in fields.items()])
        if rng.random() < 0.5
        else ", ".join(form.format(k=spoken_key(k), v=_text(x)) for k, x in fields.items())
    )


def surprise(rng: Random, held_out: bool, own: dict[str, object], as_json: bool) -> tuple[str, str, tuple[str, ...]]:
    """(result, answer, values that the answer repeats). own: the fields that the kind would show."""
    lead = pick(rng, ("", "", "Here it is: ", "The result: ", "I found: ", "Done: ", "Ok: ", "I got this: "))
    r = rng.random()
    if not as_json:
        if r < 0.25:
            items = [
                str(values.make(pick(rng, ("word", "slug", "path", "thing", "first")), rng, held_out))
                for _ in range(rng.randint(2, 5))
            ]
            return (
                pick(rng, (", ", "\n", ", ", "\n- ")).join(items),
                _finish(lead + special.and_list(items)),
                tuple(items),
            )
        if r < 0.5:
            fields = _fields(rng, held_out, own)
            shown = pick(rng, ("\n", ", ", "; ")).join(
                f"{spoken_key(k)}{pick(rng, (': ', '=', ' '))}{_text(x)}" for k, x in fields.items()
            )
            return shown, _finish(lead + _pairs(fields, rng)), tuple(_text(x) for x in fields.values())
        text = _text(_value(rng, held_out))
        if rng.random() < 0.4:
            text += " " + _text(_value(rng, held_out))
        return (
            text,
            _finish(pick(rng, ("", "The result: ", "It says: ", "I got: ", "The tool says: ")) + text),
            (text,),
        )
    if r < 0.6:
        fields = _fields(rng, held_out, own)
        shown: object = fields
        if rng.random() < 0.2:
            shown = {pick(rng, ("result", "data", "response")): fields}
        return (
            json.dumps(shown, ensure_ascii=False),
            _finish(lead + _pairs(fields, rng)),
            tuple(_text(x) for x in fields.values()),
        )
    if r < 0.82:
        key = pick(rng, (*KEYS, *v.THINGS)) + "s"
        items = [
            str(values.make(pick(rng, ("word", "slug", "path", "thing", "first", "branch")), rng, held_out))
            for _ in range(rng.randint(1, 5))
        ]
        shown = {key: items} if rng.random() < 0.75 else items
        said = (
            f"{spoken_key(key)}: {special.and_list(items)}"
            if shown is not items and rng.random() < 0.6
            else special.and_list(items)
        )
        return json.dumps(shown, ensure_ascii=False), _finish(lead + said), tuple(items)
    rows = [_fields(rng, held_out, {})]
    rows.append({key: _value(rng, held_out) for key in rows[0]})
    shown = {pick(rng, ("results", "items", "data", "matches", "rows")): rows} if rng.random() < 0.7 else rows
    said = "; ".join(", ".join(f"{spoken_key(k)} {_text(x)}" for k, x in row.items()) for row in rows)
    return (
        json.dumps(shown, ensure_ascii=False),
        _finish(lead + said),
        tuple(_text(x) for row in rows for x in row.values()),
    )


def _finish(text: str) -> str:
    return text if text[-1:] in ".!?" else text + "."
