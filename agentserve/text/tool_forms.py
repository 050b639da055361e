"""One form for tools that say the same: the order of keys in which a tool was first declared stays its order.

Clients that build schemas from hash maps send keys in another order with every process or every turn. To the model that is
another prompt; as JSON it is the same tool. Order of tools and of arrays is the client's choice and is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from agentserve.kept import PER_JSON_BYTE, Kept
from agentserve.protocol.items import Tool

KEPT_BYTES = 32 << 20


class ToolForms:
    """First forms of the newest tools, per salt. Thread-safe."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.kept: Kept[bytes, Tool] = Kept(kept_bytes)
        self._canonical = msgspec.json.Encoder(order="sorted")

    def first(self, tools: Sequence[Tool], salt: bytes) -> tuple[Tool, ...]:
        """The same tools, each with its keys in the order in which this salt first sent them."""
        return tuple(self._first(tool, salt) for tool in tools)

    def _first(self, tool: Tool, salt: bytes) -> Tool:
        said = self._canonical.encode(tool)
        key = xxhash.xxh3_128_digest(b"%d:" % len(salt) + salt + said)
        return self.kept.setdefault(key, tool, PER_JSON_BYTE * len(said))
