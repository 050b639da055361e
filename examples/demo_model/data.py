"""Endless training batches: sessions written, rendered and encoded in worker processes."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Mapping
from random import Random

import numpy as np

from examples.demo_model.dialogues import Session, Writer
from examples.demo_model.everyday import Everyday
from examples.demo_model.plainly import Plain
from examples.demo_model.rows import Encoder, Piece, session_pieces

CHARACTERS_PER_TOKEN = 3.0  # measured on generated sessions
MODES = (("keep", 0.74), ("template", 0.14), ("empty", 0.12))
WRITERS: dict[str, type[Writer]] = {"broad": Writer, "everyday": Everyday, "plain": Plain}
Mix = Mapping[str, float]  # writer -> share of sessions
BROAD: Mix = {"broad": 1.0}
SHORT = 512  # tokens of rows that take only toolboxes of at most half their length
QUEUED = 600  # batches made ahead: some seconds of training, while compilation still needs the processors


def parse_mix(text: str) -> dict[str, float]:
    """Shares from text such as broad=0.4,plain=0.6. Raises ValueError for a writer that does not exist or shares that do not add up to 1."""
    mix = {name: float(share) for name, _, share in (part.partition("=") for part in text.split(","))}
    if unknown := mix.keys() - WRITERS.keys():
        raise ValueError(f"mix: no writer {', '.join(sorted(unknown))}; there are {', '.join(WRITERS)}")
    if abs(sum(mix.values()) - 1) > 1e-6:
        raise ValueError(f"mix: shares add up to {sum(mix.values()):g}, not 1")
    return mix


def write_session(rng: Random, length: int, held_out: bool, mix: Mix = BROAD) -> tuple[Session, str]:
    """A session of at least about `length` tokens, and how its thinking is shown."""
    name = next(iter(mix)) if len(mix) == 1 else rng.choices(list(mix), list(mix.values()))[0]
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
    writer = WRITERS[name](rng, held_out, filler, lines=lines, paste=paste)
    while length <= SHORT and _head(writer.session) > characters / 2:
        writer = WRITERS[name](rng, held_out, 0, lines=lines, paste=paste)
    r = rng.random()
    mode = "keep" if r < MODES[0][1] else "template" if r < MODES[0][1] + MODES[1][1] else "empty"
    size = _head(writer.session)
    # In "template" mode only the last turn is learned, so it must end inside the row.
    goal = characters * (rng.uniform(0.3, 0.75) if mode == "template" else 1.15)
    while size < goal or not writer.session.turns:
        turn = writer.turn()
        size += len(turn.user) + len(turn.answer) + 60
        for step in turn.steps:
            size += 60 + (len(step.thinking) if mode == "keep" else 0)
            size += sum(len(call.result) + len(str(call.arguments)) + 90 for call in step.calls)
    return writer.session, mode


def _head(session: Session) -> int:
    """Characters before the first turn."""
    return len(session.system) + sum(len(str(tool.declaration)) for tool in session.tools)


def make_batch(
    encoder: Encoder, rng: Random, rows: int, length: int, pad: int, held_out: bool = False, mix: Mix = BROAD
) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint16 [rows·length], mask uint8 likewise: 2 learned, 1 other text, 0 padding)."""
    ids = np.full((rows, length), pad, dtype=np.uint16)
    mask = np.zeros((rows, length), dtype=np.uint8)
    pieces: list[list[Piece]] = []
    for _ in range(rows):
        session, mode = write_session(rng, length, held_out, mix)
        pieces.append(session_pieces(session, mode))
    for row, (tokens, learn) in enumerate(encoder.encode(pieces)):
        count = min(len(tokens), length)
        ids[row, :count] = tokens[:count]
        mask[row, :count] = np.asarray(learn[:count], dtype=np.uint8) + 1
    return ids.reshape(-1), mask.reshape(-1)


def _work(queue, tokenizer_json: str, seed: int, tokens: int, lengths: Mapping[int, float], pad: int, mix: Mix) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Encoder(tokenizer_json)
    rng = Random(seed)
    while True:
        length = rng.choices(list(lengths), list(lengths.values()))[0]
        queue.put((length, *make_batch(encoder, rng, tokens // length, length, pad, mix=mix)))


class Feed:
    """Batches from worker processes, each of one row length, in the shares of `lengths`."""

    def __init__(
        self,
        tokenizer_json: str,
        seed: int,
        tokens: int,
        lengths: Mapping[int, float],
        pad: int,
        mix: Mix = BROAD,
        workers: int = 0,
    ) -> None:
        """tokens: of one batch.  lengths: row length -> share of batches.  workers: processes; 0: one less than processors."""
        context = mp.get_context("spawn")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.queue = context.Queue(maxsize=QUEUED)
        self.processes = [
            context.Process(
                target=_work,
                args=(self.queue, tokenizer_json, seed * 1_000_003 + index, tokens, lengths, pad, mix),
                daemon=True,
            )
            for index in range(workers or max(1, (os.cpu_count() or 2) - 1))
        ]
        for process in self.processes:
            process.start()

    def get(self) -> tuple[int, np.ndarray, np.ndarray]:
        """(row length, ids, mask). Raises queue.Empty when no worker brings one for two minutes."""
        return self.queue.get(timeout=120)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
