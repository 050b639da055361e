"""What test_audit.py sends: for every route and every kind of frame bodies that hold secrets, good ones and bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECRET = "zQ7secret"
"""In all that a prompt, an answer or a schema says. Nowhere but in what is answered to whoever sent it."""
NAME = "zQ7name"
"""Where an id or one word of a few is expected: an error may quote that, a log may not."""
KEY = "zQ7key"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": SECRET,
    "description": SECRET,
    "default": {"a": SECRET},
    "properties": {"a": {"enum": [SECRET, 1]}, "b": {"type": "string", "pattern": SECRET}, "c": {"const": SECRET}},
    "required": ["a"],
    "additionalProperties": False,
}
BAD_SCHEMAS: list[dict[str, Any]] = [
    {"allOf": [{"enum": [SECRET]}, {"enum": [SECRET + "2"]}]},
    {"type": "string", "pattern": f"{SECRET}(?=x)"},
    {"type": "string", "pattern": f"({SECRET}\nerror: {SECRET}"},
    {"type": "number", "multipleOf": SECRET},
    {"const": SECRET, "type": "integer"},
    {"type": SECRET},
    {"$ref": f"#/$defs/{SECRET}"},
    {"$ref": SECRET},
    {"not": {"const": SECRET}},
    {"type": "object", "required": [SECRET], "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"enum": SECRET}}},
    {"items": SECRET},
    {"anyOf": SECRET},
]
BAD_FORMS: list[dict[str, Any]] = [
    *({"type": "json_schema", "name": "n", "strict": True, "schema": schema} for schema in BAD_SCHEMAS),
    *(
        {"type": "regex", "pattern": pattern}
        for pattern in (f"{SECRET}(", f"{SECRET}(?=x)", f"(?x)\nerror: {SECRET}\n(", f"[z-{SECRET}]")
    ),
    *(
        {"type": "grammar", "syntax": "lark", "definition": definition}
        for definition in (
            f"start: {SECRET}",
            SECRET,
            f'start: "{SECRET}',
            f"start: /{SECRET}(/",
            f'start: %json {{"type": "{SECRET}"}}',
            f'start: %json {{"type": "string", "pattern": "{SECRET}("}}',
            f"start: a\na: {SECRET}\nerror: {SECRET}",
        )
    ),
    {"type": "grammar", "syntax": "regex", "definition": f"{SECRET}("},
]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": SECRET}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": SECRET}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": SECRET})},
    {"type": "function_call_output", "call_id": "c", "output": SECRET},
    {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": SECRET},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": SECRET}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": SECRET}]},
    {"role": "user", "content": SECRET},
]
FUNCTION = {"name": "f", "description": SECRET, "parameters": SCHEMA, "strict": True}
TURN: dict[str, Any] = {
    "model": "fake",
    "instructions": SECRET,
    "input": ITEMS,
    "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "g", "description": SECRET}],
    "text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA, "description": SECRET}},
    "stop": [SECRET],
    "metadata": {"k": SECRET},
    "prompt_cache_key": SECRET,
    "user": SECRET,
    "include": ["reasoning.encrypted_content"],
    "agentserve": {"events": True, "normalise": ["dates"]},
}
BAD_TURNS: list[dict[str, Any]] = [
    *({"input": SECRET, "text": {"format": form}} for form in BAD_FORMS),
    *(
        {"input": SECRET, "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}]}
        for schema in BAD_SCHEMAS
    ),
    {"input": [{"type": "reasoning", "summary": [], "encrypted_content": SECRET}]},
    {"input": [{"type": "compaction", "encrypted_content": SECRET}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": SECRET}]}]},
    {"input": SECRET, "stop": SECRET * 1000},
    {"input": SECRET, "metadata": {"k": SECRET * 4000}},
    {"input": SECRET, "stream": True},
]
CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": SECRET},
        {"role": "user", "content": [{"type": "text", "text": SECRET}]},
        {"role": "assistant", "content": SECRET, "reasoning_content": SECRET, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": SECRET})}}
        ]},
        {"role": "tool", "tool_call_id": "c", "content": SECRET},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
    "stop": [SECRET],
    "user": SECRET,
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 50,
    "system": [{"type": "text", "text": SECRET}],
    "messages": [
        {"role": "user", "content": SECRET},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": SECRET, "signature": SECRET},
                {"type": "text", "text": SECRET},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": SECRET}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": SECRET}]}],
        },
    ],
    "tools": [{"name": "f", "description": SECRET, "input_schema": SCHEMA}],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": [SECRET],
    "metadata": {"user_id": SECRET},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
BAD_CHATS = [
    {
        "messages": CHAT["messages"][:2],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}},
    }
    for schema in BAD_SCHEMAS
]
BAD_MESSAGES = [
    {
        **{name: MESSAGES[name] for name in ("model", "max_tokens", "messages")},
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    for schema in BAD_SCHEMAS
]


@dataclass(frozen=True)
class Made:
    """What the server has for the routes that look for something. id: by how a route's path begins."""

    response: str
    session: str
    conversation: str
    item: str

    def path(self, pattern: str) -> str:
        kinds = {
            "/v1/responses/": self.response,
            "/v1/sessions/": self.session,
            "/v1/conversations/": self.conversation,
            "/v1/models/": "fake",
        }
        found = [value for start, value in kinds.items() if pattern.startswith(start)]
        path = pattern.replace("{id}", *found).replace("{id:path}", *found) if found else pattern
        path = path.replace("{item_id}", self.item)
        assert "{" not in path, f"nothing to fill into {pattern}: say here what"
        return path


Bodies = Callable[[Made], list[dict[str, Any]]]
BODIES: dict[str, Bodies] = {
    "/v1/responses": lambda made: [TURN, *BAD_TURNS, {"input": SECRET, "previous_response_id": made.response}],
    "/v1/responses/input_tokens": lambda made: [TURN, *BAD_TURNS],
    "/v1/responses/compact": lambda made: [{"model": "fake", "instructions": SECRET, "input": ITEMS}, *BAD_TURNS[-6:]],
    "/v1/responses/{id}/cancel": lambda made: [{"reason": SECRET}],
    "/v1/chat/completions": lambda made: [CHAT, *BAD_CHATS, {**CHAT, "stream": True}],
    "/v1/messages": lambda made: [MESSAGES, *BAD_MESSAGES, {**MESSAGES, "stream": True}],
    "/v1/messages/count_tokens": lambda made: [MESSAGES, *BAD_MESSAGES],
    "/v1/conversations": lambda made: [{"items": ITEMS, "metadata": {"k": SECRET}}],
    "/v1/conversations/{id}": lambda made: [{"metadata": {"k": SECRET}}, {"metadata": {"k": SECRET * 4000}}],
    "/v1/conversations/{id}/items": lambda made: [{"items": ITEMS}, *BAD_TURNS[-6:-3]],
    "/v1/conversations/{id}/items/{item_id}": lambda made: [{"item": ITEMS[0]}, {"item": BAD_TURNS[-6]["input"][0]}],
    "/v1/sessions/{id}/fork": lambda made: [{"response_id": made.response, "note": SECRET}],
    "/v1/memory/experts": lambda made: [{"slots": 40}, {"slots": SECRET}, {"slots": 40, "model": SECRET}],
    "/v1/cache/quota": lambda made: [{"ram_bytes": 1 << 30, "disk_bytes": 1 << 30}, {"ram_bytes": SECRET}, {"note": SECRET}],
    "/v1/sessions/{id}/pin": lambda made: [{"checkpoint": NAME, "note": SECRET}],
    "/v1/sessions/{id}/release": lambda made: [{"checkpoint": NAME, "note": SECRET}],
}
FRAMES: dict[str, Bodies] = {
    "response.create": BODIES["/v1/responses"],
    "response.cancel": lambda made: [{"response_id": made.response, "reason": SECRET}],
    "response.steer": lambda made: [{"previous_response_id": made.response, "input": ITEMS}, {"input": SECRET}],
    "agentserve.follow": lambda made: [{"response_id": made.response, "starting_after": -1, "note": SECRET}],
}
