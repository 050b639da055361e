"""What the step after the next one will probably be asked for, so that the device can begin with it before the host has read
the tokens of the one before it. Chooses nothing that anybody sees: a step that was begun for nothing is only time.

The device guesses the tokens (see batch.Draw); the host draws them by itself, and where a guess was another token the step is
forgotten. A request whose guesses are often wrong, as where a mask or a penalty decides, is guessed no more.

A sequence that may run ahead has a second recurrent row, and the two change places with every token: the state before a token
that nobody has seen yet is still there when it turns out that the sequence ends, is held, or goes on otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Draw, ForwardBatch, SeqSlice
from engine.kvcache.store import NO_ROW, StateStore
from engine.models.base import Logits, Staged
from engine.scheduler.scheduler import Slice
from engine.scheduler.sequence import Sequence as Running

FREE_WRONG = 2
"""Guesses of one request that may be wrong however few there are."""
WORTH = 16
"""Of so many guesses one may be wrong. It costs about a step, and a right one saves a twelfth to a fifth of one."""


@dataclass(slots=True)
class Begun:
    """What became of steps that were begun: used; or forgotten, since a guess was wrong, a sequence ended or was put aside, or
    another one came. guesses: of tokens that were drawn, of which `wrong_guesses` were others."""

    used: int = 0
    wrong: int = 0
    ended: int = 0
    joined: int = 0
    guesses: int = 0
    wrong_guesses: int = 0


class Ahead:
    """One per engine whose model can do it. on: whether it is done at all."""

    def __init__(self, model: Staged, store: StateStore, max_context: int) -> None:
        self._model, self._store, self._max_context = model, store, max_context
        self._begun: tuple[Running, ...] = ()
        self.on = True
        self.counts = Begun()

    def before(self, slices: Sequence[Slice], alone: bool) -> None:
        """Before the batch of a pass over single tokens is made: tell the model what may follow. alone: no other is open."""
        self._count(slices)
        if not all(part.seq.ahead for part in slices):
            self._model.look_ahead(None)  # begun for what has been moved since, or for others
        following = self._following(slices) if self.on and alone else []
        for index, part in enumerate(slices):
            part.seq.ahead = index in following
        if following:
            self._model.look_ahead(self._batch(slices, following))

    def after(self, slices: Sequence[Slice], logits: Logits) -> None:
        """After that pass: states lie where row_out() said."""
        begun = self._model.begun
        for index, part in enumerate(slices):
            seq = part.seq
            if row_out(part) != NO_ROW:
                seq.row, seq.ahead_row = seq.ahead_row, seq.row
            seq.guess = logits.guesses[index] if begun and logits.guesses is not None else -1
        self._begun = tuple(part.seq for part in slices if part.seq.ahead) if begun else ()

    def draw(self, part: Slice) -> Draw | None:
        """How the token behind this slice will be chosen, where it is to be guessed."""
        seq = part.seq
        return seq.sampler.draw(seq.output_length) if self.on and part.decode and _worthwhile(part) else None

    def _count(self, slices: Sequence[Slice]) -> None:
        """What became of the step that was begun behind the last one, and of the guesses that it rests on."""
        begun, self._begun = self._begun, ()
        if not begun:
            return
        counts, wrong = self.counts, False
        for part in slices:
            seq = part.seq
            if seq in begun and not seq.sampler.plain_greedy:
                missed = seq.guess != int(seq.token_at(part.start))
                wrong = wrong or missed
                seq.guesses += 1
                seq.wrong += missed
                counts.guesses += 1
                counts.wrong_guesses += missed
        here = [part.seq for part in slices]
        if any(seq not in here for seq in begun):
            counts.ended += 1
        elif len(here) > len(begun) or not all(seq.ahead for seq in here):
            counts.joined += 1
        elif wrong:
            counts.wrong += 1
        else:
            counts.used += 1

    def _following(self, slices: Sequence[Slice]) -> list[int]:
        """Which of these sequences will have a further token in the next step; none if that cannot be known, or has no room."""
        if not all(part.decode and _worthwhile(part) for part in slices):
            return []
        going_on = [index for index, part in enumerate(slices) if self._goes_on(part)]
        return going_on if all(self._has_room(slices[index]) for index in going_on) else []

    def _batch(self, slices: Sequence[Slice], following: Sequence[int]) -> ForwardBatch:
        seqs: list[SeqSlice] = []
        for at, index in enumerate(following):
            seq, end = slices[index].seq, slices[index].end
            assert seq.table is not None
            pages = seq.table.view(-(-(end + 1) // self._store.page_size))
            # The rows as they will lie: what is written before it is read here.
            row, spare = (seq.ahead_row, seq.row) if seq.ahead_row != NO_ROW else (seq.row, NO_ROW)
            draw = seq.sampler.draw(seq.output_length + 1)
            seqs.append(SeqSlice(at, 1, end, pages, row, False, (), spare, draw))
        tokens, last = np.array(following, dtype=np.int64), np.arange(len(seqs), dtype=np.int64)
        positions = np.array([seq.context for seq in seqs], dtype=np.int64)
        return ForwardBatch(torch.from_numpy(-1 - tokens), torch.from_numpy(positions), tuple(seqs), torch.from_numpy(last))

    def _goes_on(self, part: Slice) -> bool:
        """As far as lengths say."""
        seq = part.seq
        return seq.output_length + 1 < seq.request.sampling.max_tokens and seq.length + 1 < self._max_context

    def _has_room(self, part: Slice) -> bool:
        """In its own last page, and beside its row."""
        table, store = part.seq.table, self._store
        assert table is not None
        if table.borrowed_tail or table.count * store.page_size <= part.end:
            return False
        if not store.recurrent or part.seq.ahead_row != NO_ROW:
            return True
        row = store.take_spare()
        if row is None:
            return False
        part.seq.ahead_row = row
        return True


def _worthwhile(part: Slice) -> bool:
    return worth_guessing(part.seq.guesses, part.seq.wrong)


def worth_guessing(guesses: int, wrong: int) -> bool:
    """Whether a request with so many guesses is to be guessed on. Integers only."""
    return WORTH * (wrong - FREE_WRONG) <= guesses


def row_out(part: Slice) -> int:
    """The row that takes the state after this slice while the sequence's own keeps the one before it; NO_ROW: its own takes
    it."""
    return part.seq.ahead_row if part.decode else NO_ROW
