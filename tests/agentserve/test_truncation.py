"""`truncation: "auto"`: as few of the oldest exchanges are left out as it takes, each whole."""

from __future__ import annotations

import httpx
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from agentserve.protocol.items import FunctionCall, FunctionCallOutput, Item
from agentserve.truncation import exchanges, fewest_dropped, without_oldest
from tests.agentserve.test_websocket import AUTH
from tests.agentserve.text.play import answer, call, output, system, user
from tests.fakes.server import running
from tests.fakes.worker import HELLO

EXCHANGE = st.sampled_from([[user("q"), answer("a")], [user("q"), call("c", "f", "{}"), output("c", "r"), answer("a")]])


@given(st.lists(EXCHANGE, min_size=1, max_size=8), st.integers(0, 2), st.integers(0, 40))
async def test_the_fewest_are_dropped_and_no_call_is_parted_from_its_result(
    parts: list[list[Item]], head: int, room: int
) -> None:
    items = [*[system("s")] * head, *(item for part in parts for item in part)]
    starts = exchanges(items)

    async def fits(dropped: int) -> int | None:
        return dropped if len(without_oldest(items, starts, dropped)) <= room else None

    dropped = await fewest_dropped(len(starts), fits)
    left = [n for n in range(1, len(parts)) if head + sum(map(len, parts[n:])) <= room]
    assert dropped == (left[0] if left else None)
    for n in range(len(parts)):
        kept = without_oldest(items, starts, n)
        assert list(kept) == [*[system("s")] * head, *(item for part in parts[n:] for item in part)]
        calls = [type(i) for i in kept if isinstance(i, FunctionCall | FunctionCallOutput)]
        assert calls == [FunctionCall, FunctionCallOutput] * (len(calls) // 2)


def test_a_context_that_is_too_long_goes_on_with_its_newest_part() -> None:
    items = [{"role": "system", "content": "rules"}]
    for n in range(20):
        items += [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n}"}]
    items.append({"role": "user", "content": "last"})
    with running() as server, httpx.Client(base_url=server.url, headers=AUTH) as client:
        server.worker.hello = msgspec.structs.replace(HELLO, max_context=120)
        whole = client.post("/v1/responses", json={"input": items}).json()
        assert (whole["truncation"], len(server.text.renders[-1].items)) == ("disabled", 42)
        cut = client.post("/v1/responses", json={"input": items, "truncation": "auto", "max_output_tokens": 10}).json()
        assert (cut["truncation"], cut["status"]) == ("auto", "completed")
        assert 60 < cut["usage"]["input_tokens"] <= 110
        ids = "".join(map(chr, letters(server.worker.starts[-1].ids)))
        assert "rules" in ids
        assert "last" in ids
        assert "question 19" in ids
        assert "question 0" not in ids
        listed = client.get(f"/v1/responses/{cut['id']}/input_items?limit=100").json()["data"]
        assert len(listed) == 42, "what was sent is kept as it was sent"
        counted = client.post(
            "/v1/responses/input_tokens", json={"input": items, "truncation": "auto", "max_output_tokens": 10}
        )
        assert counted.json()["input_tokens"] == cut["usage"]["input_tokens"]


def letters(data: bytes) -> list[int]:
    """Little-endian uint32, without the control tokens above Unicode."""
    ids = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    return [i for i in ids if i < 0x110000]
