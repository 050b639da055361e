"""Trains the demo model on one CUDA device for a given time.

    python -m examples.demo_model.train --out DIR --seconds 420 [--start CHECKPOINT_DIR] [--seed 1]

The whole step (forward, backward, clipping, update) is one CUDA graph for each row length.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.demo_model.config import Shape
from examples.demo_model.data import Feed, make_batch
from examples.demo_model.export import save_config, save_weights
from examples.demo_model.model import Forward, Params, initial
from examples.demo_model.optimizer import Optimizer
from examples.demo_model.rows import Encoder

TOKENS = 32768  # of one step
LENGTHS = {1024: 0.60, 2048: 0.26, 4096: 0.14}  # row length -> share of steps
WORKERS = {1024: 8, 2048: 4, 4096: 3}
BALANCE, LOCALITY = 1e-4, 2e-3
SPLIT = {"gate_up", "embed"}  # of the f32 weights, into the first of two files
EARLY = 0.85  # share of the time after which weights are saved once already


class Trainer:
    """Parameters, optimizer and one recorded graph for each row length."""

    def __init__(self, params: Params, shape: Shape, muon: bool) -> None:
        self.params = params
        self.forward = Forward(shape, compile=lambda f: torch.compile(f, dynamic=False, fullgraph=True))
        self.optimizer = Optimizer(params, muon)
        self.ids = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        self.weights = torch.ones(TOKENS, device="cuda")
        self.stats = torch.zeros(5, device="cuda")
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _step(self, length: int) -> None:
        loss, (balance, locality, repeated) = self.forward.loss(self.params, self.ids, self.weights, length)
        (loss + BALANCE * balance + LOCALITY * locality).backward()
        norm = self.optimizer.step()
        self.stats.copy_(torch.stack([loss.detach(), balance.detach(), locality.detach(), repeated, norm]))
        for p in self.params.values():
            p.grad = None

    def record(self, length: int) -> None:
        """Warm up (which compiles) and record the step. The rate is zero, so nothing is learned."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(length)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(length)
        self.graphs[length] = graph

    def reset(self) -> None:
        for state in (*self.optimizer.first.values(), *self.optimizer.second.values(), self.optimizer.count):
            state.zero_()


def rate(progress: float, step: int, peak: float) -> float:
    """Warm up for 300 steps, hold until 30% of the time, then fall linearly to 1% of the peak."""
    return peak * min((step + 1) / 300, 1.0) * min(1.0, max(0.01, (1 - progress) / 0.7))


@torch.no_grad()
def teacher_forced(params: Params, shape: Shape, encoder: Encoder, pad: int, length: int, batches: int) -> dict:
    """Held-out loss, token accuracy and share of tool calls predicted without a wrong token."""
    forward = Forward(shape)
    end, start = encoder.token("</tool_call>"), encoder.token("<tool_call>")
    rng = random.Random(99)
    right = total = calls = perfect = 0
    for _ in range(batches):
        ids, mask = make_batch(encoder, rng, TOKENS // length, length, pad, held_out=True)
        tokens = torch.from_numpy(ids.astype("int64")).cuda()
        x, _ = forward.trunk(params, tokens, length, torch.bfloat16)
        guess = torch.cat(
            [
                forward.head(
                    part,
                    params["final_norm"].bfloat16(),
                    params["embed"].bfloat16(),
                    torch.zeros(len(part), dtype=torch.int64, device="cuda"),
                    torch.ones(len(part), device="cuda"),
                )[1].argmax(-1)
                for part in x.split(8192)
            ]
        )
        hit = torch.zeros_like(tokens, dtype=torch.bool)
        hit[1:] = guess[:-1] == tokens[1:]
        hits, learned = hit.cpu().numpy(), mask == 2
        right += int((hits & learned).sum())
        total += int(learned.sum())
        opened = -1
        for at in range(len(ids)):
            if at % length == 0:
                opened = -1
            if ids[at] == start and learned[at]:
                opened = at
            elif ids[at] == end and opened >= 0:
                calls += 1
                perfect += bool(hits[opened : at + 1].all())
                opened = -1
    return {
        "length": length,
        "token_accuracy": right / max(total, 1),
        "perfect_calls": perfect / max(calls, 1),
        "calls": calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("agentserve/demo_model/tokenizer.json"))
    parser.add_argument("--start", type=Path, help="folder with master-*.safetensors to go on from")
    parser.add_argument("--seconds", type=float, default=420, help="training time, set-up not counted")
    parser.add_argument("--until", type=float, help="end the training this long after the start, set-up counted")
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--everyday", type=float, default=0.0, help="share of sessions with everyday wording")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--adamw", action="store_true", help="AdamW for matrices too")
    parser.add_argument("--tests", type=int, default=6, help="held-out batches for each row length")
    options = parser.parse_args()
    began = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    encoder = Encoder(str(options.tokenizer))
    pad, stop = encoder.token("<|endoftext|>"), encoder.token("<|im_end|>")
    feed = Feed(str(options.tokenizer), options.seed, TOKENS, WORKERS, pad, options.everyday)
    shape = Shape()
    params = initial(shape, options.seed, "cuda")
    if options.start:
        loaded = {k: v for part in sorted(options.start.glob("master-*.safetensors")) for k, v in load_file(part).items()}
        params = {name: loaded[name].cuda().requires_grad_() for name in params}
    trainer = Trainer(params, shape, muon=not options.adamw)
    for length in LENGTHS:
        trainer.record(length)
        print(json.dumps({"recorded": length, "s": round(time.monotonic() - began, 1)}), flush=True)
    trainer.reset()
    torch.cuda.synchronize()
    if options.until is not None:
        options.seconds = min(options.seconds, options.until - (time.monotonic() - began))
    options.out.mkdir(parents=True, exist_ok=True)
    save_config(shape, options.out, pad, stop)

    def save() -> None:
        save_weights(params, shape, options.out)
        master = {name: p.detach().cpu() for name, p in params.items()}
        for index, part in enumerate((SPLIT, params.keys() - SPLIT)):
            path = options.out / f"master-{index}.safetensors"
            save_file({name: master[name] for name in params if name in part}, str(path))

    train(trainer, feed, options, save)
    feed.close()
    save()
    print(json.dumps({"saved_s": round(time.monotonic() - began, 1)}), flush=True)
    if options.tests:
        for length in LENGTHS:
            print(
                json.dumps({"held_out": teacher_forced(params, shape, encoder, pad, length, options.tests)}),
                flush=True,
            )
    print(json.dumps({"total_s": round(time.monotonic() - began, 1)}), flush=True)


def train(trainer: Trainer, feed: Feed, options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Train for options.seconds; save once when most of it is over, in case the machine is taken away."""
    draw = random.Random(options.seed)
    lengths, shares = list(LENGTHS), list(LENGTHS.values())
    start = time.monotonic()
    step, waited, saved = 0, 0.0, False
    log = None
    while (elapsed := time.monotonic() - start) < options.seconds:
        progress = elapsed / options.seconds
        if progress > EARLY and not saved:
            saved = True
            save()
        length = draw.choices(lengths, shares)[0]
        before = time.monotonic()
        ids, mask = feed.get(length)
        waited += time.monotonic() - before
        other = 0.1 * (1 - progress) + 0.01
        learned = torch.from_numpy(mask).pin_memory()
        trainer.ids.copy_(torch.from_numpy(ids.astype("int64")).pin_memory(), non_blocking=True)
        on_device = learned.cuda(non_blocking=True)
        trainer.weights.copy_((on_device == 2).float() + (on_device == 1).float() * other)
        trainer.optimizer.rate.fill_(rate(progress, step, options.peak))
        trainer.graphs[length].replay()
        step += 1
        if step % 8 == 0:
            torch.cuda.synchronize()  # keep the clock honest: replays return at once
        if step in (1, 100) or step % 500 == 0:
            loss, balance, locality, repeated, norm = trainer.stats.tolist()
            log = {
                "step": step, "s": round(time.monotonic() - start, 1), "length": length, "loss": round(loss, 4), "balance": round(balance, 3),
                "locality": round(locality, 3), "repeated": round(repeated, 3), "norm": round(norm, 3),
                "tokens_per_s": round(step * TOKENS / (time.monotonic() - start)), "waited_s": round(waited, 1),
            }  # fmt: skip
            print(json.dumps(log), flush=True)
    torch.cuda.synchronize()
    print(
        json.dumps({"steps": step, "tokens": step * TOKENS, "s": round(time.monotonic() - start, 1)}),
        flush=True,
    )


if __name__ == "__main__":
    main()
