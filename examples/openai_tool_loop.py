"""A tool loop with the plain OpenAI SDK over one WebSocket.

Start a server (`.venv/bin/agentserve serve`), set AGENTSERVE_TOKEN, then:

    .venv/bin/python examples/openai_tool_loop.py "What is 17 times 23?"

Each turn sends only what is new and names the response it follows, so the server prefills a few tokens instead of the whole
conversation.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI, OpenAIError

NO_TOKEN = "set AGENTSERVE_TOKEN to the server's token, which it keeps in ~/.local/state/agentserve/token"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "calculate",
        "description": "Evaluate an arithmetic expression",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 2 * (3 + 4)"}},
            "required": ["expression"],
        },
    },
    {
        "type": "function",
        "name": "read_file",
        "description": "Read a text file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "path of the file"}},
            "required": ["path"],
        },
    },
]

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Four operations and brackets; nothing else is evaluated."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError(f"cannot evaluate {ast.dump(node)}")

    return f"{value(ast.parse(expression, mode='eval')):g}"


def read_file(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read(4000)


def call(name: str, arguments: str) -> str:
    """Run one tool; an error goes back to the model as the tool's output."""
    try:
        return {"calculate": calculate, "read_file": read_file}[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"error: {error}"


def main(question: str, base_url: str, token: str) -> None:
    client = OpenAI(base_url=base_url, api_key=token)
    model = client.models.list().data[0].id
    with client.responses.connect() as connection:
        new_items: Any = [{"role": "user", "content": question}]
        previous: str | None = None
        while new_items:
            follow = {"previous_response_id": previous} if previous else {}
            connection.response.create(model=model, input=new_items, tools=TOOLS, **follow)
            new_items = []
            for event in connection:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
                elif event.type in ("response.failed", "response.incomplete", "error"):
                    sys.exit(f"\n{event}")
                elif event.type == "response.completed":
                    previous = event.response.id
                    usage = event.response.usage
                    if usage:
                        cached = usage.input_tokens_details.cached_tokens
                        print(f"\n[{usage.input_tokens} prompt tokens, {cached} from a checkpoint]")
                    for item in event.response.output:
                        if item.type == "function_call":
                            output = call(item.name, item.arguments)
                            print(f"[{item.name}({item.arguments}) -> {output}]")
                            new_items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
                    break


if __name__ == "__main__":
    url = os.environ.get("AGENTSERVE_URL", "http://127.0.0.1:8741/v1")
    asked = " ".join(sys.argv[1:]) or "What is 17 times 23?"
    try:
        main(asked, url, os.environ.get("AGENTSERVE_TOKEN") or sys.exit(NO_TOKEN))
    except OpenAIError as error:
        sys.exit(f"{url}: {error}")
