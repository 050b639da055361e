"""Text, turn loop, bridge, state cache and engine in one process, with a model that is told what to say.

For questions about reuse: what a model says decides where its next context parts, so the recorded or invented answer is forced
on it. It still computes every token, and the logits that it would have chosen from are kept for comparison.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentserve.interfaces import RenderRequest
from agentserve.protocol.items import FunctionTool, Item, OutputItem
from agentserve.session.aliases import Aliases
from agentserve.text.model_text import ModelText
from agentserve.worker.messages import FromWorker, Matched, Sampling, StartTurn, TurnFinished
from agentserve.worker.naming import namespace_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from benchmarks.traces.compose import write
from benchmarks.traces.prefixes import Known
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.base import Logits
from engine.types import Request, SamplingParams
from statecache.durable import DiskSettings, open_states

SALT = b"one person"
_FORCED = 1e4


class Told:
    """Stands in front of an engine's model: the next token is the next one of `script`. One request at a time.

    logits: what the model said by itself, [vocab] f32, one per generated token.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.spec = model.spec
        self.script: Sequence[int] = ()
        self.prompt_tokens = 0
        self.logits: list[torch.Tensor] = []

    def tell(self, prompt_tokens: int, script: Sequence[int]) -> None:
        self.prompt_tokens, self.script, self.logits = prompt_tokens, script, []

    def forward(self, batch: ForwardBatch, kv: Any, states: Any) -> Logits:
        logits = self._model.forward(batch, kv, states)
        (seq,) = batch.seqs
        index = seq.context + seq.length - self.prompt_tokens
        if index < 0:
            return logits
        self.logits.append(logits.rows[0].float().clone())
        forced = logits.rows.clone()
        forced[0, self.script[index]] += _FORCED
        return Logits(forced)


@dataclass(frozen=True)
class Played:
    """One turn. common: tokens that its prompt shares with anything computed before, at most n − 1. reused: restored ones."""

    prompt: np.ndarray
    generated: tuple[int, ...]
    common: int
    reused: int
    tier: str | None
    logits: list[torch.Tensor] = field(repr=False)


class Server:
    """A server's inside. state_dir: where states are kept over restarts, None = in memory alone. Close it at the end.

    text, known: those of an earlier one when this is its restart; a server has its aliases in the sessions database.
    index: over the saved states on disk, beside them, as servers have it.
    """

    def __init__(
        self,
        model_dir: Path,
        text_dir: Path,
        *,
        backend: str = "cpu",
        dtype: str = "auto",
        state_dir: Path | None = None,
        before: Server | None = None,
        threads: int = 1,
        index: bool = False,
    ) -> None:
        config = EngineConfig(
            model_dir=model_dir,
            backend=backend,  # pyright: ignore[reportArgumentType]
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            threads=threads,
            kv_tokens=8_192,
            max_rows=2,
            snapshot_rows=32,
        )
        self.engine = Engine.load(config)
        self.told = Told(self.engine.model)
        self.engine.model = self.told  # pyright: ignore[reportAttributeAccessIssue]
        self.text = ModelText.load(text_dir, book=Aliases()) if before is None else before.text
        self.known = Known() if before is None else before.known
        namespace, layout = namespace_of(self.engine.info, self.engine.layout)
        url = f"sqlite:///{state_dir}/index.db" if index else ""
        disk = None if state_dir is None else DiskSettings(state_dir, 1 << 30, reserve_bytes=0, index_url=url)
        self.states = open_states(namespace, layout, 1 << 30, disk)
        self.bridge = StateBridge(self.engine, self.states.cache, self.states.want)
        self._frames: list[FromWorker] = []
        self.loop = TurnLoop(self.engine, self.bridge, self._frames.append)
        self._serial = itertools.count()

    def turn(
        self, items: Sequence[Item], output: Sequence[OutputItem], *, instructions: str, tools: tuple[FunctionTool, ...] = ()
    ) -> Played:
        """Play one turn in which the model says `output`. Raises AssertionError if it fails or the cache did."""
        steps = self.steps(items, output, instructions=instructions, tools=tools)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def steps(
        self, items: Sequence[Item], output: Sequence[OutputItem], *, instructions: str, tools: tuple[FunctionTool, ...] = ()
    ) -> Generator[None, None, Played]:
        """The same, one engine step each time that it is asked to go on; the first time it only gets ready."""
        request = RenderRequest(instructions, tools, tuple(items), salt=SALT)
        rendered = self.text.render(request)
        generated = write(self.text, output)
        self.told.tell(len(rendered.ids), generated)
        self._frames.clear()
        start = StartTurn(
            turn_id=f"t{next(self._serial)}",
            ids=rendered.ids.astype("<u4").tobytes(),
            cuts=rendered.cuts,
            markers=rendered.markers,
            salt=SALT,
            session="",
            sampling=Sampling(max_tokens=len(generated), temperature=0.0),
            accepted_at=time.monotonic(),
        )
        yield
        self.loop.start(start)
        while self.engine.has_work:
            self.loop.step()
            yield
        matched = next(frame for frame in self._frames if isinstance(frame, Matched))
        end = self._frames[-1]
        assert isinstance(end, TurnFinished), end
        assert end.output_tokens == len(generated)
        assert self.bridge.cache_errors == 0
        self.text.learn(request, rendered, output, np.array(generated, np.uint32))
        common = self.known.reusable(rendered.ids)
        self.known.add(rendered.ids, np.array(generated, np.uint32))
        return Played(rendered.ids, tuple(generated), common, matched.position, matched.tier, self.told.logits)

    def cold(self, turn: Played) -> list[torch.Tensor]:
        """Logits of the same turn when nothing is restored."""
        self.told.tell(len(turn.prompt), turn.generated)
        ends = self.engine.info.eos_token_ids
        sampling = SamplingParams(max_tokens=len(turn.generated), temperature=0.0, stop_token_ids=ends)
        name = f"cold{next(self._serial)}"
        self.engine.submit(Request(name, turn.prompt.astype(np.int32), sampling, hold_at_end=False))
        while self.engine.has_work:
            self.engine.step()
        return self.told.logits

    def close(self) -> None:
        self.bridge.drain(60.0, everything=True)
        self.states.close()
