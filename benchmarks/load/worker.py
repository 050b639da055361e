"""A worker process with the fake engine, on a real clock; started by server.py.

Everything but the model is the worker that serves; see timed.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentserve import logs
from agentserve.text.tokenizer import Tokenizer
from agentserve.worker.main import serve
from agentserve.worker.pipe import PipeClosed, WorkerPipe
from agentserve.worker.settings import WorkerSettings
from benchmarks.load.machines import MACHINES
from benchmarks.load.timed import RealClock, TimedEngine, timed_engine

WORDS = ("the", "a", "file", "is", "not", "in", "it", "and", "of", "line")


def serve_pipe(fd: int, settings: WorkerSettings, load: Callable[[WorkerSettings, WorkerPipe], Any]) -> int:
    """Serve with an engine of one's own until the server hangs up; the exit status."""
    woken, wake = socket.socketpair()
    with woken, wake, socket.socket(fileno=fd) as sock:
        try:
            return serve(WorkerPipe(sock, woken), wake, settings, load)
        except PipeClosed:
            return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--settings", type=WorkerSettings.from_json, required=True)
    parser.add_argument("--machine", choices=sorted(MACHINES), required=True)
    options = parser.parse_args()
    logs.setup(options.settings.log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def load(settings: WorkerSettings, pipe: WorkerPipe) -> TimedEngine:
        torch.set_num_threads(1)  # nothing is computed; a second thread would only wait for the first
        folder = Path(settings.model_dir)
        config = json.loads((folder / "config.json").read_text())
        end = config.get("eos_token_id", 0)
        tokenizer = Tokenizer.load(folder)
        return timed_engine(
            MACHINES[options.machine],
            RealClock(),
            vocab_size=config["vocab_size"],
            end=end[0] if isinstance(end, list) else end,
            words=[int(ids[0]) for ids in tokenizer.encode_many(list(WORDS))],
            **{"kv_tokens": 1 << 20, **settings.engine},
        )

    return serve_pipe(options.fd, options.settings, load)


if __name__ == "__main__":
    sys.exit(main())
