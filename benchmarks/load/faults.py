"""A worker process that fails when it is told to, for the crash lab: the real one, around a model that may break.

python -m benchmarks.load.faults --fd N --settings JSON --orders FOLDER

An order is a file in FOLDER, looked for before each forward pass: `raise` (the pass raises), `nan` (its logits are NaN),
`stick` (it does not return) are taken once; `slow` makes every pass last SLOW_S longer while it is there. Nothing that serves
imports this module: only a server that was started with the lab's own program has such a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from agentserve import logs
from agentserve.worker.loading import load_engine
from agentserve.worker.pipe import WorkerPipe
from agentserve.worker.settings import WorkerSettings
from benchmarks.load.worker import serve_pipe
from engine.batch import ForwardBatch
from engine.engine import Engine
from engine.models.base import Logits, Model, ModelSpec

ORDERS = ("raise", "nan", "stick")
SLOW_S = 0.05


class BrokenOnPurpose(RuntimeError):
    """What the order `raise` raises."""


class Breakable:
    """A model that looks for orders."""

    def __init__(self, model: Model, orders: Path) -> None:
        self._model = model
        self._orders = orders

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    def forward(self, batch: ForwardBatch, kv: Any, states: Any) -> Logits:
        if (self._orders / "slow").exists():
            time.sleep(SLOW_S)
        order = next((name for name in ORDERS if self._taken(name)), "")
        if order == "raise":
            raise BrokenOnPurpose("a forward pass that was told to fail")
        while order == "stick":
            time.sleep(3600)
        logits = self._model.forward(batch, kv, states)
        return Logits(torch.full_like(logits.rows, float("nan"))) if order == "nan" else logits

    def _taken(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            (self._orders / name).unlink()
            return True
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--settings", type=WorkerSettings.from_json, required=True)
    parser.add_argument("--orders", type=Path, required=True)
    options = parser.parse_args()
    logs.setup(options.settings.log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def load(settings: WorkerSettings, pipe: WorkerPipe) -> Engine:
        engine = load_engine(settings, pipe)
        engine.model = Breakable(engine.model, options.orders)
        return engine

    return serve_pipe(options.fd, options.settings, load)


if __name__ == "__main__":
    sys.exit(main())
