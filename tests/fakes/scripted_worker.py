"""A worker process without engine or cache: answers turns by simple rules, for tests of pipe, client and supervisor.

Rules by the session name of a turn: "echo" streams the prompt ids back, "die" kills the process after the first token, "hang"
never answers again, "slow" streams until cancelled. Run as `python -m tests.fakes.scripted_worker FD MODE`, with MODE "ok",
"permanent" or "crash".
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import numpy as np

from agentserve.worker.messages import (
    PROTOCOL_VERSION,
    CancelTurn,
    Checkpoints,
    Drain,
    Hello,
    ListCheckpoints,
    LoadFailed,
    Loading,
    StartTurn,
    Tokens,
    TurnFinished,
)
from agentserve.worker.pipe import PipeClosed, WorkerPipe


def finished(turn_id: str, reason: str, output_tokens: int) -> TurnFinished:
    return TurnFinished(
        turn_id=turn_id,
        reason=reason,  # pyright: ignore[reportArgumentType]
        prompt_tokens=1,
        output_tokens=output_tokens,
        reused_tokens=0,
        written_tokens=0,
        queue_s=0.0,
        restore_s=0.0,
        prefill_s=0.0,
        ttft_s=0.0,
        decode_s=0.0,
    )


def main(fd: int, mode: str) -> None:
    pipe = WorkerPipe(socket.socket(fileno=fd))
    if mode == "crash":
        sys.exit(3)
    pipe.send(Loading(0.5, "reading weights"))
    if mode == "permanent":
        pipe.send(LoadFailed("the model directory has no config.json", permanent=True))
        pipe.flush()
        sys.exit(1)
    pipe.send(
        Hello(
            version=PROTOCOL_VERSION,
            model="fake",
            model_type="fake",
            vocab_size=100,
            eos_token_ids=(0,),
            max_context=1000,
            backend="fake",
            namespace="n",
            pid=os.getpid(),
        )
    )
    pipe.flush()
    slow: list[str] = []
    while True:
        for frame in pipe.receive(0.01 if slow else None):
            if isinstance(frame, StartTurn):
                ids = np.frombuffer(frame.ids, "<u4")
                if frame.session == "hang":
                    time.sleep(1000)
                if frame.session == "slow":
                    slow.append(frame.turn_id)
                    continue
                if frame.session == "device":
                    pipe.send(LoadFailed("the CPU executor's thread has ended", permanent=False))
                    pipe.flush()
                    sys.exit(1)
                for token in ids:
                    pipe.send(Tokens(turn_id=frame.turn_id, ids=(int(token),)))
                    if frame.session == "die":
                        pipe.flush()
                        os.kill(os.getpid(), signal.SIGKILL)
                pipe.send(finished(frame.turn_id, "stop", len(ids)))
            elif isinstance(frame, CancelTurn) and frame.turn_id in slow:
                slow.remove(frame.turn_id)
                pipe.send(finished(frame.turn_id, "cancelled", 0))
            elif isinstance(frame, ListCheckpoints):
                pipe.send(Checkpoints(frame.query_id, ()))
            elif isinstance(frame, Drain):
                sys.exit(0)
        for turn_id in slow:
            pipe.send(Tokens(turn_id=turn_id, ids=(1,)))
        pipe.flush()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except PipeClosed:
        sys.exit(0)
