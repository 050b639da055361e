"""Predicted and actual first tokens on a clock that the engine moves, and what a restart still knows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentserve.worker.forecast import Forecast, Learned, learned_file, load_learned, save_learned
from agentserve.worker.messages import TurnFinished
from agentserve.worker.requests import engine_request
from engine.types import EngineEvent, PrefillProgress, TokenEvent
from tests.worker.harness import Harness


class Timed(Harness):
    """A step takes 2 ms, 0.4 ms per prompt token, 3 ms per row that decodes; all rows run, prompts share the engine."""

    def __init__(self, **more: int) -> None:
        super().__init__(**more)
        self.loop.forecast = Forecast(self.engine.chunk)
        self._step, self._at = self.engine.step, {}
        self.engine.step = self.step  # pyright: ignore[reportAttributeAccessIssue]

    def step(self) -> Sequence[EngineEvent]:
        before = {turn: run.processed for turn, run in self.engine._runs.items()}
        events = self._step()
        seconds = 0.002
        for event in events:
            if isinstance(event, PrefillProgress):
                seconds += 0.0004 * (event.processed - before.get(event.request_id, 0))
            elif isinstance(event, TokenEvent) and event.index:
                seconds += 0.003
        self.clock_s += seconds
        return events

    def errors(self, turns: Sequence[str]) -> list[float]:
        found = []
        for turn in turns:
            end = self.end(turn)
            assert isinstance(end, TurnFinished)
            assert end.ttft_s is not None
            assert end.predicted_ttft_s is not None
            found.append(abs(end.predicted_ttft_s - end.ttft_s) / end.ttft_s)
        return sorted(found)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(14, 60) for _ in range(length)]


def test_turns_that_run_alone_are_predicted_within_a_few_percent() -> None:
    rng, h = random.Random(1), Timed(ram_bytes=0)
    turns = []
    for _ in range(90):
        turns.append(h.turn(prompt(rng, rng.choice((8, 40, 200, 900))), max_tokens=4))
        h.run()
    assert h.loop.forecast.turns == 90
    assert max(h.errors(turns[15:])) < 0.1
    assert h.loop.load().counters["forecast_error_permille"] < 100


def test_a_turn_that_waits_for_others_is_predicted_to_wait() -> None:
    rng, h = random.Random(2), Timed(ram_bytes=0, rows=1)
    for _ in range(30):
        h.turn(prompt(rng, rng.choice((8, 40, 200))), max_tokens=2)
        h.run()
    first = h.turn(prompt(rng, 600), max_tokens=2)
    h.loop.step()
    second = h.turn(prompt(rng, 700), max_tokens=2)
    short = h.turn(prompt(rng, 8), max_tokens=2, session="other")
    h.run()
    assert h.errors([first])[0] < 0.15
    assert h.matched(second).predicted_ttft_s > 0.46, "the rest of the first, then its own"
    assert h.matched(short).predicted_ttft_s < 0.1, "it goes before both, which have time"


def test_a_turn_of_one_principal_is_not_predicted_to_wait_for_all_sessions_of_another() -> None:
    rng, h = random.Random(4), Timed(ram_bytes=0, rows=12)
    for _ in range(30):
        h.turn(prompt(rng, rng.choice((8, 40, 200))), max_tokens=2)
        h.run()
    many = [h.turn(prompt(rng, 200), max_tokens=1, session=f"s{i}", salt=b"many", deadline_s=600.0) for i in range(8)]
    one = h.turn(prompt(rng, 200), max_tokens=1, session="s", salt=b"one", deadline_s=600.0)
    last = h.turn(prompt(rng, 200), max_tokens=1, session="last", salt=b"many", deadline_s=600.0)
    assert h.matched(one).predicted_ttft_s < 0.4 * h.matched(last).predicted_ttft_s
    assert h.loop._turns[one].start.salt.hex() == engine_request(h.loop._turns[one], h.engine.info, None, ()).owner
    h.run()
    assert all(isinstance(h.end(turn), TurnFinished) for turn in (*many, one, last))


def test_what_a_restore_takes_is_learned_from_turns_that_nothing_ran_beside() -> None:
    """Of others, what they had before its first step would count as its restore, and so for each turn to come."""
    rng, h = random.Random(5), Timed(stays=False)
    ids = prompt(rng, 200)
    h.turn(ids, max_tokens=2)
    h.run()

    def restored(*, others: int) -> int:
        turn = h.turn([*ids, *prompt(rng, 8)], max_tokens=2)
        assert h.matched(turn).position > 100
        for _ in range(others):
            h.turn(prompt(rng, 8), max_tokens=2, session="other")
        h.clock_s += 0.2
        h.run()
        return h.loop.forecast.learned().load_ps_per_byte

    assert restored(others=1) == 0
    assert (alone := restored(others=0)) > 0
    assert restored(others=1) == alone


def test_a_new_process_begins_with_what_was_learned(tmp_path: Path) -> None:
    rng, h = random.Random(3), Timed(ram_bytes=0)
    for _ in range(25):
        h.turn(prompt(rng, rng.choice((8, 40, 200, 900))), max_tokens=4)
        h.run()
    path = learned_file(tmp_path, b"namespace", 2)
    save_learned(path, h.loop.forecast.learned())
    again = Timed(ram_bytes=0)
    again.loop.forecast = Forecast(16, load_learned(path))
    turn = again.turn(prompt(rng, 900), max_tokens=2)
    again.run()
    blind = Timed(ram_bytes=0)
    other = blind.turn(prompt(rng, 900), max_tokens=2)
    blind.run()
    assert again.errors([turn])[0] < 0.1 < blind.errors([other])[0]
    assert path != learned_file(tmp_path, b"other", 2) != learned_file(tmp_path, b"other", 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pace":[1,2]}', b'{"pace":[-1,0,0,0,0,0,0,0]}', b'{"pace":"x"}'])
def test_a_spoilt_file_is_a_blind_beginning_and_no_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pace.json"
    assert load_learned(path) is None
    path.write_bytes(content)
    assert load_learned(path) is None


def test_what_cannot_be_written_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "pace").write_text("a file where the folder should be")
    save_learned(learned_file(tmp_path, b"n", 1), Learned(pace=(0,) * 8))
