"""Random JSON schemas by seed: nested objects, arrays, enums, bounded numbers, unions, patterns, references, all of Unicode.

Only what the server promises to enforce; tests of what it refuses are elsewhere.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "id", "größe", "名前", "a b", "x-y", "price", "tags", "emoji 🙂", "items", "type", "$ref2", 'q"uote', "k/v")
WORDS = (
    "red",
    "green",
    "blue",
    "",
    "naïve",
    "日本",
    "🙂🙃",
    "a\nb",
    'say "hi"',
    "back\\slash",
    "<tool_call>",
    "</think>",
    "null",
)
PATTERNS = (
    "^[a-z]{2,8}$",
    "^[A-Z]{3}-[0-9]{4}$",
    "^(yes|no|maybe)$",
    "^.{0,8}[0-9]{3}",
    "^.{0,8}[0-9]{3}.{0,8}$",
    "^[^ ]{1,12}$",
    "^\\d{1,3}(\\.\\d{1,3}){3}$",
    "^[äöü]{1,4}$",
    "^#[0-9a-f]{6}$",
)
FORMATS = ("date", "uuid", "ipv4", "email")


def random_schema(seed: int) -> Schema:
    """The schema of this seed; its root is an object in nine of ten."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return _any(rng, 2)
    schema = _object(rng, 3)
    if rng.random() < 0.15:
        node = {
            "type": "object",
            "properties": {"value": _leaf(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        schema["$defs"] = {"node": node}
        schema["properties"]["list"] = {"$ref": "#/$defs/node"}
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    roll = rng.random()
    if depth == 0 or roll < 0.5:
        return _leaf(rng)
    if roll < 0.7:
        return _object(rng, depth - 1)
    if roll < 0.85:
        return _array(rng, depth - 1)
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    roll = rng.random()
    if roll < 0.85:
        schema["additionalProperties"] = False
    elif roll < 0.95:
        schema["additionalProperties"] = _leaf(rng)
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(rng, depth)}
    low = rng.randint(0, 2)
    if rng.random() < 0.5:
        schema["minItems"] = low
    schema["maxItems"] = low + rng.randint(0, 3)
    if rng.random() < 0.2:
        schema["prefixItems"] = [_leaf(rng) for _ in range(rng.randint(1, 2))]
        schema["maxItems"] += 2
    return schema


def _leaf(rng: random.Random) -> Schema:
    roll = rng.randrange(10)
    if roll == 0:
        return {"type": "boolean"}
    if roll == 1:
        return {"enum": rng.sample([*WORDS, 1, -2.5, None, True, [1, "a"], {"k": None}], rng.randint(1, 4))}
    if roll == 2:
        return {"type": "string", "enum": rng.sample(WORDS, rng.randint(1, 4))}
    if roll == 3:
        return {"const": rng.choice([*WORDS, 7, None])}
    if roll == 4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if roll == 5:
        return {"type": ["string", "null"], "maxLength": rng.randint(1, 20)}
    if roll == 6:
        low = rng.randint(0, 5)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 15)}
    if roll == 7:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if roll == 8:
        return _number(rng, "integer")
    return _number(rng, "number")


def _number(rng: random.Random, kind: str) -> Schema:
    schema: Schema = {"type": kind}
    low = rng.randint(-1000, 1000)
    span = rng.choice((0, 1, 7, 500))
    if rng.random() < 0.6:
        schema["minimum"] = low
    if rng.random() < 0.6:
        schema["maximum"] = low + span
    if kind == "integer" and not schema.keys() & {"minimum", "maximum"} and rng.random() < 0.4:
        schema["multipleOf"] = rng.choice((2, 5, 10))
    return schema
