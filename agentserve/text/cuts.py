"""Units with their lengths → prompt boundaries.

The same convention as for generated ids (statecache.boundary): an opening marker gives the position before it, a closing one
the position behind it, and the end of an assistant turn the position before its end marker, where generation left it.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentserve.text.layout import AFTER_ITEMS, Unit
from agentserve.worker.messages import Cut
from statecache.policy import better_kind
from statecache.types import BoundaryKind, MarkerTable


def find_cuts(units: Iterable[Unit], lengths: Iterable[int], markers: MarkerTable) -> tuple[Cut, ...]:
    """Cuts at rising positions, one per position (the better kind). lengths: tokens of each unit."""
    before = dict.fromkeys(markers.think_open, BoundaryKind.THINK_OPEN)
    before |= dict.fromkeys(markers.call_open, BoundaryKind.CALL_OPEN)
    before |= dict.fromkeys(markers.turn_end, BoundaryKind.TURN)
    after = dict.fromkeys(markers.think_close, BoundaryKind.THINK_CLOSE)
    after |= dict.fromkeys(markers.call_close, BoundaryKind.CALL_CLOSE)
    found: dict[int, Cut] = {}

    def cut(position: int, kind: BoundaryKind, item: int) -> None:
        old = found.get(position)
        if position >= 1 and (old is None or better_kind(old.kind, kind) is not old.kind):
            found[position] = Cut(position, kind, -1 if item == AFTER_ITEMS else item)

    position = 0
    system_seen = False
    for unit, length in zip(units, lengths, strict=True):
        if unit.assistant and unit.marker is not None:
            if (kind := before.get(unit.marker.id)) is not None:
                cut(position, kind, unit.item)
            if (kind := after.get(unit.marker.id)) is not None:
                cut(position + length, kind, unit.item)
        position += length
        if unit.ends == "system" and not system_seen:
            system_seen = True
            cut(position, BoundaryKind.SYSTEM, unit.item)
        elif unit.ends in ("user", "system"):
            cut(position, BoundaryKind.USER, unit.item)
        elif unit.ends == "tool":
            cut(position, BoundaryKind.TOOL_RESULT, unit.item)
    return tuple(found[p] for p in sorted(found))
