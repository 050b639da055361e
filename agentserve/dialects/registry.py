"""Which dialect a model speaks. Files are imported when their dialect is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping

from agentserve.dialects.base import Dialect

DIALECTS: Mapping[str, str] = {
    "hermes": "agentserve.dialects.hermes:Hermes",
    "qwen3_xml": "agentserve.dialects.qwen3_xml:Qwen3Xml",
    "glm": "agentserve.dialects.glm:Glm",
    "deepseek_v3": "agentserve.dialects.deepseek_v3:DeepSeekV3",
    "deepseek_dsml": "agentserve.dialects.deepseek_dsml:DeepSeekDsml",
    "deepseek_dsml_v4": "agentserve.dialects.deepseek_dsml:DeepSeekDsmlV4",
    "harmony": "agentserve.dialects.harmony:Harmony",
    "mistral": "agentserve.dialects.mistral:Mistral",
    "kimi_k2": "agentserve.dialects.kimi_k2:KimiK2",
    "minimax": "agentserve.dialects.minimax:MiniMax",
    "plain": "agentserve.dialects.plain:Plain",
}

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_dsml_v4", ("｜DSML｜tool_calls",)),
    ("deepseek_dsml", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen3_xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
)
"""What a chat template writes, the most telling first."""
_TOKENS: tuple[tuple[str, str], ...] = (
    ("harmony", "<|channel|>"),
    ("deepseek_dsml", "｜DSML｜"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("minimax", "<minimax:tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
)
"""Tokens that only one family has."""


def get_dialect(name: str) -> Dialect:
    """Raises KeyError, with the names that exist, for an unknown one."""
    if name not in DIALECTS:
        raise KeyError(f"unknown dialect {name!r}; known are {', '.join(DIALECTS)}")
    module, attribute = DIALECTS[name].split(":")
    return getattr(importlib.import_module(module), attribute)()


def dialect_of(template: str, tokens: Collection[str] = ()) -> str:
    """Name of the dialect that a chat template writes, judged by its own text; else by tokens that only one family has.

    tokens: texts of the tokenizer's markers.
    """
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name
    return next((name for name, token in _TOKENS if token in tokens), "plain")
