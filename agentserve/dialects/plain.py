"""Models without tools: thinking and text only."""

from __future__ import annotations

from agentserve.dialects.base import Dialect, Markers


class Plain(Dialect):
    name = "plain"
    markers = Markers(call_open="", call_close="")
    trims = False
    after_thinking = ""
