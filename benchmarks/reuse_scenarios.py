"""What is reused when an agent edits its context, beside the longest common prefix and beside two other servers.

    python -m benchmarks.reuse_scenarios [--backend cpu|exact|reference] [--dtype float32] [--models …] [--record]

The whole path in one process with real models: text, template, aliases, policy, store, disk, engine. attention: a small random
qwen3_moe; hybrid: the embedded demo model (gated delta nets and attention). What they say is given (in_process.py), so that
contexts have the sizes that the others were measured with (peers.py). exact: logits of the turn in question against a run that
restores nothing; on the exact and reference backends every bit, on the fast one the largest difference, since it rounds by
chunk. In float32, because in bf16 a router that is undecided between two experts may choose the other one for such a
difference.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.conversations import Conversation, Sizes
from benchmarks.in_process import Played, Server
from benchmarks.peers import APPEND, ATTENTION, HYBRID, PLACEHOLDER, RESTART, SHARED, SUBAGENT, THINKING, Peer
from benchmarks.traces.compose import DEMO_MODEL

NOTHING = Peer(0)


@dataclass(frozen=True)
class Cell:
    """One turn of a scenario. difference: largest of any logit against a cold run; agrees: the same greedy tokens.

    peer: what others reuse of a prompt of that size.
    """

    scenario: str
    turn: int
    prompt: int
    common: int
    reused: int
    tier: str | None
    difference: float
    agrees: bool

    @property
    def share(self) -> float:
        return self.reused / self.common if self.common else 1.0


Start = Callable[[Server | None], Server]
"""Starts a server; given another one, as its restart."""


def append_only(start: Start, sizes: Sizes) -> Iterator[Cell]:
    talk = Conversation(start(None), sizes)
    talk.play(6)
    for turn in (3, 4, 6):
        yield cell(APPEND, turn, talk.server, talk.turns[turn - 1])


def thinking_dropped(start: Start, sizes: Sizes) -> Iterator[Cell]:
    talk = Conversation(start(None), sizes)
    talk.play(3)
    talk.drop_first_thinking()
    yield cell(THINKING, 4, talk.server, talk.turn())


def result_replaced(start: Start, sizes: Sizes) -> Iterator[Cell]:
    talk = Conversation(start(None), sizes)
    talk.play(4)
    talk.replace_first_result()
    yield cell(PLACEHOLDER, 5, talk.server, talk.turn())


def shared_system(start: Start, sizes: Sizes) -> Iterator[Cell]:
    """Two sessions take turns."""
    server = start(None)
    first = Conversation(server, sizes, seed=1, system_tokens=sizes.system)
    second = Conversation(server, sizes, seed=2, like=first)
    for talk in (first, second):
        talk.ask(sizes.system + sizes.asked)
    for _ in range(3):
        first.play(1)
        second.play(1)
    for turn in (1, 3):
        yield cell(SHARED, turn, server, second.turns[turn - 1])


def sub_agent(start: Start, sizes: Sizes) -> Iterator[Cell]:
    """Two turns, then a sub-agent under the same system prompt for two, then the session goes on."""
    server = start(None)
    main = Conversation(server, sizes, seed=1)
    main.play(2)
    helper = Conversation(server, sizes, seed=2, like=main)
    helper.play(2)
    yield cell(SUBAGENT + ", its own first turn", 1, server, helper.turns[0])
    yield cell(SUBAGENT, 3, server, main.turn())


def restart(start: Start, sizes: Sizes) -> Iterator[Cell]:
    server = start(None)
    talk = Conversation(server, sizes)
    talk.play(2)
    server.close()
    after = start(server)
    yield cell(RESTART, 3, after, talk.moved(after).turn())


SCENARIOS = (append_only, thinking_dropped, result_replaced, shared_system, sub_agent, restart)


def cell(scenario: str, number: int, server: Server, turn: Played) -> Cell:
    cold = server.cold(turn)
    # A model that was told its answer could choose another one; what matters is that both would choose the same.
    differences = [(a - b).abs().max().item() for a, b in zip(turn.logits, cold, strict=True)]
    agrees = all(int(a.argmax()) == int(b.argmax()) for a, b in zip(turn.logits, cold, strict=True))
    prompt = len(turn.prompt)
    return Cell(scenario, number, prompt, turn.common, turn.reused, turn.tier, max(differences), agrees)


def attention_model(directory: Path) -> Path:
    """A seeded qwen3_moe with the demo model's vocabulary, random in every parameter."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        eos_token_id=2039,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


@contextmanager
def servers(model_dir: Path, backend: str, dtype: str) -> Iterator[Start]:
    """A scenario's servers; those still running are closed at the end."""
    running: list[Server] = []
    with tempfile.TemporaryDirectory() as scratch:

        def start(before: Server | None) -> Server:
            server = Server(model_dir, DEMO_MODEL, backend=backend, dtype=dtype, state_dir=Path(scratch), before=before)
            running.append(server)
            if before is not None:
                running.remove(before)
            return server

        try:
            yield start
        finally:
            for server in running:
                server.close()


def play(model_dir: Path, backend: str, dtype: str, sizes: Sizes) -> Iterator[Cell]:
    for scenario in SCENARIOS:
        with servers(model_dir, backend, dtype) as start:
            yield from scenario(start, sizes)


def show(console: Console, model: str, backend: str, cells: list[Cell], peers: dict[tuple[str, int], Peer]) -> None:
    table = Table(title=f"{model} model, {backend} backend: prompt tokens reused", title_justify="left")
    table.add_column("scenario")
    columns = (
        "turn",
        "prompt",
        "common prefix",
        "reused",
        "share",
        "exact",
        "llama.cpp",
        "tuned by hand",
        "vLLM",
        "of a prompt of",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for c in cells:
        peer = peers.get((c.scenario, c.turn), NOTHING)
        exact = "every bit" if c.difference == 0 else f"within {c.difference:.1g}" + ("" if c.agrees else ", other choice")
        figures = [peer.llama, peer.tuned, peer.vllm, peer.prompt or None]
        theirs = ["–" if figure is None else f"{figure:,}" for figure in figures]
        table.add_row(
            c.scenario, str(c.turn), f"{c.prompt:,}", f"{c.common:,}", f"{c.reused:,}", f"{c.share:.2%}", exact, *theirs
        )
    console.print(table)
    for (scenario, _), peer in peers.items():
        if peer.note:
            console.print(f"  {scenario}: {peer.note}", style="dim")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("cpu", "exact", "reference"), default="cpu")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="float32")
    parser.add_argument("--models", nargs="+", choices=("attention", "hybrid"), default=("attention", "hybrid"))
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args()
    console = Console(width=170)
    sizes = Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            model_dir = DEMO_MODEL if model == "hybrid" else attention_model(Path(scratch))
            cells = list(play(model_dir, options.backend, options.dtype, sizes))
            show(console, model, options.backend, cells, HYBRID if model == "hybrid" else ATTENTION)
            figures = {f"{c.scenario}, turn {c.turn}": asdict(c) | {"share": round(c.share, 4)} for c in cells}
            report("reuse_scenarios", model, {"backend": options.backend} | asdict(sizes), figures, options.record)


if __name__ == "__main__":
    main()
