"""What is to be saved of a turn, and was: its cuts, the names of what lies there, and what nothing has proved good yet.

Decides nothing about bytes and asks neither engine nor cache; state_bridge.py does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentserve.worker.messages import Cut, Saved
from agentserve.worker.turns import TurnRecord
from statecache.boundary import GeneratedBoundaries, prompt_cuts, thinking_is_open
from statecache.checkpoint import PutResult
from statecache.experience import Experience
from statecache.policy import Policy, better_kind
from statecache.returns import CALLS, Returns
from statecache.types import Boundary, BoundaryKind

SESSIONS_FOLLOWED = 4096


@dataclass
class TurnSaves:
    """cuts: boundary by position, of all that are asked for. saved: kind by position, of those that the cache has.
    placed: ids of the same.

    parted_at: tokens that the prompt shares with a saved context which goes on otherwise, 0 if there is none.
    unproven: ids of checkpoints, restored or placed, of which nobody has seen finite logits. deepest: position of the deepest
    new one.
    """

    scanner: GeneratedBoundaries | None
    parted_at: int = 0
    cuts: dict[int, Boundary] = field(default_factory=dict)
    saved: dict[int, BoundaryKind] = field(default_factory=dict)
    placed: dict[int, str] = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)
    deepest: int = 0

    @classmethod
    def of(cls, turn: TurnRecord) -> TurnSaves:
        markers = turn.start.markers
        if not turn.start.generate:
            return cls(None)
        return cls(GeneratedBoundaries(markers, len(turn.ids), thinking=thinking_is_open(turn.ids, markers)))

    @property
    def watched(self) -> frozenset[int]:
        """Tokens at which generated() may find something."""
        return frozenset() if self.scanner is None else self.scanner.marking

    def plan(self, turn: TurnRecord, policy: Policy, after: int) -> tuple[int, ...]:
        """Prompt positions where the state must be held, rising; a checkpoint at `after` is restored, 0 if none is.

        Raises ValueError if the server named a boundary outside of the prompt.
        """
        if not after:
            self.unproven.clear()
            turn.unproven = False
        cuts = prompt_cuts(_boundaries(turn.start.cuts), len(turn.ids), policy, after=after, parted_at=self.parted_at)
        self.cuts = {cut.position: cut for cut in cuts}
        return tuple(cut.position for cut in cuts)

    def generated(self, token: int, before: int) -> int | None:
        """A position, found by the newest token, where the engine is to hold the state. before: tokens in front of that one."""
        boundary = None if self.scanner is None else self.scanner.push_at(before, token)
        if boundary is None:
            return None
        position, known = boundary.position, self.cuts.get(boundary.position)
        if known is None or better_kind(known.kind, boundary.kind) is not known.kind:
            self.cuts[position] = boundary
        # What was declared is saved already; the end of the turn is held by the engine itself.
        return None if known is not None or boundary.kind is BoundaryKind.TURN else position

    def boundary_of(self, turn: TurnRecord, position: int) -> Boundary | None:
        """What is to be saved there; None if the cache has it under a kind as good."""
        boundary = self.cuts.get(position)
        if boundary is None:
            boundary = Boundary(position, BoundaryKind.PARTIAL if turn.cancelled else BoundaryKind.TURN)
        saved = self.saved.get(position)
        return None if saved is not None and better_kind(saved, boundary.kind) is saved else boundary

    def took(self, turn: TurnRecord, boundary: Boundary, result: PutResult) -> Saved:
        """The cache has it, under result.checkpoint_id."""
        position = boundary.position
        assert result.checkpoint_id is not None
        self.saved[position] = boundary.kind
        self.placed[position] = result.checkpoint_id
        if not result.existed:
            if not is_proven(turn, position):
                self.unproven.append(result.checkpoint_id)
                turn.unproven = True
            # Rows below were there, or came with an earlier checkpoint of this turn.
            turn.written += max(0, position - max(result.known_tokens, turn.reused, self.deepest))
            self.deepest = max(self.deepest, position)
        tier, nbytes = result.tier or "device", result.written_bytes
        return Saved(turn_id=turn.id, position=position, kind=boundary.kind, tier=tier, written_bytes=nbytes)

    def calls_tool(self, turn: TurnRecord) -> bool:
        return any(b.kind in CALLS for b in self.cuts.values() if b.position >= len(turn.ids))


class Learned:
    """Where contexts were seen to part from what was saved and to come back, and what follows from it for each salt."""

    def __init__(self, policy: Policy) -> None:
        self._experience = Experience(policy)
        self._returns = Returns()
        self._prompts: OrderedDict[str, int] = OrderedDict()
        """Tokens of each session's last prompt, of the newest sessions."""

    def policy(self, salt: bytes) -> Policy:
        return self._experience.policy(salt)

    def go_on_with(self, policy: Policy) -> None:
        self._experience.go_on_with(policy)

    def planned(self, turn: TurnRecord) -> None:
        if not turn.start.session:
            return
        self._prompts[turn.start.session] = len(turn.ids)
        self._prompts.move_to_end(turn.start.session)
        if len(self._prompts) > SESSIONS_FOLLOWED:
            self._prompts.popitem(last=False)

    def parted(self, turn: TurnRecord, at: int) -> None:
        """Remember how far before its session's last prompt end this context parts from what is saved."""
        self._experience.saw(turn.start.salt, self._prompts.get(turn.start.session, 0) - at)

    def came(self, turn: TurnRecord, restored: int, agreed: int) -> None:
        """See Returns.came."""
        self._returns.came(turn.start.salt, turn.start.session, restored, agreed)

    def durable(self, turn: TurnRecord, saves: TurnSaves, policy: Policy) -> list[str]:
        """Ids of what should outlive the process, of the ended turn."""
        placed = [Boundary(position, kind) for position, kind in saves.saved.items()]
        chosen = self._returns.durable(turn.start.salt, turn.start.session, placed, len(turn.ids), policy)
        return [saves.placed[b.position] for b in chosen]


def is_proven(turn: TurnRecord, position: int) -> bool:
    """A token was sampled from logits at or behind it: they were finite, and so was all that they were computed from."""
    return bool(turn.generated) and position < len(turn.ids) + len(turn.generated)


def _boundaries(cuts: Iterable[Cut]) -> list[Boundary]:
    return [Boundary(cut.position, cut.kind, cut.item) for cut in cuts]
