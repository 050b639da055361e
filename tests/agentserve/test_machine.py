"""The sans-I/O protocol machine: nothing leads to a second terminal event, a gap, or two turns at once in a lane."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import UNSET

from agentserve.audience import on_lane
from agentserve.errors import IllegalEvent, InvalidStreamId, RateLimitExceeded, StreamLimitReached, TurnFailure
from agentserve.events import ResponseEvents
from agentserve.interfaces import CallClose, CallDelta, CallOpen, ReasoningDelta, StoredResponse, TextDelta
from agentserve.protocol.codec import encode
from agentserve.protocol.machine import TERMINAL, Lanes, ResponseOrder, stream_id_of
from agentserve.protocol.responses import ResponseBody, usage
from agentserve.protocol.server_events import Event
from agentserve.replay import encode_cuts, history, stored_history
from tests.fakes.canonical import LETTERS, check

EVENTS = [
    *LETTERS,
    *(f"added:{k}" for k in ("reasoning", "message", "function_call", "custom_tool_call")),
    "agentserve.deadline",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_order_accepts_no_second_terminal_and_never_skips_a_number(events: list[str]) -> None:
    order, numbers, ended = ResponseOrder(), [], 0
    for event in events:
        before = (order.state, order.next_number)
        try:
            numbers.append(order.advance(event))
        except IllegalEvent:
            assert (order.state, order.next_number) == before
        else:
            ended += event in TERMINAL
    assert numbers == list(range(len(numbers)))
    assert ended <= 1
    assert order.ended == (ended == 1)


DELTAS = st.one_of(
    st.builds(ReasoningDelta, st.text(min_size=1, max_size=3)),
    st.builds(TextDelta, st.text(min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["f", "g"]), st.booleans(), st.lists(st.text(min_size=1, max_size=3), max_size=3)),
)


@given(st.lists(DELTAS, max_size=12), st.sampled_from(["completed", "max_output_tokens", "failed"]), st.booleans())
def test_any_deltas_give_one_whole_response_in_canonical_order(deltas: list[Any], end: str, lane: bool) -> None:
    sent: list[Event] = []
    name = "lane-1" if lane else UNSET
    events = ResponseEvents(ResponseBody(id="resp_1", created_at=1, status="in_progress", model="m"), sent.append, name)
    events.created()
    events.queued()
    events.in_progress()
    for delta in deltas:
        if isinstance(delta, tuple):
            events.write(CallOpen(delta[0], delta[1]))
            for part in delta[2]:
                events.write(CallDelta(part))
            events.write(CallClose())
        else:
            events.write(delta)
        events.deadline(deadline_ms=1, predicted_ttft_ms=None, elapsed_ms=1, status="met")
        assert history(events.begun, events.written, events.cuts, name) == sent, "a running response is told again as it was"
    if end == "failed":
        events.failed(TurnFailure("server_error", "it broke"))
    else:
        use = usage(prompt=3, cached=1, written=2, output=len(deltas), reasoning=0)
        events.finished(usage=use, incomplete=None if end == "completed" else end, now=2)
        events.end()
    final = check([json.loads(encode(e)) for e in sent], "lane-1" if lane else None)
    assert final["status"] == {"max_output_tokens": "incomplete"}.get(end, end)
    row = StoredResponse(
        id="resp_1",
        principal="p",
        session="s",
        parent=None,
        model="m",
        status=final["status"],
        created_at=1.0,
        completed_at=2.0,
        instructions=None,
        tools=b"[]",
        input=(),
        output=events.output,
        body=encode(events.body),
        prompt_ids=b"",
        generated_ids=b"",
        stream=encode_cuts(events.cuts),
    )
    assert [on_lane(e, name) for e in stored_history(row)[1]] == sent, "and a stored one, after a restart too"
    with pytest.raises(IllegalEvent):
        events.in_progress()


class LanesMachine(RuleBasedStateMachine):
    """Lanes against a plain model: a dict of queues."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: Lanes[int] = Lanes(max_lanes=3, max_waiting=4, max_waiting_bytes=100)
        self.model: dict[Any, deque[int]] = {UNSET: deque()}
        self.sizes: dict[int, int] = {}
        self.next_turn = 0
        self.closed = False

    @rule(lane=st.sampled_from([UNSET, "a", "b", "c", "d"]), size=st.integers(0, 110))
    def submit(self, lane: Any, size: int) -> None:
        turn = self.next_turn
        if self.closed:
            assert not self.lanes.submit(lane, turn, size)
            return
        waiting = [t for q in self.model.values() for t in list(q)[1:]]
        room = len(waiting) < 4 and sum(self.sizes[t] for t in waiting) + size <= 100
        try:
            started = self.lanes.submit(lane, turn, size)
        except StreamLimitReached:
            assert lane not in self.model
            assert len(self.model) == 4
        except RateLimitExceeded:
            assert not room
            assert self.model[lane]
        else:
            queue = self.model.setdefault(lane, deque())
            assert started == (not queue)
            assert started or room
            queue.append(turn)
            self.sizes[turn] = size
            self.next_turn += 1

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([k for k, q in self.model.items() if q]))
        self.model[lane].popleft()
        following = self.lanes.finished(lane)
        assert following == (self.model[lane][0] if self.model[lane] else None)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([k for k, q in self.model.items() if q]))
        started = self.lanes.succeed(lane, self.next_turn)
        assert started == (not self.closed)
        if started:
            self.model[lane][0] = self.next_turn
            self.sizes[self.next_turn] = 0
            self.next_turn += 1

    @rule()
    def close(self) -> None:
        self.lanes.close()
        self.closed = True
        for queue in self.model.values():
            while len(queue) > 1:
                queue.pop()

    @invariant()
    def active_turns_are_the_heads(self) -> None:
        assert set(self.lanes.all_active()) == {q[0] for q in self.model.values() if q}
        for lane, queue in self.model.items():
            assert self.lanes.active(lane) == (queue[0] if queue else None)
        assert self.lanes.waiting_bytes == sum(self.sizes[t] for q in self.model.values() for t in list(q)[1:])


LanesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLanes = LanesMachine.TestCase


@pytest.mark.parametrize("good", ["a", "A.b-c_9", "x" * 256])
def test_stream_ids_that_are_accepted(good: str) -> None:
    assert stream_id_of(good) == good


@pytest.mark.parametrize("bad", ["", "x" * 257, "a b", "ä", "a\n", 7, {}, ["a"], "١"])
def test_stream_ids_that_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidStreamId):
        stream_id_of(bad)
