"""Which of a session's checkpoints are kept: the lines of the table in docs/traces.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statecache.boundary import GeneratedBoundaries, prompt_cuts
from statecache.policy import LASTING, Policy
from statecache.types import Boundary, MarkerTable


@dataclass(frozen=True)
class Keep:
    """ends: of how many of its last turns a session keeps what is not LASTING (ladder, system, junctions); 0 = of all.

    generated: also what is placed while the model writes. disk: only what is chosen for the disk.
    """

    ends: int
    policy: Policy
    generated: bool = False
    disk: bool = False

    def cuts(
        self,
        boundaries: Sequence[Boundary],
        prompt_tokens: int,
        *,
        after: int = 0,
        parted_at: int = 0,
        generated: Sequence[int] = (),
        markers: MarkerTable = MarkerTable(),  # noqa: B008
    ) -> list[Boundary]:
        """What one turn places. See prompt_cuts for the first four."""
        placed = list(prompt_cuts(boundaries, prompt_tokens, self.policy, after=after, parted_at=parted_at))
        if self.generated and generated:
            placed += GeneratedBoundaries(markers, prompt_tokens).push_all(generated)
            placed = [b for b in placed if b.position < prompt_tokens + len(generated)]
        return placed


def lasts(boundary: Boundary) -> bool:
    return boundary.kind in LASTING


def _bare(shadows: tuple[int, ...] = (), ladder: int = 0) -> Policy:
    return Policy(shadows=shadows, ladder_tokens=ladder, junction_tokens=0, boundaries=False)


LADDER = Policy().ladder_tokens
POLICIES: Mapping[str, Keep] = {
    "last end": Keep(1, _bare()),
    "last 2 ends": Keep(2, _bare()),
    "last end + shadow": Keep(1, _bare((128,))),
    "last 2 + shadows": Keep(2, _bare((64, 256))),
    "last 2 + ladder": Keep(2, _bare((), LADDER)),
    "last 2 + shadows + ladder": Keep(2, _bare((64, 256), LADDER)),
    "all that is placed": Keep(0, Policy(), generated=True),
    "all that goes to disk": Keep(0, Policy(), generated=True, disk=True),
}
