"""Tools that `chat --tools` and `demo` execute for real: look into one directory, and do arithmetic. Nothing is written."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 4000
"""Of a file; a longer one is cut off, as agents do."""


def _declare(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "name": name, "description": description, "parameters": schema}


TOOLS: list[dict[str, Any]] = [
    _declare("list_files", "List the files in a directory", path="Path of the directory"),
    _declare("read_file", "Read the contents of a file", path="Path of the file"),
    _declare("search_files", "Search for text in files", pattern="Text to search for", path="Directory to search in"),
    _declare("calculate", "Evaluate an arithmetic expression", expression="The expression to evaluate"),
]

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class ToolError(Exception):
    """What the model is told instead of a result."""


class Toolbox:
    """The tools over one directory; paths outside of it are refused."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._tools: dict[str, Callable[..., str]] = {
            "list_files": self._list,
            "read_file": self._read,
            "search_files": self._search,
            "calculate": calculate,
        }

    def call(self, name: str, arguments: str) -> str:
        """Execute one call. arguments: JSON text, as the model wrote it. Errors come back as text that begins with `error:`."""
        try:
            if name not in self._tools:
                raise ToolError(f"no tool named {name}")
            values = json.loads(arguments or "{}")
            if not isinstance(values, dict):
                raise ToolError("arguments must be an object")
            return self._tools[name](**values)
        except (ToolError, OSError) as error:
            return f"error: {error}"
        except json.JSONDecodeError as error:
            return f"error: arguments are not JSON: {error}"
        except TypeError:
            return f"error: {name} does not take these arguments"

    def _inside(self, path: str) -> Path:
        found = (self._root / str(path).lstrip("/")).resolve()
        if not found.is_relative_to(self._root):
            raise ToolError(f"{path} is outside of the workspace")
        if not found.exists():
            raise ToolError(f"{path} does not exist")
        return found

    def _list(self, path: str) -> str:
        folder = self._inside(path)
        if not folder.is_dir():
            raise ToolError(f"{path} is not a directory")
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
        return ", ".join(names) or "(empty)"

    def _read(self, path: str) -> str:
        file = self._inside(path)
        if not file.is_file():
            raise ToolError(f"{path} is not a file")
        with file.open("rb") as stream:
            return stream.read(MOST_BYTES).decode("utf-8", "replace").rstrip("\n")

    def _search(self, pattern: str, path: str) -> str:
        for file in sorted(self._inside(path).rglob("*")):
            if not file.is_file():
                continue
            for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
                if pattern in line:
                    return json.dumps({"file": str(file.relative_to(self._root)), "line": number})
        raise ToolError(f"{pattern} was not found in {path}")


def calculate(expression: str) -> str:
    """Numbers, the four operations, remainder and brackets; nothing else is evaluated. Raises ToolError."""

    def value(node: ast.AST, depth: int = 0) -> float:
        if depth > 50:
            raise ToolError("the expression is nested too deeply")
        match node:
            case ast.Expression():
                return value(node.body, depth + 1)
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.left, depth + 1), value(node.right, depth + 1))
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.operand, depth + 1))
            case _:
                raise ToolError(f"cannot evaluate {expression!r}")

    try:
        result = value(ast.parse(str(expression).strip(), mode="eval"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"cannot evaluate {expression!r}") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(str(error)) from None
    return str(int(result)) if float(result).is_integer() else f"{result:.6g}"
