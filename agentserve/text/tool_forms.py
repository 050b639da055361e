"""One form for tools that say the same: the order of keys in which a tool was first declared stays its order.

Clients that build schemas from hash maps send keys in another order with every process or every turn. To the model that is
another prompt; as JSON it is the same tool. Order of tools and of arrays is the client's choice and is not touched.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import xxhash

from agentserve.protocol.items import Tool

KEPT_TOOLS = 2048


class ToolForms:
    """First forms of the newest tools, per salt. Thread-safe."""

    def __init__(self, kept: int = KEPT_TOOLS) -> None:
        self._limit = kept
        self._first: OrderedDict[bytes, Tool] = OrderedDict()
        self._lock = threading.Lock()
        self._canonical = msgspec.json.Encoder(order="sorted")

    def first(self, tools: Sequence[Tool], salt: bytes) -> tuple[Tool, ...]:
        """The same tools, each with its keys in the order in which this salt first sent them."""
        keys = [xxhash.xxh3_128_digest(b"%d:" % len(salt) + salt + self._canonical.encode(tool)) for tool in tools]
        with self._lock:
            found = tuple(self._first.setdefault(key, tool) for key, tool in zip(keys, tools, strict=True))
            for key in keys:
                self._first.move_to_end(key)
            while len(self._first) > self._limit:
                self._first.popitem(last=False)
        return found
