"""Too few pages or rows: requests wait, go to the host and come back, holds are reclaimed; tokens never change."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.engine import Engine
from engine.errors import ContextTooLong
from engine.types import CutReached
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import expected_tokens


def small(pages: int, **settings) -> Engine:
    return make_engine(**({"page_size": 4, "kv_tokens": 4 * pages, "chunk_tokens": 16, "snapshot_rows": 8} | settings))


def test_growth_sends_the_youngest_to_the_host_and_back_without_changing_a_token():
    engine = small(16)
    prompts = {str(i): prompt(i, 10 + i) for i in range(4)}
    for id, ids in prompts.items():
        engine.submit(request(id, ids, 30, hold_at_end=False))
    log = run(engine)
    assert engine.stats().preemptions > 0
    for id, ids in prompts.items():
        assert log.tokens[id] == expected_tokens(ids, 30)
    assert [f.request_id for f in log.finished.values()] == ["0", "1", "2", "3"], "the oldest is never sent away"
    release_all(engine)


def test_a_request_in_the_middle_of_its_prompt_can_be_sent_away():
    engine = small(20, chunk_tokens=4)
    engine.submit(request("old", prompt(1, 16), 50, hold_at_end=False))
    log = Log()
    while not log.tokens["old"]:
        log.add(engine.step())
    engine.submit(request("young", prompt(2, 56), 12, cuts=(50,), hold_at_end=False))
    while engine.stats().preemptions == 0:
        log.add(engine.step())
        engine.check()
    assert 0 < log.progress["young"][-1] < 56
    run(engine, log)
    assert log.tokens["old"] == expected_tokens(prompt(1, 16), 50)
    assert log.tokens["young"] == expected_tokens(prompt(2, 56), 12)
    assert log.progress["young"] == [*range(4, 57, 4)], "nothing is computed twice"
    assert log.hold_at("young", 50)


def test_a_large_request_whose_time_has_come_is_not_passed_by_small_ones_that_fit():
    engine = small(16)
    engine.submit(request("running", prompt(1, 30), 10, hold_at_end=False))
    log = Log()
    log.add(engine.step())
    engine.submit(request("large", prompt(2, 50), 1, due_us=0, hold_at_end=False))
    engine.submit(request("small", prompt(3, 2), 1, hold_at_end=False))
    while "running" not in log.finished:
        assert not log.progress["small"]
        log.add(engine.step())
    run(engine, log)
    assert log.tokens["large"] == expected_tokens(prompt(2, 50), 1)


def test_a_small_request_goes_before_a_large_one_that_has_time():
    engine = small(24)
    engine.submit(request("large", prompt(2, 60), 1, hold_at_end=False))
    log = Log()
    log.add(engine.step())
    engine.submit(request("small", prompt(3, 2), 1, hold_at_end=False))
    log.add(engine.step())
    assert "small" in log.finished
    assert log.progress["large"] == [16], "its next chunk waited"
    run(engine, log)
    assert log.tokens["large"] == expected_tokens(prompt(2, 60), 1)


def test_what_can_never_fit_is_refused_and_what_just_fits_runs():
    engine = small(8)
    with pytest.raises(ContextTooLong):
        engine.submit(request("a", prompt(1, 32)))
    engine.submit(request("b", prompt(1, 31), 9, hold_at_end=False))
    log = run(engine)
    assert (log.finished["b"].reason, log.tokens["b"]) == ("length", expected_tokens(prompt(1, 31), 1))


def test_two_wait_for_one_free_page_and_neither_takes_the_others():
    """A restored state is pinned at submit: another request cannot take its pages before it starts."""
    engine = small(12)
    base = prompt(1, 30)
    engine.submit(request("base", base, 0))
    log = run(engine)
    hold = log.hold_at("base", 30)
    engine.submit(request("filler", prompt(2, 12), 4, hold_at_end=False))
    log.add(engine.step())
    left, right = base + prompt(3, 6), base + prompt(4, 6)
    engine.submit(request("left", left, 4, restore=hold, hold_at_end=False))
    engine.submit(request("right", right, 4, restore=hold, hold_at_end=False))
    engine.release(hold)
    run(engine, log)
    assert log.tokens["left"] == expected_tokens(left, 4)
    assert log.tokens["right"] == expected_tokens(right, 4)
    assert log.progress["left"] == [32, 36], "restored, not computed again"
    release_all(engine)


def test_states_pinned_by_waiting_requests_make_room_for_a_running_one():
    engine = small(12, max_rows=1)
    base = prompt(1, 27)
    engine.submit(request("base", base, 0))
    log = run(engine)
    engine.submit(request("running", prompt(2, 8), 30, hold_at_end=False))
    log.add(engine.step())
    engine.submit(request("waiting", [*base, 5], 4, restore=log.hold_at("base", 27), hold_at_end=False))
    engine.release(log.hold_at("base", 27))
    run(engine, log)
    assert log.tokens["running"] == expected_tokens(prompt(2, 8), 30)
    assert log.tokens["waiting"] == expected_tokens([*base, 5], 4)
    assert log.progress["waiting"] == [28], "restored from the host, not computed again"
    release_all(engine)


def test_the_last_owner_of_a_partial_page_writes_in_place():
    """All pages are pinned by the one request that waits: a copy of the tail page would have nowhere to go."""
    engine = small(8)
    base = prompt(1, 29)
    engine.submit(request("a", base, 0))
    log = run(engine)
    hold = log.hold_at("a", 29)
    assert engine.stats().free_pages == 0
    engine.submit(request("b", [*base, 3], 2, restore=hold, hold_at_end=False))
    engine.release(hold)
    run(engine, log)
    assert log.tokens["b"] == expected_tokens([*base, 3], 2)
    release_all(engine)


def test_the_owner_of_holds_is_asked_before_anyone_is_sent_away():
    engine = small(12)
    asked: list[int] = []

    def reclaim(pages: int) -> int:
        asked.append(pages)
        oldest = next(iter(engine.store.holds), None)
        if oldest is None:
            return 0
        engine.release(oldest)
        return 1

    engine.set_reclaim(reclaim)
    log = Log()
    for i in range(6):
        engine.submit(request(str(i), prompt(i, 20), 15))
        run(engine, log)
        assert log.tokens[str(i)] == expected_tokens(prompt(i, 20), 15)
    assert asked
    assert min(asked) >= 1
    assert engine.stats().preemptions == 0
    release_all(engine)


def test_holds_that_nobody_releases_keep_a_request_waiting_until_somebody_does():
    engine = small(8)
    engine.submit(request("a", prompt(1, 20), 0))
    log = run(engine)
    engine.submit(request("b", prompt(2, 24), 4, hold_at_end=False))
    for _ in range(5):
        assert engine.step() == []
        engine.check()
    assert engine.has_work
    engine.release(log.hold_at("a", 20))
    run(engine, log)
    assert log.tokens["b"] == expected_tokens(prompt(2, 24), 4)


def test_holds_that_the_owner_refuses_to_release_end_the_request_with_a_reason():
    engine = small(8)
    engine.set_reclaim(lambda pages: 0)
    engine.submit(request("a", prompt(1, 20), 0))
    log = run(engine)
    engine.submit(request("b", prompt(2, 24), 4))
    engine.submit(request("c", prompt(3, 8), 2, hold_at_end=False))
    run(engine, log)
    assert log.finished["b"].reason == "error"
    assert "1 states are held" in (log.finished["b"].error or "")
    assert log.tokens["c"] == expected_tokens(prompt(3, 8), 2)
    release_all(engine)


def test_a_running_request_that_meets_a_hold_that_stays_waits_on_the_host():
    engine = small(8)
    engine.submit(request("a", prompt(1, 8), 30, cuts=(8,)))
    log = Log()
    log.add(engine.step())
    engine.submit(request("b", prompt(2, 8), 0))
    for _ in range(60):
        log.add(engine.step())
        engine.check()
    assert "a" not in log.finished
    for cuts in (log.cuts["b"], log.cuts["a"]):
        engine.release(cuts[0].hold)
    run(engine, log)
    assert log.finished["a"].reason == "length"
    full = log.tokens["a"]
    assert full == expected_tokens(prompt(1, 8), len(full))


def test_cuts_without_a_free_row_are_skipped_the_deepest_are_kept():
    engine = make_engine(max_rows=1, snapshot_rows=3)
    engine.submit(request("a", prompt(1, 60), 2, cuts=(10, 20, 30, 40, 60), hold_at_end=False))
    log = run(engine)
    assert [c.position for c in log.cuts["a"]] == [30, 40, 60]
    assert engine.stats().cuts_skipped == 2
    assert log.tokens["a"] == expected_tokens(prompt(1, 60), 2)
    release_all(engine)


def test_cuts_that_are_skipped_again_and_again_are_told_when_they_have_doubled(caplog):
    engine = make_engine(max_rows=1, snapshot_rows=3)
    for _ in range(1000):
        engine.scheduler.skip_cuts(1)
    assert engine.stats().cuts_skipped == 1000
    told = [record.getMessage().split(" held")[0] for record in caplog.records]
    assert told == [f"cuts skipped all={1 << doubled}" for doubled in range(10)]


def test_rows_of_reclaimed_holds_serve_new_cuts():
    engine = make_engine(max_rows=1, snapshot_rows=1)

    def reclaim(pages: int) -> int:
        for hold in list(engine.store.holds):
            engine.release(hold)
            return 1
        return 0

    engine.set_reclaim(reclaim)
    engine.submit(request("a", prompt(1, 200), 1, cuts=(10, 70, 130, 200), hold_at_end=False))
    log = run(engine)
    assert [c.position for c in log.cuts["a"]] == [10, 70, 130, 200]
    assert engine.stats().cuts_skipped == 0


def test_more_requests_than_rows_all_end():
    engine = make_engine(max_rows=2)
    for i in range(7):
        engine.submit(request(str(i), prompt(i, 20), 5, hold_at_end=False))
    log = run(engine)
    assert all(log.tokens[str(i)] == expected_tokens(prompt(i, 20), 5) for i in range(7))
    assert max(len(slices) for slices in engine.model.forwards) == 2


def test_a_long_prefill_never_holds_up_decoding():
    """Between two tokens of a running stream lies one step of at most one chunk."""
    engine = make_engine()
    engine.submit(request("stream", prompt(1, 8), 40))
    log = Log()
    log.add(engine.step())
    engine.submit(request("long", prompt(2, 1500), 1))
    counts = [len(log.tokens["stream"])]
    while len(log.tokens["stream"]) < 20:
        log.add(engine.step())
        counts.append(len(log.tokens["stream"]))
    assert all(b - a == 1 for a, b in pairwise(counts))
    assert not [c for c in log.cuts["long"] if isinstance(c, CutReached)]
