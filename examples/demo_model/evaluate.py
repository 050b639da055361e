"""Plays held-out dialogues with a model that really has to call the tools, and counts what it gets right.

    python -m examples.demo_model.evaluate --model agentserve/demo_model --dialogues 300 --sessions 30

A tool answers only if it is called as the dialogue needs it (then with the dialogue's result); any other call gets an
error. The history is the model's own output, token by token. `evaluate()` takes any function from prompts to outputs.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from examples.demo_model.data import WRITERS
from examples.demo_model.dialogues import Session, Turn, Writer
from examples.demo_model.rows import (
    CONTENT,
    LITERAL,
    Encoder,
    Piece,
    result_pieces,
    system_pieces,
    user_pieces,
)
from examples.demo_model.tools import Call

Generate = Callable[[list[list[int]]], list[list[int]]]  # prompts -> outputs, each up to and with <|im_end|>
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


@dataclass
class Output:
    """One parsed generation."""

    thinking: str
    text: str
    calls: list[dict]
    broken: int  # tool-call blocks that are not JSON
    ended: bool


def parse(text: str) -> Output:
    """Split generated text into thinking, answer and calls."""
    ended = text.endswith("<|im_end|>")
    body = text.removesuffix("<|im_end|>")
    thinking = ""
    if body.startswith("<think>"):
        thinking, _, body = body.removeprefix("<think>").partition("</think>")
    answer, *blocks = body.split("<tool_call>")
    calls, broken = [], 0
    for block in blocks:
        try:
            call = json.loads(block.partition("</tool_call>")[0])
            calls.append({"name": call["name"], "arguments": call["arguments"]})
        except (ValueError, KeyError, TypeError):
            broken += 1
    return Output(thinking.strip(), answer.strip(), calls, broken, ended)


def schema_error(call: dict, declarations: Sequence[dict]) -> str | None:
    """Why the call does not fit the declared tools, or None."""
    tool = next((tool for tool in declarations if tool["name"] == call["name"]), None)
    if tool is None:
        return "unknown tool"
    properties = tool["parameters"].get("properties", {})
    arguments = call["arguments"]
    if not isinstance(arguments, dict):
        return "arguments are no object"
    for name in tool["parameters"].get("required", []):
        if name not in arguments:
            return f"{name} missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"{name} undeclared"
        kind = TYPES[properties[name]["type"]]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return f"{name} has the wrong type"
    return None


@dataclass
class Play:
    """One session being played: its context ids and how far it is."""

    session: Session
    context: list[int]
    turn: int = 0
    step: int = 0
    good: bool = True
    results: list[bool] = field(default_factory=list)  # of each finished turn
    failures: list[dict] = field(default_factory=list)

    def current(self) -> Turn:
        return self.session.turns[self.turn]


class Counts(Counter):
    def rate(self, part: str, whole: str) -> float:
        return self[part] / max(self[whole], 1)


def expected(turn: Turn, step: int) -> tuple[Call, ...]:
    return turn.steps[step].calls if step < len(turn.steps) else ()


def evaluate(generate: Generate, encoder: Encoder, sessions: Sequence[Session]) -> tuple[list[Play], Counts]:
    """Play all sessions side by side. Counts: calls, valid, turns, called_right, answered_right, ended, outputs."""
    counts = Counts()
    opening = Piece("<|im_start|>assistant\n", LITERAL)

    def ids(pieces: list[Piece]) -> list[int]:
        return encoder.encode([pieces])[0][0]

    def ask(turn: Turn) -> list[Piece]:
        note = []
        if turn.note:
            note = [
                Piece("<|im_start|>system\n", LITERAL),
                Piece(turn.note, CONTENT),
                Piece("<|im_end|>\n", LITERAL),
            ]
        return [*note, *user_pieces(turn.user), opening]

    plays = []
    for session in sessions:
        head = system_pieces(session.system, [tool.declaration for tool in session.tools])
        plays.append(Play(session, ids([*head, *ask(session.turns[0])])))
    active = list(plays)
    while active:
        outputs = generate([play.context for play in active])
        for play, output in zip(active, outputs, strict=True):
            text = encoder.special.decode(output, skip_special_tokens=False)
            play.context = play.context + output
            follow = _advance(play, parse(text), counts)
            if follow is not None:
                play.context += ids([Piece("\n", LITERAL), *follow, opening])
            else:
                play.turn += 1
                play.step, play.good = 0, True
                if play.turn < len(play.session.turns):
                    play.context += ids([Piece("\n", LITERAL), *ask(play.current())])
        active = [play for play in active if play.turn < len(play.session.turns)]
    return plays, counts


def _advance(play: Play, output: Output, counts: Counts) -> list[Piece] | None:
    """Judge one output. Returns the tool results to go on with, or None when the turn is over."""
    turn = play.current()
    want = expected(turn, play.step)
    counts["outputs"] += 1
    counts["ended"] += output.ended
    counts["calls"] += len(output.calls) + output.broken
    declarations = [tool.declaration for tool in play.session.tools]
    valid = [schema_error(call, declarations) is None for call in output.calls]
    counts["valid"] += sum(valid)
    wanted = [{"name": call.tool.name, "arguments": call.arguments} for call in want]
    match = output.calls == wanted and not output.broken
    if not match:
        play.good = False
        play.failures.append(
            {
                "turn": play.turn,
                "shape": turn.shape,
                "user": turn.user,
                "want": wanted,
                "got": output.calls,
                "text": output.text,
            }
        )
    if output.calls and play.step < 4:
        play.step += 1
        results = []
        for call in output.calls:
            known = next((w for w in want if w.tool.name == call["name"] and w.arguments == call["arguments"]), None)
            results.append(known.result if known else "Error: unexpected call")
        return result_pieces(results)
    counts["turns"] += 1
    called = play.good and play.step >= len(turn.steps)
    answered = called and output.ended and all(value.casefold() in output.text.casefold() for value in turn.must)
    if called and not answered:
        play.failures.append(
            {
                "turn": play.turn,
                "shape": turn.shape,
                "user": turn.user,
                "must": turn.must,
                "text": output.text,
            }
        )
    counts["called_right"] += called
    counts["answered_right"] += answered
    counts[f"turns {turn.shape}"] += 1
    counts[f"right {turn.shape}"] += answered
    play.results.append(answered)
    return None


def dialogues(
    count: int, turns: int, seed: int, shapes: Sequence[str] | None = None, writer_class: type[Writer] = Writer
) -> list[Session]:
    """Held-out sessions. shapes: keep only sessions whose turns have these shapes (None: all)."""
    made: list[Session] = []
    index = 0
    while len(made) < count:
        rng = Random(seed * 1_000_003 + index)
        index += 1
        writer = writer_class(rng, held_out=True, tool_count=1 + int(rng.random() * 6))
        for _ in range(turns):
            writer.turn()
        if shapes is None or all(turn.shape in shapes for turn in writer.session.turns):
            made.append(writer.session)
    return made


def transformers_backend(folder: Path, encoder: Encoder, device: str = "cpu", batch: int = 24, limit: int = 400) -> Generate:
    """Greedy generation with transformers, in left-padded batches of similar length."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.eval().to(device)
    pad, stop = encoder.token("<|endoftext|>"), encoder.token("<|im_end|>")

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            width = max(len(prompts[i]) for i in part)
            tokens = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in part])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in part])
            made = model.generate(
                input_ids=tokens.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=limit,
                do_sample=False,
                pad_token_id=pad,
                eos_token_id=stop,
            )
            for i, row in zip(part, made[:, width:].tolist(), strict=True):
                outputs[i] = row[: row.index(stop) + 1] if stop in row else row
        return outputs

    return generate


def report(name: str, plays: Sequence[Play], counts: Counts) -> dict:
    shapes = sorted({key.split(" ")[1] for key in counts if key.startswith("turns ")})
    return {
        "set": name,
        "sessions": len(plays),
        "turns": counts["turns"],
        "calls": counts["calls"],
        "schema_valid": round(counts.rate("valid", "calls"), 4),
        "tool_and_arguments": round(counts.rate("called_right", "turns"), 4),
        "final_answer": round(counts.rate("answered_right", "turns"), 4),
        "ended": round(counts.rate("ended", "outputs"), 4),
        "whole_sessions": round(sum(all(play.results) for play in plays) / max(len(plays), 1), 4),
        "by_shape": {s: f"{counts[f'right {s}']}/{counts[f'turns {s}']}" for s in shapes},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("agentserve/demo_model"))
    parser.add_argument("--dialogues", type=int, default=300, help="one-turn dialogues with one or two calls")
    parser.add_argument("--sessions", type=int, default=30, help="sessions of ten turns")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--writer", choices=sorted(WRITERS), default="broad", help="which part of the generator")
    parser.add_argument("--backend", choices=("engine", "transformers"), default="engine")
    parser.add_argument("--device", default="cpu", help="of the transformers backend")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--failures", type=Path, help="write every failure to this JSON-lines file")
    options = parser.parse_args()
    encoder = Encoder(str(options.model / "tokenizer.json"))
    if options.backend == "engine":
        from examples.demo_model.engine_backend import engine_backend

        generate = engine_backend(options.model, encoder.token("<|im_end|>"))
    else:
        generate = transformers_backend(options.model, encoder, options.device, options.batch)
    writer = WRITERS[options.writer]
    sets = [
        ("one turn", dialogues(options.dialogues, 1, options.seed, ("single", "chain", "parallel"), writer)),
        ("ten turns", dialogues(options.sessions, 10, options.seed + 1, writer_class=writer)),
    ]
    lost = []
    for name, sessions in sets:
        if sessions:
            plays, counts = evaluate(generate, encoder, sessions)
            print(json.dumps(report(name, plays, counts)), flush=True)
            lost += [{"set": name, **failure} for play in plays for failure in play.failures]
    if options.failures:
        options.failures.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in lost))


if __name__ == "__main__":
    main()
