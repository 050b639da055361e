"""Every kind of failure while eight agents run on real sockets: each gets its right answer after all, and clear errors before;
turns that were committed stay as they were told, and nothing is left over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.load import crash
from benchmarks.load.survivors import Answered, Survivor

TOLD = {
    "worker_killed": "server_error the worker stopped while the turn ran",
    "engine_raises": "server_error the forward pass failed",
    "nan_logits": "server_error NaN or infinity in the logits",
    "stuck_step": "server_error the worker stopped while the turn ran",
    "upgrade": "closed 1012",
    "drained": "closed 1012",
    "server_killed": "closed 1006",
    "database": "server_error the session database",
    "disk_full": "server_error the session database did not take this turn (OperationalError: database or disk is full)",
}
"""What at least one agent hears, beginning with its code."""


def survived(kinds: Sequence[str], backend: str = "cpu") -> dict[str, Any]:
    """Play them; answers, stored turns and what is left over are checked by the lab."""
    found = crash.run(kinds, backend)
    for name, line in found.items():
        if "skipped" in line:
            pytest.skip(line["skipped"])
        assert any(text.startswith(TOLD[name]) for text in line["told"]), (name, line)
        assert line["asked_again"] > 0
    return found


def test_failures_of_worker_and_engine_cost_eight_agents_a_retry_and_nothing_else() -> None:
    survived(["worker_killed", "engine_raises", "nan_logits"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_stuck_step_is_ended_by_the_watchdog() -> None:
    survived(["stuck_step"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_agents_resume_on_the_next_server_after_an_upgrade_a_drain_and_a_kill() -> None:
    found = survived(["upgrade", "drained", "server_killed"])
    assert found["server_killed"]["background"] == "failed"
    assert found["drained"]["outage_s"] >= crash.DRAIN_S, "turns got the time that a drain gives"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_restored_state_gives_bit_for_bit_the_answers_of_a_calm_run() -> None:
    survived(["worker_killed", "server_killed"], "exact")


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(1800)
def test_a_database_that_is_lost_fails_turns_until_it_is_back() -> None:
    survived(["database"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_full_disk_fails_turns_until_there_is_room_again() -> None:
    survived(["disk_full"])


# ── the lab's own eyes ───────────────────────────────────────────────────────────────────────────────────────────


class Target:
    """Has the stored turns of a play."""

    def __init__(self, turns: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> None:
        self.turns, self.rows = turns, rows

    def get(self, path: str) -> Any:
        return {"data": self.rows} if path.startswith("/v1/sessions") else self.turns[path.rpartition("/")[2]]


def made(text: str = "yes") -> crash.Play:
    """A play of one agent whose turns all say `text`."""
    agent = Survivor(0, 0, "test")
    for turn in range(4):
        response = {"id": f"resp_{turn}", "status": "completed"}
        agent.answered.append(Answered("completed", [("message", text)], response, 1.0, 1))
    names = [turn.response["id"] for turn in agent.answered]
    server = crash.CrashServer.__new__(crash.CrashServer)
    row = {"last_response": names[-1], "turns": 4, "lineage": names}
    server.target = Target({turn.response["id"]: turn.response for turn in agent.answered}, [row])  # type: ignore[assignment]
    return crash.Play(server, [agent])


def test_a_wrong_answer_a_changed_turn_and_one_too_many_are_seen() -> None:
    crash.check(made(), made())
    with pytest.raises(AssertionError, match="an answer differs"):
        crash.check(made("no"), made())
    changed, doubled = made(), made()
    target: Any = changed.server.target
    target.turns["resp_2"] = {**target.turns["resp_2"], "status": "failed"}
    with pytest.raises(AssertionError, match="not stored as told"):
        crash.check(changed, made())
    target = doubled.server.target
    target.rows[0]["turns"] = 5
    with pytest.raises(AssertionError, match="5 turns are stored, 4 were answered"):
        crash.check(doubled, made())
