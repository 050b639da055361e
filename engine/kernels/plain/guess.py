"""Which token will be drawn behind each row of logits: the host's rule (engine/sampling.py) in its own words, for a device."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def guess(logits: Tensor, draws: Tensor, turn: Tensor, guesses: Tensor, found: Tensor) -> None:
    """guesses[r] and found[turn & 1, r]: the token that is probably drawn from row r of logits f32 [R, V]; -1 where a value is
    NaN or infinite.

    draws: f32 [6, ≥ R]: temperature (0: the index of the largest, the lowest of several), top-k, top-p, min-p, and a number in
    [0, 1) as the sum of two, which are its first and its further bits.
    """
    best = torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1).tolist()
    settings = draws[:, : len(best)].T.tolist()
    chosen = [
        _drawn(row, *setting) if token >= 0 and setting[0] > 0 else token
        for row, token, setting in zip(logits, best, settings, strict=True)
    ]
    guesses[: len(best)] = torch.tensor(chosen, dtype=torch.int32)
    found[int(turn) & 1, : len(best)] = guesses[: len(best)]


def _drawn(logits: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, first: float, further: float) -> int:
    x = logits.double()
    weight = ((x - x.max()) / temperature).exp()
    ids = torch.arange(len(weight), device=weight.device)
    count = int(top_k) if 0 < top_k < len(weight) else len(weight)
    if count < len(weight) or top_p < 1.0:
        ids = x.argsort(descending=True, stable=True)[:count]
        weight = weight[ids]
    keep = weight >= min_p  # of the largest, which weighs 1
    if top_p < 1.0:
        nucleus = weight.cumsum(0) - weight < top_p * weight.sum()
        nucleus[0] = True
        keep &= nucleus
    sums = torch.where(keep, weight, 0.0).cumsum(0)
    at = int(torch.searchsorted(sums, (first + further) * sums[-1], right=True))
    return int(ids[min(at, int(keep.nonzero()[-1]))])
