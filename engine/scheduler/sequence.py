"""One accepted request and how far it is. Mutable; owned by the scheduler, which alone moves it between its lists."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import torch

from engine.kvcache.loading import Loading
from engine.kvcache.store import NO_ROW, Held
from engine.kvcache.table import PageTable
from engine.sampling import Sampler
from engine.types import Request, StateSnapshot


class Sequence:
    """length: tokens known (prompt and sampled). computed: tokens in the state; computed < length except at one moment: a
    whole prefix was restored and its first token is still to be drawn from `logits`.

    order: arrival number; a lower one is never preempted for the pages of a higher one.
    due_us: when its first token should come. paused_us: when it last went to the host.
    let_in_at: tokens generated when it was last let in.
    restore: what admission starts from (Held = a pin on the device, StateSnapshot = on the host, also where a paused request is
    put), None = from zero.
    cuts: positions still to be held, rising, all ≥ computed. held_at: position of the last hold made for this request.
    failed: why a forward pass broke this request; it ends in the next step.
    cut_rows: recurrent rows beside `row` that belong to this request until a hold takes them over.
    busy_to: end of the slice that an open pass is computing, 0 if none is: until then its state is neither before nor after the
    slice, and it must stay where it is.
    ahead_row: takes the recurrent state of the token after, beside `row`; the two change places with every token then.
    ahead: the step for its next token may have been begun, and nothing has touched what it rests on since.
    guess: what a device took for its newest token before the host chose it, −1 = nothing. guesses, wrong: of those, while it
    draws.
    loading: `restore` on its way into the pages, None when it is there; until then nothing of it is computed or held.
    """

    __slots__ = (
        "_buffer",
        "ahead",
        "ahead_row",
        "busy_to",
        "computed",
        "cut_rows",
        "cuts",
        "due_us",
        "edges",
        "failed",
        "guess",
        "guesses",
        "held_at",
        "id",
        "length",
        "let_in_at",
        "loading",
        "logits",
        "order",
        "paused_us",
        "prompt_length",
        "request",
        "restore",
        "row",
        "sampler",
        "table",
        "wrong",
    )

    def __init__(
        self, request: Request, order: int, sampler: Sampler, restore: Held | StateSnapshot | None, due_us: int = 0
    ) -> None:
        self.id = request.id
        self.request = request
        self.order = order
        self.sampler = sampler
        self.restore = restore
        self.prompt_length = self.length = len(request.token_ids)
        self._buffer = request.token_ids.astype(np.int64)
        self.computed = 0
        self.busy_to = 0
        self.cuts = sorted({c for c in request.cuts if restore is None or c >= restore.position})
        self.edges = sorted(set(request.edges))
        self.held_at = 0
        self.due_us = due_us
        self.paused_us = 0
        self.let_in_at = 0
        self.failed: str | None = None
        self.logits: torch.Tensor | None = None
        self.table: PageTable | None = None
        self.row = NO_ROW
        self.cut_rows: list[int] = []
        self.ahead_row = NO_ROW
        self.ahead = False
        self.guess = -1
        self.guesses = self.wrong = 0
        self.loading: Loading | None = None

    def vacate(self) -> None:
        """Its pages and rows belong to others now."""
        self.table, self.row, self.ahead_row, self.ahead, self.loading = None, NO_ROW, NO_ROW, False, None
        self.cut_rows.clear()

    @property
    def tokens(self) -> np.ndarray:
        """int64 [length], a view; entries never change, so a view of a prefix stays right."""
        return self._buffer[: self.length]

    def token_at(self, position: int) -> int:
        """A known token, without a view of all of them."""
        return self._buffer[position]

    @property
    def done(self) -> int:
        """Tokens that need not be computed any more."""
        return self.computed if self.restore is None else self.restore.position

    @property
    def output_length(self) -> int:
        return self.length - self.prompt_length

    @property
    def decoding(self) -> bool:
        """The next forward pass is one generated token (the whole prompt is in the state)."""
        return self.computed >= self.prompt_length

    def append(self, token: int) -> None:
        if self.length == len(self._buffer):
            grown = np.empty(max(64, 2 * self.length), dtype=np.int64)
            grown[: self.length] = self._buffer
            self._buffer = grown
        self._buffer[self.length] = token
        self.length += 1

    def give_up_row(self, row: int) -> None:
        """A hold has taken over `row`, the request's own or one of its cuts."""
        if row == NO_ROW:
            return
        if row == self.row:
            self.row = NO_ROW
        else:
            self.cut_rows.remove(row)

    def add_cut(self, position: int) -> None:
        at = bisect_left(self.cuts, position)
        if at == len(self.cuts) or self.cuts[at] != position:
            insort(self.cuts, position)

    def take_cuts(self, upto: int) -> list[int]:
        """Remove and return the cuts at positions ≤ upto."""
        count = bisect_left(self.cuts, upto + 1)
        due, self.cuts = self.cuts[:count], self.cuts[count:]
        return due
