"""Endless training batches: sessions written, rendered and encoded in worker processes."""

from __future__ import annotations

import multiprocessing as mp
import os
from random import Random

import numpy as np

from examples.demo_model.dialogues import Session, Writer
from examples.demo_model.everyday import Everyday
from examples.demo_model.rows import Encoder, Piece, session_pieces

CHARACTERS_PER_TOKEN = 3.0  # measured on generated sessions
MODES = (("keep", 0.74), ("template", 0.14), ("empty", 0.12))


def write_session(rng: Random, length: int, held_out: bool, everyday: float = 0.0) -> tuple[Session, str]:
    """A session of at least about `length` tokens, and how its thinking is shown.

    everyday: share of sessions with plain toolboxes and everyday wording.
    """
    writer_class = Everyday if everyday and rng.random() < everyday else Writer
    r = rng.random()
    characters = length * CHARACTERS_PER_TOKEN
    filler, lines, paste = 0, 0, 0.015
    if length > 1024:
        if r < 0.35:
            filler = int(rng.uniform(0.15, 0.6) * characters)
        elif r < 0.6:
            lines = rng.randint(8, 30 if length <= 2048 else 60)
        elif r < 0.75:
            paste = 0.3
    elif r < 0.04:
        filler = rng.randint(300, 1200)
    writer = writer_class(rng, held_out, filler, lines=lines, paste=paste)
    r = rng.random()
    mode = "keep" if r < MODES[0][1] else "template" if r < MODES[0][1] + MODES[1][1] else "empty"
    size = len(writer.session.system) + sum(len(str(tool.declaration)) for tool in writer.session.tools)
    # In "template" mode only the last turn is learned, so it must end inside the row.
    goal = characters * (rng.uniform(0.3, 0.75) if mode == "template" else 1.15)
    while size < goal or not writer.session.turns:
        turn = writer.turn()
        size += len(turn.user) + len(turn.answer) + 60
        for step in turn.steps:
            size += 60 + (len(step.thinking) if mode == "keep" else 0)
            size += sum(len(call.result) + len(str(call.arguments)) + 90 for call in step.calls)
    return writer.session, mode


def make_batch(
    encoder: Encoder,
    rng: Random,
    rows: int,
    length: int,
    pad: int,
    held_out: bool = False,
    everyday: float = 0.0,
):
    """(ids uint16 [rows·length], mask uint8 likewise: 2 learned, 1 other text, 0 padding)."""
    ids = np.full((rows, length), pad, dtype=np.uint16)
    mask = np.zeros((rows, length), dtype=np.uint8)
    pieces: list[list[Piece]] = []
    for _ in range(rows):
        session, mode = write_session(rng, length, held_out, everyday)
        pieces.append(session_pieces(session, mode))
    for row, (tokens, learn) in enumerate(encoder.encode(pieces)):
        count = min(len(tokens), length)
        ids[row, :count] = tokens[:count]
        mask[row, :count] = np.asarray(learn[:count], dtype=np.uint8) + 1
    return ids.reshape(-1), mask.reshape(-1)


def _work(queue, tokenizer_json: str, seed: int, rows: int, length: int, pad: int, everyday: float) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Encoder(tokenizer_json)
    rng = Random(seed)
    while True:
        queue.put(make_batch(encoder, rng, rows, length, pad, everyday=everyday))


class Feed:
    """Queues of batches, one for each row length, filled by worker processes."""

    def __init__(
        self,
        tokenizer_json: str,
        seed: int,
        tokens: int,
        workers: dict[int, int],
        pad: int,
        everyday: float = 0.0,
    ) -> None:
        """tokens: of one batch. workers: row length -> number of processes. everyday: as write_session."""
        context = mp.get_context("spawn")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.queues = {length: context.Queue(maxsize=24) for length in workers}
        self.processes = []
        for length, count in workers.items():
            for index in range(count):
                arguments = (
                    self.queues[length],
                    tokenizer_json,
                    seed * 1_000_003 + length * 101 + index,
                    tokens // length,
                    length,
                    pad,
                    everyday,
                )
                self.processes.append(context.Process(target=_work, args=arguments, daemon=True))
        for process in self.processes:
            process.start()

    def get(self, length: int):
        return self.queues[length].get(timeout=120)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
