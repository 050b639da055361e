"""One socket under any sequence of frames: whole responses in order, nothing behind a terminal event, nothing left over.

The connection runs on a loop of the test, without sockets or threads, so that what hypothesis finds can be played again.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from concurrent.futures import Executor, Future
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from agentserve.connection import Connection, Sockets
from agentserve.security import principal_named
from agentserve.served import Served
from agentserve.services import Services
from agentserve.worker.messages import StartTurn
from tests.budget import examples
from tests.fakes.canonical import check
from tests.fakes.server import config_for_tests
from tests.fakes.store import FakeStore
from tests.fakes.text import FakeText, call, ids_of, think
from tests.fakes.worker import FakeWorker, answer, failing

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
LANES = st.sampled_from([None, "a", "b"])
PICK = st.integers(0, 50)
SCRIPTS = [
    answer("ok"),
    answer((*think("hm"), *ids_of("so"))),
    answer((*think("hm"), *call("f", "{}"))),
    answer("cut", reason="length"),
    failing("server_error", "broke"),
]


class Inline(Executor):
    """Does the work at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class SocketMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.worker, self.store = FakeWorker(), FakeStore()
        self.worker.default = self.script
        config = config_for_tests(limits={"lanes": 3, "waiting_turns": 3})
        self.services = Services(config, (Served(config.model.name, FakeText(), self.worker),), self.store, Inline())
        self.frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.gates: dict[str, list[asyncio.Event]] = {}
        self.next_script = 0
        self.known: list[str] = []
        self.lanes: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
        self.asked: dict[str | None, int] = defaultdict(int)
        self.sent: list[dict[str, Any]] = []
        self.closed = False
        scope = {"headers": [], "extensions": {}, "state": {}}
        self.connection = Connection(scope, self.frames.get, self.take, self.services, principal_named("default"))
        self.sockets = Sockets(self.services)
        self.sockets._open.add(self.connection)
        self.task = self.loop.create_task(self.connection.serve())
        self.put(type="websocket.connect")

    def script(self, start: StartTurn) -> list[Any]:
        gates = self.gates[start.turn_id] = [asyncio.Event(), asyncio.Event()]
        steps = SCRIPTS[self.next_script % len(SCRIPTS)](start)
        self.next_script += 1
        middle = len(steps) // 2
        return [gates[0], *steps[:middle], gates[1], *steps[middle:]]

    # ── the socket ───────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, **message: Any) -> None:
        self.frames.put_nowait(message)

        async def settle() -> None:
            for _ in range(150):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())
        sent, self.sent = self.sent, []
        for one in sent:
            self.look(one)

    def send(self, **frame: Any) -> None:
        self.put(type="websocket.receive", text=json.dumps({k: v for k, v in frame.items() if v is not None}))

    async def take(self, message: dict[str, Any]) -> None:
        """Looked at later: what is raised here would only end the connection's writer."""
        self.sent.append(message)

    def look(self, message: dict[str, Any]) -> None:
        if message["type"] == "websocket.close":
            self.closed = True
        if message["type"] != "websocket.send":
            return
        assert not self.closed, "an event behind the close frame"
        event = json.loads(message["text"])
        if event["type"] == "error":
            assert event["error"]["code"] != "server_error", "no frame of a client is our own fault"
            return
        if event["type"].startswith("response.steer."):
            return
        lane = event.get("stream_id")
        told = self.lanes[lane]
        if not told:
            assert event["sequence_number"] == self.asked[lane]
        else:
            assert event["sequence_number"] == told[-1]["sequence_number"] + 1
        told.append(event)
        if event["type"] in TERMINAL:
            if told[0]["sequence_number"] == 0:
                self.known.append(check(told, lane)["id"])
            told.clear()

    def pick(self, number: int) -> str:
        known = [*self.services.active, *self.known[-3:], "resp_0"]
        return known[number % len(known)]

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(lane=LANES, parent=PICK, key=st.sampled_from([None, None, "k"]), store=st.booleans(), prewarm=st.booleans())
    def create(self, lane: str | None, parent: int, key: str | None, store: bool, prewarm: bool) -> None:
        self.send(
            type="response.create",
            stream_id=lane,
            input="x",
            tools=[{"type": "function", "name": "f"}],
            store=store,
            generate=False if prewarm and parent % 5 == 0 else None,
            previous_response_id=self.pick(parent) if parent % 2 else None,
            metadata=None if key is None else {"idempotency_key": key},
        )

    @rule(lane=LANES, whom=st.none() | PICK)
    def cancel(self, lane: str | None, whom: int | None) -> None:
        response_id = None if whom is None else self.pick(whom)
        self.send(type="response.cancel", stream_id=lane, response_id=response_id)

    @rule(whom=PICK, given=st.sampled_from(["stop", "", [{"role": "user", "content": "x"}], 5]))
    def steer(self, whom: int, given: Any) -> None:
        self.send(type="response.steer", previous_response_id=self.pick(whom), input=given)

    @precondition(lambda self: self.connection._lanes.active("w") is None)
    @rule(whom=PICK, after=st.integers(-1, 9))
    def follow(self, whom: int, after: int) -> None:
        """On a lane of its own, so that it is known which number comes first."""
        self.lanes["w"].clear()  # one that ended without a terminal event had its last event before
        self.asked["w"] = after + 1
        self.send(type="agentserve.follow", stream_id="w", response_id=self.pick(whom), starting_after=after)

    @rule(text=st.sampled_from(["", "{", "[]", '{"type": "x"}', '{"type": "response.create", "stream_id": "a b"}']))
    def nonsense(self, text: str) -> None:
        self.put(type="websocket.receive", text=text)

    @precondition(lambda self: any(not g.is_set() for gates in self.gates.values() for g in gates))
    @rule(number=PICK)
    def go_on(self, number: int) -> None:
        waiting = [gate for gates in self.gates.values() for gate in gates if not gate.is_set()]
        waiting[number % len(waiting)].set()
        self.put(type="websocket.receive", bytes=b"")

    @rule(chance=st.integers(0, 20))
    def drain(self, chance: int) -> None:
        if chance == 0:
            self.loop.call_soon(self.sockets.drain)
            self.put(type="websocket.receive", bytes=b"")

    def teardown(self) -> None:
        for _ in range(12):  # successors and turns that wait begin only now
            for gates in self.gates.values():
                for gate in gates:
                    gate.set()
            self.put(type="websocket.receive", bytes=b"")
        if not self.closed:
            assert not any(self.lanes.values()), "a response without its terminal event"
        self.put(type="websocket.disconnect", code=1000)
        self.loop.run_until_complete(asyncio.wait_for(self.task, 60))
        assert not self.services.active
        assert not self.services.quotas._turns
        assert not self.services.claims._claims
        left = [t for t in asyncio.all_tasks(self.loop) if t.get_name().startswith(("turn-", "socket-writer", "socket-resp"))]
        assert left == []
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


SocketMachine.TestCase.settings = settings(max_examples=examples(25, 40), stateful_step_count=30, deadline=None)
TestSocket = SocketMachine.TestCase
