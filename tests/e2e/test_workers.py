"""Two workers of the embedded model behind one live server, and two models: who gets which turn, what a lost worker costs."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentserve.cli.connect import AgentSocket, Event
from agentserve.cli.private_server import PrivateServer, private_server
from tests.e2e.conftest import DEMO_MODEL, FLAGS
from tests.e2e.test_survival import body, counter, last, wait_until

LABELS = ("demo/0", "demo/1")
LONG = "Count the words of this list. " + "one two three four five six seven eight nine ten " * 150


@contextlib.contextmanager
def two_workers(state_dir: Path) -> Iterator[PrivateServer]:
    with private_server(state_dir, flags=(*FLAGS, "--workers", "2")) as one:
        one.start()
        wait_until(lambda: all(figure(one, "ready", label) == 1 for label in LABELS))
        yield one


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    """For a test that ends its workers."""
    with two_workers(tmp_path / "state") as one:
        yield one


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateServer]:
    """Shared by tests that only play sessions."""
    with two_workers(tmp_path_factory.mktemp("calm")) as one:
        yield one


def spilled(server: PrivateServer) -> float:
    return counter(server.target, 'agentserve_turns_spilled{model="demo"}')


def figure(server: PrivateServer, name: str, label: str) -> float:
    return counter(server.target, f'agentserve_worker_{name}{{worker="{label}"}}')


def pids(server: PrivateServer) -> list[int]:
    return [int(figure(server, "pid", label)) for label in LABELS]


def checkpoints(server: PrivateServer, label: str) -> float:
    """Saved states in memory, 0 before the first report."""
    try:
        return counter(server.target, f'agentserve_checkpoints{{tier="ram",worker="{label}"}}')
    except StopIteration:
        return 0.0


def asked(server: PrivateServer, label: str) -> float:
    """Turns that looked for a saved state so far, 0 before the first report."""
    names = [f'agentserve_worker_counter{{name="{name}",worker="{label}"}}' for name in ("cache_matches", "cache_misses")]
    try:
        return sum(counter(server.target, name) for name in names)
    except StopIteration:
        return 0.0


def assert_all_idle(server: PrivateServer) -> None:
    for name in ("turns", "pins"):
        for label in LABELS:
            series = f'agentserve_worker_counter{{name="{name}",worker="{label}"}}'
            wait_until(lambda at=series: counter(server.target, at) == 0)


def of_session(key: str, text: str, previous: str | None = None, **more: Any) -> dict[str, Any]:
    return body(text, previous, prompt_cache_key=key, **more)


def report(events: list[Event]) -> Event:
    return next(event for event in reversed(events) if event["type"] == "agentserve.cache.report")


def play(server: PrivateServer, key: str, turns: int, seed: int = 0) -> list[dict[str, Any]]:
    """A session of so many turns on a socket of its own; each response, with how much of its prompt was restored."""
    done: list[dict[str, Any]] = []
    with AgentSocket(server.target) as agent:
        for number in range(turns):
            previous = done[-1]["id"] if done else None
            events = list(agent.turn(of_session(key, f"{key}: what is {seed + number} * 17?", previous, temperature=0)))
            done.append({**last(events), "reused": report(events)["reused_tokens"]})
    return done


def test_sessions_stay_with_the_worker_that_has_their_state(calm: PrivateServer) -> None:
    server, spilled_before = calm, spilled(calm)
    known = {session["id"] for session in server.target.get("/v1/sessions")["data"]}
    state = server.target.readiness()
    assert [worker["status"] for worker in state["models"][0]["workers"]] == ["ready", "ready"]
    first, second = pids(server)
    assert first != second
    with ThreadPoolExecutor(4) as agents:
        sessions = list(agents.map(lambda n: play(server, f"agent-{n}", 4), range(6)))
    turns = left = 0
    for responses in sessions:
        assert all(one["status"] in ("completed", "incomplete") for one in responses)
        # Everything up to the last turn was restored: the turn went to the worker that ran the one before.
        for before, after in itertools.pairwise(responses):
            turns += 1
            left += after["reused"] < before["usage"]["input_tokens"]
    # But for those that were sent to the other one: a process that the machine holds up for long is slower than a cold one.
    assert left <= spilled(server) - spilled_before < turns / 2
    wait_until(lambda: all(checkpoints(server, label) > 0 for label in LABELS))
    listed = [session for session in server.target.get("/v1/sessions")["data"] if session["id"] not in known]
    assert len(listed) == 6
    for session in listed:
        assert server.target.get(f"/v1/sessions/{session['id']}/checkpoints")["data"]


def test_a_session_goes_to_the_other_worker_while_its_own_is_busy(calm: PrivateServer) -> None:
    """Eight prompts of thousands of tokens at once, all of one session: its worker computes some, the other the rest."""
    server, spilled_before = calm, spilled(calm)
    before = {label: asked(server, label) for label in LABELS}
    (begun,) = play(server, "agent", 1)

    def one(n: int) -> dict[str, Any]:
        with AgentSocket(server.target) as agent:
            turn = agent.turn(of_session("agent", f"List {n}. {LONG}", begun["id"], max_output_tokens=8 if n % 2 else 2000))
            if n % 2:
                return last(list(turn))
            next(turn)
            agent.cancel()  # it has to reach the worker that this turn went to
            return last(list(turn))

    with ThreadPoolExecutor(8) as agents:
        ends = list(agents.map(one, range(8)))
    assert all(end["status"] in ("completed", "incomplete") for end in ends[1::2])
    # One whose client was held up may have ended before it was cancelled.
    cancelled = [end["incomplete_details"] == {"reason": "cancelled"} for end in ends[::2]]
    assert any(cancelled)
    assert all(was or end["status"] == "completed" for was, end in zip(cancelled, ends[::2], strict=True))
    assert spilled(server) > spilled_before
    wait_until(lambda: all(asked(server, label) > before[label] for label in LABELS))
    assert_all_idle(server)


@pytest.mark.slow
def test_a_killed_worker_costs_its_own_turns_only_and_every_session_goes_on(server: PrivateServer) -> None:
    before = [play(server, f"agent-{n}", 2) for n in range(6)]
    killed = pids(server)[0]

    def one(n: int) -> list[str]:
        """Turns until the sixth is right; how each ended."""
        ends: list[str] = []
        previous = before[n][-1]["id"]
        with AgentSocket(server.target) as agent:
            while ends.count("ok") < 6:
                assert len(ends) < 12, ends
                number = len(ends)
                response = last(list(agent.turn(of_session(f"agent-{n}", f"what is {number} * 3?", previous))))
                if response["status"] == "failed":
                    assert response["error"]["code"] == "server_error"
                    assert "retry" in response["error"]["message"]
                    ends.append("failed")
                    continue
                ends.append("ok")
                previous = response["id"]
                if n == 0 and number == 1:
                    os.kill(killed, signal.SIGKILL)
        return ends

    with ThreadPoolExecutor(6) as agents:
        ends = list(agents.map(one, range(6)))
    assert all(end.count("failed") <= 1 for end in ends), ends
    assert killed not in pids(server)
    wait_until(lambda: all(figure(server, "ready", label) == 1 for label in LABELS))
    assert [figure(server, "restarts", label) for label in LABELS] == [1, 0]
    # What was committed before is whole, and goes on.
    for n in range(6):
        (again,) = [play_on(server, f"agent-{n}", before[n][-1]["id"])]
        assert again["status"] in ("completed", "incomplete")
    assert_all_idle(server)


def play_on(server: PrivateServer, key: str, previous: str) -> dict[str, Any]:
    with AgentSocket(server.target) as agent:
        return last(list(agent.turn(of_session(key, "and then?", previous))))


@pytest.mark.slow
def test_a_worker_told_to_end_takes_no_turn_with_it_and_finds_its_states_again(server: PrivateServer) -> None:
    sessions = [f"agent-{n}" for n in range(4)]
    before = {key: play(server, key, 1)[-1] for key in sessions}
    wait_until(lambda: all(checkpoints(server, label) > 0 for label in LABELS))
    for label, pid in zip(LABELS, pids(server), strict=True):
        os.kill(pid, signal.SIGTERM)
        with ThreadPoolExecutor(4) as agents:
            after = list(agents.map(lambda key, old: play_on(server, key, old["id"]), sessions, before.values()))
        assert all(one["status"] in ("completed", "incomplete") for one in after)
        wait_until(lambda at=label: figure(server, "restarts", at) == 1 and figure(server, "ready", at) == 1)
        before = dict(zip(sessions, after, strict=True))


@pytest.mark.slow
def test_states_on_disk_are_found_by_the_worker_that_wrote_them(tmp_path: Path) -> None:
    flags = (*FLAGS, "--workers", "2")
    with private_server(tmp_path / "state", flags=flags) as server:
        server.start()
        before = {f"agent-{n}": play(server, f"agent-{n}", 3)[-1] for n in range(4)}
        server.stop()
        folders = [path.name for path in (tmp_path / "state" / "checkpoints").iterdir()]
        assert sorted(len(name) for name in folders) == [32, 34], folders
        server.start()
        wait_until(lambda: all(figure(server, "ready", label) == 1 for label in LABELS))
        for key, response in before.items():
            with AgentSocket(server.target) as agent:
                events = list(agent.turn(of_session(key, "go on", response["id"])))
            found = report(events)
            assert found["reused_tokens"] >= response["usage"]["input_tokens"], found


@pytest.mark.slow
def test_several_models_are_listed_chosen_by_name_and_named_in_the_error(
    tmp_path: Path, start_server: Callable[..., PrivateServer]
) -> None:
    names = ("--model", str(DEMO_MODEL), "--model-name", "first", "--model", str(DEMO_MODEL), "--model-name", "second")
    server = start_server(*names)
    listed = server.target.get("/v1/models")["data"]
    assert [model["id"] for model in listed] == ["first", "second"]
    assert all(model["context_length"] for model in listed)
    with AgentSocket(server.target) as agent:
        told = [last(list(agent.turn(body("hello", model=name)))) for name in ("second", "first")]
        assert [response["model"] for response in told] == ["second", "first"]
        (refused,) = agent.turn(body("hello", model="third"))
        assert refused["error"]["code"] == "model_not_found"
        assert "first, second" in refused["error"]["message"]
        # A session may go from one model to the other.
        crossed = last(list(agent.turn(body("go on", told[0]["id"], model="first"))))
        assert (crossed["status"] in ("completed", "incomplete"), crossed["model"]) == (True, "first")
    with urllib.request.urlopen(server.target.url + "/readyz") as reply:
        assert reply.status == 200
    assert [model["model"] for model in server.target.readiness()["models"]] == ["first", "second"]
