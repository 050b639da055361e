"""Trains the demo model for a given time and writes a checkpoint, its running average and a report.

    python -m examples.demo_model.train --out DIR --seconds 420 [--start FOLDER] [--until 400] [--seed 1]

On CUDA the whole step (forward, backward, clipping, update, running average) is one graph for each row length. `--device cpu`
takes the same path without graphs, for trying it out. Whatever happens after the training, DIR then holds usable weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.demo_model.config import Shape
from examples.demo_model.data import Feed, parse_mix
from examples.demo_model.export import load_start, save_config, save_weights
from examples.demo_model.model import Forward, Params, initial
from examples.demo_model.optimizer import Optimizer
from examples.demo_model.rows import Encoder
from examples.demo_model.teacher import held_out_batches, teacher_forced

TOKENS = 32768  # of one step
LENGTHS = {512: 0.30, 1024: 0.38, 2048: 0.20, 4096: 0.12}  # row length -> share of steps
BALANCE, LOCALITY = 1e-4, 2e-3
SPLIT = {"gate_up", "embed"}  # of the f32 weights, into the first of two files
EARLY = 0.85  # share of the time after which weights are saved once already
AVERAGE_STEPS = 700.0  # the running average forgets a step after about so many
JUDGED_LENGTH = 1024


class Trainer:
    """Parameters, their running average, the optimizer and, on CUDA, one recorded graph for each row length."""

    def __init__(self, params: Params, shape: Shape, muon: bool, tokens: int) -> None:
        self.params = params
        self.average = {name: p.detach().clone() for name, p in params.items()}
        device = params["embed"].device
        self.on_cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.forward = Forward(shape, compile=lambda f: torch.compile(f, dynamic=False, fullgraph=True) if self.on_cuda else f)
        self.optimizer = Optimizer(params, muon)
        self.ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.weights = torch.ones(tokens, device=device)
        self.stats = torch.zeros(5, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _step(self, length: int) -> None:
        loss, (balance, locality, repeated) = self.forward.loss(self.params, self.ids, self.weights, length, self.dtype)
        (loss + BALANCE * balance + LOCALITY * locality).backward()
        norm = self.optimizer.step()
        self.stats.copy_(torch.stack([loss.detach(), balance.detach(), locality.detach(), repeated, norm]))
        with torch.no_grad():
            for name, p in self.params.items():
                self.average[name].lerp_(p, 1 / AVERAGE_STEPS)
                p.grad = None

    def record(self, length: int) -> None:
        """Warm up (which compiles) and record the step. The rate is zero, so nothing is learned."""
        if not self.on_cuda:
            return
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

    def step(self, length: int) -> None:
        if self.on_cuda:
            self.graphs[length].replay()
        else:
            self._step(length)

    def load(self, ids, mask, other: float) -> None:
        """The next batch. other: weight of tokens that the model does not write itself."""
        tokens, learned = torch.from_numpy(ids.astype("int64")), torch.from_numpy(mask)
        if self.on_cuda:
            tokens, learned = tokens.pin_memory(), learned.pin_memory()
        self.ids.copy_(tokens, non_blocking=True)
        on_device = learned.to(self.ids.device, non_blocking=True)
        self.weights.copy_((on_device == 2).float() + (on_device == 1).float() * other)

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def reset(self) -> None:
        for state in (*self.optimizer.first.values(), *self.optimizer.second.values(), self.optimizer.count):
            state.zero_()


def rate(progress: float, step: int, peak: float) -> float:
    """Warm up for 300 steps, hold until 30% of the time, then fall linearly to 1% of the peak."""
    return peak * min((step + 1) / 300, 1.0) * min(1.0, max(0.01, (1 - progress) / 0.7))


def save_master(params: Params, folder: Path) -> None:
    """The f32 weights as two files of about 14 MB."""
    master = {name: p.detach().cpu() for name, p in params.items()}
    for index, part in enumerate((SPLIT, params.keys() - SPLIT)):
        save_file({name: master[name] for name in params if name in part}, str(folder / f"master-{index}.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("agentserve/demo_model/tokenizer.json"))
    parser.add_argument("--start", type=Path, help="folder with master-*.safetensors or model.safetensors to go on from")
    parser.add_argument("--seconds", type=float, default=420, help="training time, set-up not counted")
    parser.add_argument("--until", type=float, help="end the training this long after the start, set-up counted")
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--mix", type=parse_mix, default="broad=1", help="share of sessions by writer: broad, everyday, plain")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--adamw", action="store_true", help="AdamW for matrices too")
    parser.add_argument("--tests", type=int, default=8, help="held-out batches for each writer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of one step, a multiple of the longest row")
    parser.add_argument("--workers", type=int, default=0, help="processes that write data; 0: one less than processors")
    options = parser.parse_args()
    began = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    encoder = Encoder(str(options.tokenizer))
    pad, stop = encoder.token("<|endoftext|>"), encoder.token("<|im_end|>")
    feed = Feed(str(options.tokenizer), options.seed, options.tokens, LENGTHS, pad, options.mix, options.workers)
    shape = Shape()
    params = initial(shape, options.seed, options.device)
    if options.start:
        loaded = load_start(options.start, shape)
        params = {name: loaded[name].to(options.device).requires_grad_() for name in params}
    trainer = Trainer(params, shape, muon=not options.adamw, tokens=options.tokens)
    for length in LENGTHS:
        trainer.record(length)
        print(json.dumps({"recorded": length, "s": round(time.monotonic() - began, 1)}), flush=True)
    trainer.reset()
    trainer.wait()
    if options.until is not None:
        options.seconds = min(options.seconds, options.until - (time.monotonic() - began))
    options.out.mkdir(parents=True, exist_ok=True)
    save_config(shape, options.out, pad, stop)

    def save() -> None:
        save_weights(params, shape, options.out)
        save_master(params, options.out)

    report = {"options": {k: str(value) if isinstance(value, Path) else value for k, value in vars(options).items()}}

    def write() -> None:
        report["total_s"] = round(time.monotonic() - began, 1)
        (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")

    report["log"] = train(trainer, feed, options, save)
    feed.close()
    save()
    save_weights(trainer.average, shape, options.out, "average.safetensors")
    write()
    if options.tests:
        batches = held_out_batches(encoder, pad, options.tokens, JUDGED_LENGTH, options.tests)
        report["held_out"] = {}
        for name, weights in (("last", params), ("average", trainer.average)):
            report["held_out"][name] = {
                writer: teacher_forced(weights, shape, encoder, made, JUDGED_LENGTH) for writer, made in batches.items()
            }
            print(json.dumps({name: report["held_out"][name]}), flush=True)
            write()
    print(json.dumps({"total_s": report["total_s"]}), flush=True)


def train(trainer: Trainer, feed: Feed, options: argparse.Namespace, save: Callable[[], None]) -> list[dict]:
    """Train for options.seconds; save once when most of it is over, in case the machine is taken away. Returns what was logged."""
    start = time.monotonic()
    step, waited, saved = 0, 0.0, False
    logged: list[dict] = []
    while (elapsed := time.monotonic() - start) < options.seconds:
        progress = elapsed / options.seconds
        if progress > EARLY and not saved:
            saved = True
            save()
        before = time.monotonic()
        length, ids, mask = feed.get()
        waited += time.monotonic() - before
        trainer.load(ids, mask, 0.1 * (1 - progress) + 0.01)
        trainer.optimizer.rate.fill_(rate(progress, step, options.peak))
        trainer.step(length)
        step += 1
        if step % 8 == 0:
            trainer.wait()  # keep the clock honest: replays return at once
        if step in (1, 100) or step % 500 == 0:
            loss, balance, locality, repeated, norm = trainer.stats.tolist()
            logged.append({
                "step": step, "s": round(time.monotonic() - start, 1), "length": length, "loss": round(loss, 4), "balance": round(balance, 3),
                "locality": round(locality, 3), "repeated": round(repeated, 3), "norm": round(norm, 3),
                "tokens_per_s": round(step * options.tokens / (time.monotonic() - start)), "waited_s": round(waited, 1),
            })  # fmt: skip
            print(json.dumps(logged[-1]), flush=True)
    trainer.wait()
    logged.append({"steps": step, "tokens": step * options.tokens, "s": round(time.monotonic() - start, 1)})
    print(json.dumps(logged[-1]), flush=True)
    return logged


if __name__ == "__main__":
    main()
