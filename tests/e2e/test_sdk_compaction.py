"""`context_management` by the unmodified OpenAI SDK: a long conversation is summed up within a turn and goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentserve.cli.private_server import PrivateServer
from tests.e2e.test_other_apis import session_that_ends_with

pytestmark = pytest.mark.clients

MANAGED: Any = [{"type": "compaction", "compact_threshold": 400}]
NOTES = "The deploy script is deploy.sh. " * 60


@pytest.fixture
def client(server: PrivateServer) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=server.target.url + "/v1", api_key=server.target.token, max_retries=0) as one:
        yield one


def long_context(client: Any, key: str) -> Any:
    """A first turn whose answered part is long; the server has its state."""
    items = [
        {"role": "user", "content": "What is in the notes?"},
        {"role": "assistant", "content": NOTES},
        {"role": "user", "content": "Thank you."},
    ]
    first = client.responses.create(model="demo", input=items, temperature=0, prompt_cache_key=key)
    assert first.usage.input_tokens > 400
    return first


def cached(response: Any) -> int:
    return response.usage.input_tokens_details.cached_tokens


def test_a_chain_of_responses_goes_on_from_its_compaction(server: PrivateServer, client: Any) -> None:
    first = long_context(client, "compaction chain")
    asked = {"model": "demo", "temperature": 0, "context_management": MANAGED}
    reports: list[dict[str, Any]] = []
    with client.responses.stream(
        **asked, input="Hello!", previous_response_id=first.id, extra_body={"agentserve": {"events": True}}
    ) as stream:
        for event in stream:
            if event.type == "agentserve.cache.report":
                reports.append(event.to_dict())
        second = stream.get_final_response()
    assert second.output[0].type == "compaction"
    assert second.output_text
    assert second.usage.input_tokens < first.usage.input_tokens
    summing, going_on = reports
    # The question stands behind the context as it was, of which the template drops the thinking: all before that was restored.
    assert summing["prompt_tokens"] > first.usage.total_tokens
    assert summing["reused_tokens"] >= first.usage.input_tokens
    assert going_on["prompt_tokens"] == second.usage.input_tokens
    third = client.responses.create(**asked, input="And now?", previous_response_id=second.id)
    assert "compaction" not in [item.type for item in third.output]
    assert third.usage.input_tokens < 400
    assert cached(third) >= second.usage.input_tokens, "it starts from the compacted context"
    session = session_that_ends_with(server, third.id)
    assert session["lineage"] == [first.id, second.id, third.id]


@pytest.mark.parametrize("pruned", [False, True])
def test_a_client_that_keeps_its_own_items_goes_on_from_the_compaction(client: Any, pruned: bool) -> None:
    key = f"compaction by items {pruned}"
    asked = {"model": "demo", "temperature": 0, "context_management": MANAGED, "store": False, "prompt_cache_key": key}
    items: list[Any] = [
        {"role": "user", "content": "What is in the notes?"},
        {"role": "assistant", "content": NOTES},
        {"role": "user", "content": "Hello!"},
    ]
    first = client.responses.create(**asked, input=items)
    assert first.output[0].type == "compaction"
    items = [*([] if pruned else items), *[item.to_dict() for item in first.output], {"role": "user", "content": "And now?"}]
    second = client.responses.create(**asked, input=items)
    assert "compaction" not in [item.type for item in second.output]
    assert cached(second) >= first.usage.input_tokens


def test_a_socket_s_accumulator_shows_the_compaction(client: Any) -> None:
    from openai.lib.responses_websocket import ResponsesWebSocketAccumulator

    first = long_context(client, "compaction socket")
    accumulator = ResponsesWebSocketAccumulator()
    with client.responses.connect() as connection:
        connection.response.create(
            model="demo", input="Hello!", previous_response_id=first.id, context_management=MANAGED, temperature=0
        )
        while accumulator.snapshot().terminal_type is None:
            accumulator.add_event(connection.recv())
    final = accumulator.get_final_response()
    assert final.output[0].type == "compaction"
    assert [item.type for item in accumulator.snapshot().output] == [item.type for item in final.output]
