"""Time to first token of a 64-token turn after a 4k-token context: state restored from a checkpoint, beside a cold prefill.

    python -m benchmarks.restored_ttft [--context 4096] [--suffix 64] [--pairs 7] [--threads 1 0] [--record]

A real server with the embedded demo model, one WebSocket, nothing else running. Each pair asks the same turn twice: after
its context was sent in an earlier turn (restored) and as one whole context that the server has never seen (cold: its first
words are new). The figure is the ratio of each pair, by the time at which this client sees the first token event. Before every
timed turn there is a pause, as an agent's tool takes time: the server writes the states of the turn before to disk in it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from agentserve.cli.connect import AgentSocket, failure_of
from agentserve.cli.private_server import private_server
from benchmarks.common import report, spread

WORDS = [
    "river",
    "stone",
    "window",
    "market",
    "garden",
    "letter",
    "bridge",
    "copper",
    "candle",
    "winter",
    "harbor",
    "meadow",
    "silver",
    "thunder",
]


def words(rng: random.Random, tokens: int) -> str:
    """Text of about that many tokens of the demo model (2.2 a word)."""
    return " ".join(rng.choice(WORDS) for _ in range(round(tokens / 2.2)))


def timed(socket: AgentSocket, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """(seconds to the first output item, the final response)."""
    began, first = time.perf_counter(), None
    event: dict[str, Any] = {}
    for event in socket.turn({"model": "demo", "max_output_tokens": 4, "temperature": 0, **body}):
        if first is None and event["type"] == "response.output_item.added":
            first = time.perf_counter() - began
    if first is None:
        raise SystemExit(f"the turn gave no token: {failure_of(event)}")
    return first, event["response"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096, help="tokens before the turn")
    parser.add_argument("--suffix", type=int, default=64, help="tokens of the turn itself")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 0], help="of the model, one run for each; 0 = all cores")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before each timed turn")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    arguments = parser.parse_args()
    for threads in arguments.threads:
        measure(arguments, threads)


def measure(arguments: argparse.Namespace, threads: int) -> None:
    rng = random.Random(1)
    ratios, restored_s, cold_s, reused, prompt = [], [], [], [], []
    with (
        tempfile.TemporaryDirectory() as scratch,
        private_server(Path(scratch), flags=("--threads", str(threads))) as server,
    ):
        server.start()
        with AgentSocket(server.target) as socket:
            for pair in range(arguments.pairs + 1):
                history = [{"role": "user", "content": f"{pair} {rng.random()} " + words(rng, arguments.context)}]
                question = [{"role": "user", "content": words(rng, arguments.suffix)}]
                parent = list(socket.turn({"model": "demo", "input": history, "generate": False}))[-1]["response"]
                time.sleep(arguments.pause)
                warm, response = timed(socket, {"input": question, "previous_response_id": parent["id"]})
                renamed = [{"role": "user", "content": f"{rng.random()} {history[0]['content']}"}]
                time.sleep(arguments.pause)
                cold, other = timed(socket, {"input": renamed + question})
                if pair == 0:
                    continue  # warm-up
                if other["usage"]["input_tokens_details"]["cached_tokens"] > 64:
                    raise SystemExit("the cold turn was not cold")
                ratios.append(warm / cold)
                restored_s.append(warm)
                cold_s.append(cold)
                prompt.append(response["usage"]["input_tokens"])
                reused.append(response["usage"]["input_tokens_details"]["cached_tokens"])
    report(
        "restored_ttft",
        "demo",
        {
            "context_tokens": arguments.context,
            "suffix_tokens": arguments.suffix,
            "pause_s": arguments.pause,
            "threads": threads,
        },
        {
            "ratio": spread(ratios),
            "restored_s": spread(restored_s),
            "cold_s": spread(cold_s),
            "prompt_tokens": spread(prompt),
            "reused_tokens": spread(reused),
        },
        arguments.record,
    )


if __name__ == "__main__":
    main()
