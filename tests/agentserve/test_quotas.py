"""What one principal may use, and that others do not notice when it has."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from agentserve.config import LimitsConfig
from agentserve.errors import RateLimitExceeded
from agentserve.quotas import Quotas
from agentserve.worker.messages import Load
from tests.agentserve.test_websocket import AUTH, send, until_terminal
from tests.fakes.server import OTHER_TOKEN, FakeServer, config_for_tests, running, wait_for
from tests.fakes.worker import answer

OTHER = {"x-api-key": OTHER_TOKEN}


def turn(server: FakeServer, headers: dict[str, str], **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"input": "x", **body}, headers=headers)


@given(st.lists(st.floats(0, 20), max_size=80), st.integers(1, 7))
@example([16.63145525335817, 1.0347081663748554, 0.05, 0.0, 0.0], 1)
def test_a_minute_never_has_more_turns_than_twice_the_rate(gaps: list[float], rate: int) -> None:
    """A full bucket and what flows in during the minute; and whoever waits as long as it was told is let in."""
    now, begun = 0.0, []
    quotas = Quotas(LimitsConfig(turns_per_minute=rate), lambda: now)
    for gap in gaps:
        now += gap
        try:
            quotas.begin("p")
        except RateLimitExceeded as refused:
            now += refused.retry_after_s
            quotas.begin("p")
        begun.append(now)
        assert sum(at > now - 60 for at in begun) <= 2 * rate


def test_a_rate_is_refused_with_a_time_to_retry_and_told_before() -> None:
    with running(config_for_tests(limits={"turns_per_minute": 2})) as server:
        first = turn(server, AUTH)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert turn(server, AUTH, stream=True).headers["x-ratelimit-remaining-requests"] == "0"
        refused = turn(server, AUTH)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        messages = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        other_api = httpx.post(f"{server.url}/v1/messages", json=messages, headers=AUTH)
        assert (other_api.status_code, other_api.json()["error"]["type"]) == (429, "rate_limit_error")
        with connect(server.ws_url, additional_headers=AUTH) as socket:
            send(socket, input="x")
            event = until_terminal(socket)[-1]
            assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "try again in" in event["error"]["message"]
        assert turn(server, OTHER).status_code == 200


def test_turns_at_once_are_counted_by_every_way_and_given_back() -> None:
    with running(config_for_tests(limits={"turns_per_principal": 2})) as server, ThreadPoolExecutor() as threads:
        gate = asyncio.Event()
        for _ in range(2):
            server.worker.scripts.append(lambda start: [gate, *answer("abc")(start)])
        with connect(server.ws_url, additional_headers=AUTH) as socket:
            send(socket, input="a")
            over_http = threads.submit(turn, server, AUTH)
            wait_for(lambda: len(server.services.active) == 2)
            refused = turn(server, AUTH, stream=True)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert turn(server, OTHER).status_code == 200
            server.call(gate.set)
            assert over_http.result(60).status_code == 200
            until_terminal(socket)
        for body in ({"previous_response_id": "resp_0"}, {"model": "nobody"}):
            for _ in range(3):
                assert turn(server, AUTH, **body).status_code in (400, 404)
        wait_for(lambda: not server.services.quotas._turns)
        assert turn(server, AUTH).status_code == 200


def test_what_is_stored_is_bounded() -> None:
    with running(config_for_tests(limits={"stored_bytes_per_principal": 1})) as server:
        first = turn(server, AUTH).json()
        refused = turn(server, AUTH)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_quota")
        assert httpx.post(f"{server.url}/v1/conversations", json={}, headers=AUTH).status_code == 403
        assert turn(server, AUTH, store=False).status_code == 200
        assert turn(server, OTHER).status_code == 200
        httpx.delete(f"{server.url}/v1/responses/{first['id']}", headers=AUTH)
        assert turn(server, AUTH).status_code == 200


def test_a_server_that_restarts_takes_no_more_sockets() -> None:
    with running() as server:
        server.call(server.api.sockets.drain)
        wait_for(lambda: server.api.sockets.draining)
        with pytest.raises(InvalidStatus) as refused:
            connect(server.ws_url, additional_headers=AUTH)
        response = refused.value.response
        assert (response.status_code, response.headers["retry-after"]) == (429, "5")
        assert json.loads(response.body or b"")["error"]["code"] == "rate_limit_exceeded"


def test_a_refused_turn_is_told_to_wait_for_about_half_of_what_waits() -> None:
    quotas = Quotas(LimitsConfig(turns_per_principal=1))
    quotas.begin("p")
    for load, told in ((None, 5), (busy(0), 1), (busy(20_000), 10), (busy(10_000_000), 60)):
        with pytest.raises(RateLimitExceeded, match="1 turns run or wait") as refused:
            quotas.begin("p", load)
        assert refused.value.retry_after_s == told
    quotas.begin("other", busy(20_000))


def busy(waiting_tokens: int) -> Load:
    """A worker with so many prompt tokens waiting, at a thousand a second."""
    return Load(
        running=1,
        waiting=1,
        waiting_prefill_tokens=waiting_tokens,
        prefill_tokens_per_s=1000.0,
        decode_tokens_per_s=50.0,
        restore_bytes_per_s=1e9,
        free_pages=1,
        total_pages=1,
        cache_bytes={},
        cache_checkpoints={},
        counters={},
    )
