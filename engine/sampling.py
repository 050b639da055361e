"""Logits → tokens, one request at a time, so that a token never depends on who shares the batch.

Order: repetition penalty, presence and frequency penalties, mask, log-probabilities, temperature, top-k, top-p, min-p, draw.
Randomness is a counter, not a stream: the n-th token of a request draws number n of its seed, whatever was restored,
preempted or cancelled beside it.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Draw
from engine.errors import MaskFailed
from engine.types import SamplingParams, TokenMask

log = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
_PREFILTERS = (256, 4096)
"""Candidates looked at before a full sort for top-p; nearly always the first holds the whole nucleus. One thread, 150k
entries: 0.2 ms for the first, 20 ms for the sort."""
_GREEDY_BELOW = 1e-6
"""Temperatures under this are greedy: the quotient of two logits that differ in float32 would leave any range anyway."""


def uniform(seed: int, index: int) -> float:
    """Number `index` of the sequence `seed`, in [0, 1). Source: SplitMix64 (Steele, Lea, Flood 2014), 53 bits."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


class Choice(NamedTuple):
    """A drawn token. top: the best others, best first, as (id, log-probability)."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StopStrings:
    """Finds stop byte strings across token borders. Keeps only as many bytes as a longer match could still need."""

    def __init__(self, stop: Sequence[bytes]) -> None:
        self._stop = tuple(stop)
        self._keep = max(map(len, stop)) - 1
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """Add the bytes of one token; True once the bytes so far contain a stop string."""
        window = self._tail + data
        if any(s in window for s in self._stop):
            return True
        self._tail = window[-self._keep :] if self._keep else b""
        return False


class Sampler:
    """What choosing the tokens of one request needs to remember: seed, counts for penalties, tail for stop strings, mask."""

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocab_size: int, mask: TokenMask | None = None) -> None:
        self.params = params
        self.mask = mask
        self.seed = (secrets.randbits(64) if params.seed is None else params.seed) & _MASK
        self.stop = StopStrings(params.stop) if params.stop else None
        self.stop_ids = frozenset(params.stop_token_ids)
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.from_numpy(prompt.astype(np.int64))] = True
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._counts = torch.zeros(vocab_size)
        self.plain_greedy = (
            params.temperature < _GREEDY_BELOW
            and params.logprobs is None
            and self._seen is None
            and self._counts is None
            and mask is None
        )
        """The choice is just the argmax, so rows of several requests can be taken at once."""

    def draw(self, index: int) -> Draw | None:
        """How generated token number index will be chosen, None = plainly greedily. Penalties and masks are left out: they
        depend on the tokens before it, and where they change little the guess is still right."""
        params = self.params
        if self.plain_greedy:
            return None
        if params.temperature < _GREEDY_BELOW:
            return Draw()
        return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniform(self.seed, index))

    def observe(self, token: int) -> None:
        """Take note of a generated token."""
        if self.mask is not None:
            self.mask.accept(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def choose(self, logits: torch.Tensor, index: int) -> Choice:
        """Draw generated token number index from logits f32 [vocab], all finite, on any device. Does not change
        them.

        Raises MaskFailed.
        """
        params = self.params
        logits = logits.cpu()
        if self._seen is not None:
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits = torch.where(self._seen, scaled, logits)
        if self._counts is not None:
            present = (self._counts > 0).float()
            logits = logits - params.frequency_penalty * self._counts - params.presence_penalty * present
        if self.mask is not None:
            logits = _masked(logits, self.mask.words())
        if params.temperature < _GREEDY_BELOW:
            token = int(logits.argmax())
        else:
            token = self._draw(logits, uniform(self.seed, index))
        if params.logprobs is None:
            return Choice(token)
        logprobs = logits.log_softmax(-1)
        best = torch.topk(logprobs, min(params.logprobs + 1, len(logprobs)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        others = [(i, p) for i, p in pairs if i != token and p > -math.inf]
        return Choice(token, float(logprobs[token]), tuple(others[: params.logprobs]))

    def _draw(self, logits: torch.Tensor, u: float) -> int:
        params = self.params
        ids: torch.Tensor | None = None
        if 0 < params.top_k < len(logits):
            logits, ids = torch.topk(logits, params.top_k)  # before anything is done to all of them
        x = logits.double()
        # Shifted by the maximum, which changes no probability: a temperature near zero would overflow otherwise.
        x = (x - x.max()) / params.temperature
        if ids is not None:
            p = x.softmax(-1).numpy()
        elif params.top_p < 1.0:
            p, ids = _most_probable(x, params.top_p)
        else:
            p = x.softmax(-1).numpy()
        keep = p > 0.0 if self.mask is not None else np.ones(len(p), dtype=bool)
        if params.top_p < 1.0:
            # The smallest set that reaches top_p of what top-k left; its first token always.
            keep &= p.cumsum() - p < params.top_p
            keep[0] = True  # also where the processor takes a top_p of 1e-310 for zero
        if params.min_p > 0.0:
            keep &= p >= params.min_p * p.max()
        total = (p * keep).cumsum()
        at = int(total.searchsorted(u * total[-1], side="right"))
        # Rounding may put u beyond the last sum: then the last token kept is meant.
        at = min(at, int(keep.nonzero()[0][-1]))
        return at if ids is None else int(ids[at])


def _masked(logits: torch.Tensor, words: np.ndarray | None) -> torch.Tensor:
    """Logits with minus infinity where the mask forbids. Raises MaskFailed if it forbids everything."""
    if words is None:
        return logits
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)]
    if len(bits) < len(logits) or not bits.any():
        raise MaskFailed(f"the mask allows {int(bits.sum())} of {len(bits)} tokens, the vocabulary has {len(logits)}")
    return logits.masked_fill(torch.from_numpy(bits) == 0, -math.inf)


def _most_probable(x: torch.Tensor, mass: float) -> tuple[np.ndarray, torch.Tensor]:
    """Probabilities (of softmax(x) over everything), falling, with their ids: enough of them to reach `mass`."""
    normalizer = x.logsumexp(-1)
    for count in _PREFILTERS:
        if count < len(x):
            best = torch.topk(x, count)
            p = (best.values - normalizer).exp().numpy()
            if p.sum() >= mass:
                return p, best.indices
    ordered = torch.sort(x, descending=True, stable=True)
    return (ordered.values - normalizer).exp().numpy(), ordered.indices


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Which rows of f32 [n, vocab] hold only finite numbers. A sum decides nearly always, in one cheap pass."""
    good = logits.sum(-1).isfinite()
    if not bool(good.all()):
        good = logits.isfinite().all(-1)
    return good.tolist()


def choose_tokens(
    logits: torch.Tensor, samplers: Sequence[Sampler], indices: Sequence[int], guesses: Sequence[int] | None = None
) -> list[Choice | str]:
    """One token for each row of f32 [n, vocab] (finite). indices: generated tokens so far, per request. guesses:
    as Logits has them; what is chosen does not depend on them.

    Text where a request's own settings or mask leave nothing to choose from, which must not touch the others: it says why.
    """
    choices: list[Choice | str] = []
    for row, (sampler, index) in enumerate(zip(samplers, indices, strict=True)):
        if sampler.plain_greedy:
            if guesses is None:
                guesses = logits.argmax(-1).tolist()
            choices.append(Choice(guesses[row]))
        else:
            try:
                choices.append(sampler.choose(logits[row], index))
            except MaskFailed as error:
                choices.append(str(error))
            except (ArithmeticError, IndexError, RuntimeError, ValueError):
                log.exception("no token chosen sampling=%s", sampler.params)
                choices.append("no token could be chosen with these sampling settings")
    return choices
