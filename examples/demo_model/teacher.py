"""Held-out rates under teacher forcing: cheap enough to compare the weights of one run with each other."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import torch

from examples.demo_model.config import Shape
from examples.demo_model.data import WRITERS, make_batch
from examples.demo_model.model import Forward, Params
from examples.demo_model.rows import Encoder

Batch = tuple[np.ndarray, np.ndarray]
PART = 8192  # tokens whose logits are held at a time


def held_out_batches(encoder: Encoder, pad: int, tokens: int, length: int, count: int) -> dict[str, list[Batch]]:
    """The same batches for every call, by writer."""
    rng = Random(99)
    return {
        name: [make_batch(encoder, rng, tokens // length, length, pad, held_out=True, mix={name: 1.0}) for _ in range(count)]
        for name in WRITERS
    }


@torch.no_grad()
def teacher_forced(params: Params, shape: Shape, encoder: Encoder, batches: Sequence[Batch], length: int) -> dict[str, float]:
    """Token accuracy, and the share of tool calls and of answers predicted without a wrong token."""
    device = params["embed"].device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    forward = Forward(shape)
    call, call_end, turn_end = (encoder.token(t) for t in ("<tool_call>", "</tool_call>", "<|im_end|>"))
    answer = encoder.token("</think>")
    right = total = 0
    tried, perfect = {"calls": 0, "answers": 0}, {"calls": 0, "answers": 0}
    nothing = torch.zeros(PART, dtype=torch.int64, device=device), torch.ones(PART, device=device)
    for ids, mask in batches:
        tokens = torch.from_numpy(ids.astype("int64")).to(device)
        x, _ = forward.trunk(params, tokens, length, dtype)
        weights = params["final_norm"].to(dtype), params["embed"].to(dtype)
        guess = torch.cat(
            [forward.head(p, *weights, nothing[0][: len(p)], nothing[1][: len(p)])[1].argmax(-1) for p in x.split(PART)]
        )
        hit = torch.zeros_like(tokens, dtype=torch.bool)
        hit[1:] = guess[:-1] == tokens[1:]
        hits, learned = hit.cpu().numpy(), mask == 2
        right += int((hits & learned).sum())
        total += int(learned.sum())
        opened = {"calls": -1, "answers": -1}
        for at in np.flatnonzero(learned & np.isin(ids, (call, call_end, turn_end, answer))):
            token, row = ids[at], at // length
            if token == call:
                opened = {"calls": at, "answers": -1}
            elif token == answer:
                opened["answers"] = at
            for name, end in (("calls", call_end), ("answers", turn_end)):
                start = opened[name]
                if token == end and start >= 0 and start // length == row:
                    tried[name] += 1
                    perfect[name] += bool(hits[start + 1 : at + 1].all())
                    opened[name] = -1
    return {
        "token_accuracy": round(right / max(total, 1), 5),
        **{f"perfect_{name}": round(perfect[name] / max(tried[name], 1), 5) for name in tried},
        **tried,
    }
