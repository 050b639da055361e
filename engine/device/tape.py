"""Work on two streams, recorded as calls: what runs after what, and nothing about when. A device runs a tape, or captures it.

The order that a tape promises is only this: calls of one stream run in the order of recording, and a `wait` runs after the
`mark` that it names. Whatever relies on more is a race; the host device shows it by running tapes in other orders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

Call = Callable[[], object]


class Lane(IntEnum):
    """MAIN computes; SIDE moves bytes beside it."""

    MAIN = 0
    SIDE = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on a lane: everything recorded there before. index counts marks of the tape."""

    index: int
    lane: Lane


@dataclass(frozen=True, slots=True)
class Entry:
    """One of: a call, a mark that is set, a mark that is waited for."""

    lane: Lane
    call: Call | None = None
    sets: Mark | None = None
    awaits: Mark | None = None


class Tape:
    """Entries in order of recording. Each lane goes on where the tape before ended; a captured tape must end joined."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.marks = 0

    def add(self, call: Call, lane: Lane = Lane.MAIN) -> None:
        self.entries.append(Entry(lane, call=call))

    def mark(self, lane: Lane = Lane.MAIN) -> Mark:
        mark = Mark(self.marks, lane)
        self.marks += 1
        self.entries.append(Entry(lane, sets=mark))
        return mark

    def wait(self, mark: Mark, lane: Lane) -> None:
        """Nothing recorded on `lane` from here on runs before the mark."""
        self.entries.append(Entry(lane, awaits=mark))

    def fork(self) -> None:
        """SIDE goes on only after everything of MAIN so far."""
        self.wait(self.mark(Lane.MAIN), Lane.SIDE)

    def join(self) -> None:
        """MAIN goes on only after everything of SIDE so far, that of earlier tapes included."""
        self.wait(self.mark(Lane.SIDE), Lane.MAIN)

    def pieces(self, calls: int) -> list[Tape]:
        """The same work as tapes to be run one after another, of about so many calls each, cut only where both lanes are joined
        and no mark is waited for across the cut."""
        awaited = {entry.awaits.index: at for at, entry in enumerate(self.entries) if entry.awaits is not None}
        parts = [Tape()]
        count, open_until, side = 0, -1, -1  # side: the mark behind all of SIDE, where it is set
        alone = True
        for at, entry in enumerate(self.entries):
            if count >= calls and alone and at > open_until:
                parts.append(Tape())
                count = 0
            parts[-1].entries.append(entry)
            if entry.call is not None:
                count += 1
            if entry.lane is Lane.SIDE and entry.sets is None:
                alone, side = False, -1  # a captured lane begins with its wait, so that one belongs to what follows it
            if entry.sets is not None:
                open_until = max(open_until, awaited.get(entry.sets.index, -1))
                if entry.lane is Lane.SIDE:
                    side = entry.sets.index
            if entry.awaits is not None and entry.lane is Lane.MAIN and entry.awaits.index == side:
                alone = True
        for part in parts:
            part.marks = self.marks
        return parts
