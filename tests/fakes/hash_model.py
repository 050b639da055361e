"""A model whose logits depend on every key, value and state number in its context, in exact integer arithmetic.

A wrong page, a stale row, a skipped or doubled position changes the next token; a poisoned (NaN) number in the context makes
the logits NaN. `expected_tokens` computes the same from the token list alone, with no pages, rows, chunks or batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.batch import ForwardBatch, SeqSlice
from engine.kernels import plain
from engine.kvcache.pool import KvPools
from engine.kvcache.recurrent import RecurrentPools
from engine.models.base import LayerSpec, Logits, ModelSpec

P = 4093
"""A prime whose products with itself fit float32 exactly once reduced (every stored number is an integer below it)."""
VOCAB = 97


def make_spec(recurrent: bool = True, max_context: int = 4096, attention_layers: int = 2) -> ModelSpec:
    kinds = ["attention"] * attention_layers + (["delta"] * 2 if recurrent else [])
    layers = tuple(
        LayerSpec(i, kind, sum(k == kind for k in kinds[:i]), moe=False)  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    )
    return ModelSpec(
        model_type="hash",
        vocab_size=VOCAB,
        hidden=1,
        layers=layers,
        kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        eos_token_ids=(0,),
        max_context=max_context,
        parameters=0,
        H_v=1 if recurrent else 0,
        d_k=1 if recurrent else 0,
        d_v=2 if recurrent else 0,
        conv_dim=2 if recurrent else 0,
        conv_kernel=4 if recurrent else 0,
    )


@dataclass
class _State:
    """delta: [layers, 2] integers. conv: [layers, 2, 3], oldest first."""

    delta: np.ndarray
    conv: np.ndarray

    @classmethod
    def zero(cls, layers: int) -> _State:
        return cls(np.zeros((layers, 2), np.int64), np.zeros((layers, 2, 3), np.int64))

    def advance(self, token: int) -> None:
        for layer in range(len(self.delta)):
            mixed = int(self.conv[layer].sum())
            a, b = self.delta[layer]
            self.delta[layer] = [(a * 31 + token + 7 + mixed + layer) % P, (b * 17 + a + 3 * token + 1) % P]
            self.conv[layer, :, :-1] = self.conv[layer, :, 1:]
            self.conv[layer, :, -1] = [(token * 5 + a) % P, (token + b + layer) % P]

    def digest(self) -> int:
        return int((self.delta * 11).sum() + (self.conv.reshape(-1) * (np.arange(self.conv.size) + 1)).sum()) % P


def _kv_rows(token: int, position: int, digest: int, layers: int) -> np.ndarray:
    """[layers, 2 (k, v), 2] integers: what this token leaves in the cache."""
    base = np.arange(4 * layers).reshape(layers, 2, 2) + 1
    return (base * (token + 13) + position * 101 + digest * (base % 5 + 1)) % P


def _logits(rows: np.ndarray, digest: int) -> np.ndarray:
    """rows: [tokens, numbers] of the whole context. f32 [VOCAB], all different in practice."""
    weights = (np.arange(rows.size).reshape(rows.shape) * 7919 + 17) % P
    h = (int((rows.astype(np.int64) * weights).sum()) + digest * 733) % P
    j = np.arange(VOCAB, dtype=np.int64)
    return (((h + 1) * (2 * j + 3) * 131 + j * j * 977 + h) % P).astype(np.float32) / np.float32(256)


@dataclass
class HashModel:
    """forwards: (context, length) of every pass's slices, to check schedules. nan_token: leaves NaN in the cache, so that
    logits from there on are NaN. raise_token: the pass that sees it fails."""

    spec: ModelSpec = field(default_factory=make_spec)
    nan_token: int | None = None
    raise_token: int | None = None
    forwards: list[list[tuple[int, int]]] = field(default_factory=list)

    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        rows: dict[int, np.ndarray] = {}
        self.forwards.append([(s.context, s.length) for s in batch.seqs])
        assert sum(s.length for s in batch.seqs) == len(batch.token_ids) == len(batch.positions)
        ids = batch.token_ids.tolist()
        if self.raise_token in ids:
            raise RuntimeError("the fake was told to fail")
        for seq in batch.seqs:
            expected = torch.arange(seq.context, seq.context + seq.length)
            assert torch.equal(batch.positions[seq.start : seq.start + seq.length], expected)
            self._run(seq, ids, kv, states, rows, set(batch.logit_rows.tolist()))
        return Logits(torch.from_numpy(np.stack([rows[i] for i in batch.logit_rows.tolist()])))

    def _run(
        self,
        seq: SeqSlice,
        ids: list[int],
        kv: KvPools,
        states: RecurrentPools,
        out: dict[int, np.ndarray],
        wanted: set[int],
    ) -> None:
        size = kv.page_size
        pages = seq.page_table.tolist()
        assert len(pages) == -(-(seq.context + seq.length) // size)
        assert seq.fresh == (seq.context == 0)
        layers = len(self.spec.delta_layers)
        attention = len(kv.k)
        state = _State.zero(layers)
        broken = False
        if layers and not seq.fresh:
            delta = np.stack([states.delta[i][seq.state_row].numpy().reshape(2) for i in range(layers)])
            conv = np.stack([states.conv[i][seq.state_row].numpy() for i in range(layers)])
            broken = bool(np.isnan(delta).any() or np.isnan(conv).any())
            if not broken:
                state = _State(delta.astype(np.int64), conv.astype(np.int64))
        cuts = {cut.offset: cut.dest_row for cut in seq.cuts}
        for offset in range(seq.length):
            token, position = ids[seq.start + offset], seq.context + offset
            state.advance(token)
            page, slot = pages[position // size], position % size
            kv_rows = _kv_rows(token, position, state.digest(), attention)
            for i in range(attention):
                value = torch.from_numpy(kv_rows[i]).float()
                if token == self.nan_token:
                    value = value * float("nan")
                kv.k[i][page, slot, 0] = value[0]
                kv.v[i][page, slot, 0] = value[1]
            if offset + 1 in cuts:
                self._store(state, states, cuts[offset + 1], broken)
            if seq.start + offset in wanted:
                context = self._context(kv, pages, position + 1)
                bad = broken or bool(np.isnan(context).any())
                out[seq.start + offset] = np.full(VOCAB, np.nan, np.float32) if bad else _logits(context, state.digest())
        self._store(state, states, seq.state_row if seq.row_out < 0 else seq.row_out, broken)

    @staticmethod
    def _store(state: _State, states: RecurrentPools, row: int, broken: bool) -> None:
        for i in range(len(state.delta)):
            states.delta[i][row] = torch.from_numpy(state.delta[i]).float().view(1, 1, 2) * (float("nan") if broken else 1)
            states.conv[i][row] = torch.from_numpy(state.conv[i]).float()

    @staticmethod
    def _context(kv: KvPools, pages: list[int], tokens: int) -> np.ndarray:
        parts = []
        for pool in (p for pair in zip(kv.k, kv.v, strict=True) for p in pair):
            parts.append(pool[pages].reshape(-1, 2)[:tokens].numpy())
        return np.concatenate(parts, axis=1)


class Plain:
    """The same model over a plain token list: the independent computation that engines are compared with."""

    def __init__(self, tokens: list[int], spec: ModelSpec | None = None) -> None:
        spec = spec or make_spec()
        self.attention = len(spec.attention_layers)
        self.state = _State.zero(len(spec.delta_layers))
        self.rows: list[np.ndarray] = []
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        self.state.advance(token)
        self.rows.append(_kv_rows(token, len(self.rows), self.state.digest(), self.attention).reshape(-1))

    def logits(self) -> np.ndarray:
        return _logits(np.stack(self.rows), self.state.digest())

    def kv_bytes(self) -> np.ndarray:
        """uint8 [tokens, kv_token_bytes], as a snapshot has them."""
        return np.stack(self.rows).astype(np.float32).view(np.uint8)

    def state_bytes(self) -> list[np.ndarray]:
        """Per component, in layout order."""
        parts = [p for pair in zip(self.state.delta, self.state.conv, strict=True) for p in pair]
        return [p.astype(np.float32).reshape(-1).view(np.uint8) for p in parts]


def expected_logits(tokens: list[int], spec: ModelSpec | None = None) -> np.ndarray:
    """Logits after `tokens`, from the list alone."""
    return Plain(tokens, spec).logits()


def expected_tokens(prompt: list[int], count: int, spec: ModelSpec | None = None) -> list[int]:
    """The greedy continuation."""
    plain = Plain(prompt, spec)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(plain.logits().argmax()))
        plain.push(tokens[-1])
    return tokens


class StagedHashModel(HashModel):
    """The same in passes of several stages. Until the last one the state of a pass's sequences is NaN: nobody may read it, and
    nobody may move it. Steps that it is told to expect are computed before they are asked for; used_ahead: those asked for
    then. It guesses by the plain kernel, but wrongly where wrong(number of the guess) says so."""

    def __init__(self, spec: ModelSpec, stages: int = 2) -> None:
        super().__init__(spec)
        self._stages = stages
        self._beside: Callable[[], None] = lambda: None
        self._expected: ForwardBatch | None = None
        self._ahead: tuple[object, Logits] | None = None
        self.used_ahead = 0
        self.wrong: Callable[[int], bool] = lambda number: False
        self._guesses = 0

    @property
    def begun(self) -> bool:
        return self._ahead is not None

    def set_beside(self, callback: Callable[[], None]) -> None:
        self._beside = callback

    def look_ahead(self, batch: ForwardBatch | None) -> None:
        self._expected = batch
        if batch is None:
            self._ahead = None

    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        if not all(seq.length == 1 for seq in batch.seqs):
            return super().forward(batch, kv, states)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == _asked(batch):
            # Nothing is computed again: what was written then has to be there still.
            self.used_ahead += 1
            self.forwards.append([(s.context, s.length) for s in batch.seqs])
            rows = ahead[1].rows
            for seq in batch.seqs:
                for cut in seq.cuts:
                    for pool in (*states.delta, *states.conv):
                        pool[cut.dest_row] = pool[seq.row_out]
        else:
            rows = super().forward(batch, kv, states).rows
        guesses = self._guess(rows, batch)
        expected, self._expected = self._expected, None
        if expected is not None:
            self._run_ahead(expected, guesses, kv, states)
        self._beside()
        wanted = expected is None or any(seq.draw is not None for seq in batch.seqs)
        return Logits(rows if wanted else rows[:, :0], guesses)

    def _guess(self, rows: torch.Tensor, batch: ForwardBatch) -> list[int]:
        draws = torch.zeros(6, len(rows))
        for index, seq in enumerate(batch.seqs):
            if seq.draw is not None:
                draws[:5, index] = torch.tensor(seq.draw)
        guesses, found = torch.zeros(len(rows), dtype=torch.int32), torch.zeros(2, len(rows), dtype=torch.int32)
        plain.guess(rows, draws, torch.zeros(1, dtype=torch.int32), guesses, found)
        out: list[int] = []
        for guess, seq in zip(guesses.tolist(), batch.seqs, strict=True):
            wrong = seq.draw is not None and guess >= 0 and self.wrong(self._guesses)
            self._guesses += seq.draw is not None
            out.append((guess + 1) % self.spec.vocab_size if wrong else guess)
        return out

    def _run_ahead(self, expected: ForwardBatch, guesses: list[int], kv: KvPools, states: RecurrentPools) -> None:
        """At once, whoever may still say that it was not wanted."""
        tokens = torch.tensor([guesses[-1 - code] if code < 0 else code for code in expected.token_ids.tolist()])
        assert all(seq.length == 1 and not seq.cuts for seq in expected.seqs)
        assert not self.spec.delta_layers or all(seq.row_out >= 0 and seq.row_out != seq.state_row for seq in expected.seqs)
        if self.raise_token in tokens.tolist() or bool((tokens < 0).any()):
            return
        batch = replace(expected, token_ids=tokens)
        logits = super().forward(batch, kv, states)
        self.forwards.pop()
        self._ahead = _asked(batch), logits

    def rehearse(self, kv: KvPools, states: RecurrentPools, tokens: int) -> None:
        raise AssertionError("only a CUDA device is rehearsed on")

    def warm_up(self, kv: KvPools, states: RecurrentPools) -> None:
        pass

    def begin(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> _StagedPass:
        return _StagedPass(self, batch, kv, states, self._stages)


def _asked(batch: ForwardBatch) -> object:
    where = [(s.context, s.state_row, s.row_out, s.page_table.tolist()) for s in batch.seqs]
    return batch.token_ids.tolist(), where


class _StagedPass:
    def __init__(self, model: StagedHashModel, batch: ForwardBatch, kv: KvPools, states: RecurrentPools, stages: int) -> None:
        self._call = (model, batch, kv, states)
        self._left = stages
        self._rows = [seq.state_row for seq in batch.seqs if seq.state_row >= 0]
        self._saved = [pool[self._rows].clone() for pool in (*states.delta, *states.conv)]
        for pool in (*states.delta, *states.conv):
            pool[self._rows] = float("nan")

    def advance(self) -> Logits | None:
        model, batch, kv, states = self._call
        if self._left:
            self._left -= 1
            return None
        for pool, saved in zip((*states.delta, *states.conv), self._saved, strict=True):
            assert bool(pool[self._rows].isnan().all()), "state of an open pass was written by somebody else"
            pool[self._rows] = saved
        return model.forward(batch, kv, states)

    def abandon(self) -> None:
        self._left = -1
