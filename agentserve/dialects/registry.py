"""Which dialect a model speaks. Files are imported when their dialect is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from agentserve.dialects.base import Dialect

DIALECTS: Mapping[str, str] = {
    "hermes": "agentserve.dialects.hermes:Hermes",
    "qwen3_xml": "agentserve.dialects.qwen3_xml:Qwen3Xml",
    "plain": "agentserve.dialects.plain:Plain",
}


def get_dialect(name: str) -> Dialect:
    """Raises KeyError, with the names that exist, for an unknown one."""
    if name not in DIALECTS:
        raise KeyError(f"unknown dialect {name!r}; known are {', '.join(DIALECTS)}")
    module, attribute = DIALECTS[name].split(":")
    return getattr(importlib.import_module(module), attribute)()


def dialect_of(template: str) -> str:
    """Name of the dialect that a chat template writes, judged by its own text."""
    if "<tool_call>" not in template:
        return "plain"
    return "qwen3_xml" if "<function=" in template else "hermes"
