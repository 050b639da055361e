"""Hostile clients of the load lab do what they say, are contained, and others are served meanwhile; tiny sizes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from benchmarks.load.client import Socket
from benchmarks.load.hostile import Sizes, added, attack
from tests.fakes.server import config_for_tests, running
from tests.fakes.worker import answer

SIZES = Sizes(idle=5, slow=2, deaf=1, frame_bytes=1 << 20, deep_bytes=4000, pause_s=0.0, deaf_tokens=10)


def rounds(number: int) -> Callable[[], bool]:
    left = iter(range(number))
    return lambda: next(left, None) is not None


def test_each_attack_is_made_and_contained_while_others_are_served() -> None:
    config = config_for_tests(server={"auth": "none"}, limits={"frame_bytes": SIZES.frame_bytes})
    with running(config) as server:
        server.worker.default = answer("x" * 50)

        async def both() -> tuple[dict[str, int], bytes]:
            socket = await Socket.connect(server.port)
            socket.send(json.dumps({"type": "response.create", "input": "hi"}))
            outcomes = await attack(server.port, SIZES, rounds(3))
            while not (frame := await socket.receive()).startswith(b'{"type":"response.completed"'):
                pass
            socket.abort()
            return dict(outcomes), frame

        outcomes, last = asyncio.run(both())
    expected = {"oversized_closed_1009": 3, "deep_invalid_value": 3, "text_response.completed": 3, "wrong_invalid_value": 3}
    expected |= {"numbers_message_too_large": 3, "keys_invalid_value": 3}
    assert outcomes == {**expected, "idle_open": 5, "slow_open": 2}
    assert json.loads(last)["response"]["status"] == "completed"


def test_what_is_added_is_the_difference_at_each_quantile() -> None:
    figures = added([1.0] * 100, [1.0] * 90 + [61.0] * 10)
    assert figures["added_ms"] == {"p50": 0.0, "p95": 60.0, "p99": 60.0, "max": 60.0}
