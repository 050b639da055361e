"""What the dialects' contract tests share: calls and texts at random, and what a dialect writes and reads of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from agentserve.dialects.base import Piece
from agentserve.dialects.registry import DIALECTS, get_dialect
from agentserve.dialects.stream import DialectParser
from agentserve.interfaces import CallDelta, Delta, ReasoningDelta, TextDelta
from agentserve.protocol.items import FunctionTool, Tool
from agentserve.text.tokenizer import Tokenizer
from statecache.types import MarkerTable
from tests.agentserve.text.models import tokenizer_with
from tests.budget import examples

WITH_TOOLS = [name for name in DIALECTS if name != "plain"]
dialects = pytest.mark.parametrize("name", list(DIALECTS))
tool_dialects = pytest.mark.parametrize("name", WITH_TOOLS)
forms = pytest.mark.parametrize("as_tokens", [True, False], ids=["token markers", "text markers"])
quick = settings(
    max_examples=examples(14, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)

characters = st.characters(codec="utf-8", exclude_categories=("Cs",))
names = st.from_regex(r"[a-z][a-z0-9_.-]{0,15}", fullmatch=True)
NASTY = ["</tool_call>", "<tool_call>", "</think>", "<|im_end|>", '"}', "\\", "</function>", "</parameter>x", "\n", "{", "日本"]
strings = st.one_of(st.text(characters, max_size=20), st.lists(st.sampled_from([*NASTY, "a", " "]), max_size=6).map("".join))
values = st.recursive(
    st.one_of(
        strings, st.integers(-(10**9), 10**9), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
calls = st.tuples(names, st.dictionaries(names, values, max_size=4))
prose = st.text(characters, max_size=30).map(str.strip)


def tokenizer_of(name: str, as_tokens: bool) -> Tokenizer:
    """One that has the dialect's markers as tokens (of those that hold others, only these), or has none of them."""
    markers = get_dialect(name).markers.all
    simple = tuple(m for m in markers if not any(other in m for other in markers if other != m))
    return tokenizer_with(simple + (get_dialect(name).turn_ends or ()) if as_tokens else ())


def ends_of(name: str, tok: Tokenizer) -> MarkerTable:
    return MarkerTable(turn_end=tok.marker_ids(*(get_dialect(name).turn_ends or ("<|im_end|>",))))


def encode(tok: Tokenizer, pieces: Sequence[Piece]) -> list[int]:
    """Ids of what a model writes: markers in tags as tokens where they are, texts as text."""
    ids: list[int] = []
    for text, tag in pieces:
        parts = re.split("(" + "|".join(map(re.escape, tok.markers)) + ")", text) if tag else [text]
        for part in parts:
            ids += [tok.markers[part].id] if tag and part in tok.markers else tok.encode(part).tolist() if part else []
    return ids


def block(name: str, called: str, arguments: dict[str, Any]) -> list[Piece]:
    """An answer that is just this call."""
    return get_dialect(name).write_answer("", "", [(called, arguments)])


def parse(
    name: str, tok: Tokenizer, ids: Sequence[int], cuts: Sequence[int] = (), tools: Sequence[Tool] = (), **options: Any
) -> list[Delta]:
    parser = DialectParser(get_dialect(name), tok, ends_of(name, tok), tools, **options)
    out: list[Delta] = []
    at = 0
    for cut in [*sorted(c for c in cuts if c < len(ids)), len(ids)]:
        out += parser.push(ids[at:cut])
        at = cut
    return merged([*out, *parser.finish()])


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind joined."""
    out: list[Delta] = []
    for delta in deltas:
        if out and type(out[-1]) is type(delta) and isinstance(delta, TextDelta | ReasoningDelta | CallDelta):
            last = out[-1]
            assert isinstance(last, TextDelta | ReasoningDelta | CallDelta)
            out[-1] = type(delta)(last.text + delta.text)
        else:
            out.append(delta)
    return out


def tool_for(name: str, arguments: dict[str, Any]) -> FunctionTool:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
    return FunctionTool(
        name=name,
        parameters={"type": "object", "properties": {k: {"type": kinds[type(v)]} for k, v in arguments.items()}},
    )


def unambiguous(name: str, as_tokens: bool, arguments: dict[str, Any]) -> bool:
    """What a dialect can carry. Where all its tags hold tokens: everything, and so where arguments are JSON.

    Bare text between tags that are text cannot hold a closing tag with the opening tag of another parameter of the call
    behind it, or with all the rest of a call; the tests leave a little more out, to say it briefly.
    """
    if get_dialect(name).markers.call_open.startswith("[TOOL") or name in ("hermes", "deepseek_v3", "kimi_k2"):
        return True
    if name == "harmony":
        return as_tokens or "<|" not in json.dumps(arguments)
    bare = [value for value in arguments.values() if isinstance(value, str)]
    if as_tokens and name not in ("qwen3_xml", "minimax"):
        return True
    if as_tokens:
        return not any("</parameter>" in value and value.rstrip().endswith(("</function>", "</invoke>")) for value in bare)
    return not any("</" in value for value in bare)
