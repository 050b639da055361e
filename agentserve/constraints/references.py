"""Where a reference within a schema leads. Knows `#` and `#/…` only."""

from __future__ import annotations

from typing import Any


def resolve(root: Any, reference: str) -> Any:
    """What a local reference (`#`, `#/$defs/x`) names. Raises LookupError."""
    node = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and step.isascii() and step.isdigit() and len(step) <= 9:
            node = node[int(step)]
        elif isinstance(node, dict):
            node = node[step]
        else:
            raise LookupError(reference)
    return node
