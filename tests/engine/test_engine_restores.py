"""Restores in pieces, and who owns a recurrent row when something between a pass and its hold fails."""

from __future__ import annotations

from contextlib import suppress

import pytest

from engine import outcomes
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.kvcache.pool import KvPools
from engine.kvcache.store import StateStore
from engine.types import PrefillProgress, TokenEvent
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import HashModel, expected_tokens, make_spec


def saved(engine: Engine, ids: list[int]):
    """A snapshot of `ids`, from an engine of its own with the same pools' layout."""
    other = make_engine(HashModel(engine.model.spec))
    other.submit(request("source", ids, 0))
    return other.copy_out(run(other).cuts["source"][-1].hold)


def bytes_of(snapshot) -> int:
    return sum(r.rows.nbytes for r in snapshot.kv) + sum(p.nbytes for p in snapshot.state.values())


@pytest.mark.parametrize("recurrent", [True, False])
def test_others_decode_in_every_step_of_a_large_restore(recurrent):
    piece = 1000
    engine = make_engine(HashModel(make_spec(recurrent)), restore_bytes=piece)
    ids = prompt(1, 300)
    snapshot = saved(engine, ids)
    engine.submit(request("stream", prompt(2, 10), 200, hold_at_end=False))
    log = Log()
    log.add(engine.step())
    engine.submit(request("restored", [*ids, 1, 2, 3], 2, restore=snapshot, hold_at_end=False))
    between = 0
    while not log.progress["restored"]:
        events = engine.step()
        engine.check()
        log.add(events)
        assert sum(isinstance(e, TokenEvent) and e.request_id == "stream" for e in events) == 1
        between += 1
    assert between >= bytes_of(snapshot) // piece, "no step copied more than a piece and its last token or component"
    run(engine, log)
    assert log.tokens["stream"] == expected_tokens(prompt(2, 10), 200, engine.model.spec)
    assert log.tokens["restored"] == expected_tokens([*ids, 1, 2, 3], 2, engine.model.spec)
    release_all(engine)


def test_a_step_copies_no_more_than_its_share(monkeypatch):
    """Counted where the bytes arrive; one run of many tokens is split, short ones are joined."""
    written: list[int] = []
    write = KvPools.write
    monkeypatch.setattr(
        KvPools, "write", lambda self, pages, start, rows: (written.append(rows.nbytes), write(self, pages, start, rows))[1]
    )
    engine = make_engine(restore_bytes=2048)
    ids = prompt(3, 200)
    snapshot = saved(engine, ids)
    for id in ("a", "b"):
        engine.submit(request(id, [*ids, 7], 1, restore=snapshot, hold_at_end=False))
    steps: list[int] = []
    log = Log()
    while engine.has_work:
        before = len(written)
        log.add(engine.step())
        steps.append(sum(written[before:]))
    width = engine.layout.kv_token_bytes
    assert max(steps) <= 2048
    assert sum(steps) == 2 * 200 * width
    assert len([s for s in steps if s]) >= 2 * 200 * width // 2048
    assert log.tokens["a"] == log.tokens["b"] == expected_tokens([*ids, 7], 1)


def test_a_small_restore_runs_in_the_step_that_admits_it():
    engine = make_engine()
    ids = prompt(4, 40)
    engine.submit(request("a", [*ids, 5], 1, restore=saved(engine, ids), hold_at_end=False))
    events = engine.step()
    assert [type(e) for e in events][:2] == [PrefillProgress, TokenEvent]


@pytest.mark.parametrize("steps", range(1, 5))
@pytest.mark.parametrize("hold", [False, True])
def test_a_restore_is_cancelled_between_two_pieces(steps, hold):
    engine = make_engine(restore_bytes=500)
    ids = prompt(5, 150)
    engine.submit(request("a", [*ids, 5], 3, restore=saved(engine, ids)))
    log = Log()
    for _ in range(steps):
        log.add(engine.step())
        engine.check()
    engine.cancel("a", hold=hold)
    log.add(engine.step())
    assert log.finished["a"].reason == "cancelled"
    assert log.cuts["a"] == [], "what is half there is never held"
    release_all(engine)


def test_a_request_sent_away_in_the_middle_of_its_restore_begins_it_again():
    engine = make_engine(page_size=4, kv_tokens=4 * 15, chunk_tokens=8, restore_bytes=60)
    ids = prompt(6, 30)
    engine.submit(request("old", prompt(7, 20), 40, hold_at_end=False))
    log = Log()
    for _ in range(3):
        log.add(engine.step())
    engine.submit(request("young", [*ids, 3], 3, restore=saved(engine, ids), hold_at_end=False))
    run(engine, log)
    assert engine.stats().preemptions > 0
    assert log.progress["young"] == [31]
    assert log.tokens["young"] == expected_tokens([*ids, 3], 3)
    assert log.tokens["old"] == expected_tokens(prompt(7, 20), 40)
    release_all(engine)


CUTS = (3, 7, 10)


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("where", ["hold", "finite_rows", "choose_tokens", "reclaim", "copy", "take"])
def test_no_row_or_page_is_lost_whatever_fails_between_pass_and_hold(monkeypatch, where, at):
    """Every place that a row goes through, failing at its n-th call: afterwards everything is free, and work goes on."""
    engine = make_engine(max_rows=2, snapshot_rows=5 if where == "reclaim" else 12)
    calls = 0

    def failing(real):
        def call(*arguments):
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("injected")
            return real(*arguments)

        return call

    if where == "hold":
        monkeypatch.setattr(StateStore, "hold", failing(StateStore.hold))
    elif where == "reclaim":
        engine.set_reclaim(failing(lambda pages: 0))
    elif where == "copy":
        monkeypatch.setattr(engine.store.states, "copy", failing(engine.store.states.copy))
    elif where == "take":
        monkeypatch.setattr(engine.store.rows, "take", failing(engine.store.rows.take))
    else:
        monkeypatch.setattr(outcomes, where, failing(getattr(outcomes, where)))
    ids = prompt(8, 10)
    log = Log()
    for id in ("a", "b"):
        engine.submit(request(id, ids, 4, cuts=CUTS))
    raised = 0
    for step in range(100):
        if step == 1:
            for id in [i for i in ("a", "b") if i not in log.finished]:
                with suppress(InvalidRequest):  # it failed before it got so far
                    engine.declare_cut(id, 10)
                    engine.declare_cut(id, 11)
        try:
            log.add(engine.step())
        except RuntimeError:
            raised += 1
        engine.check()
        if not engine.has_work:
            break
    assert raised == (calls >= at)
    assert raised or at > 1, "every place is reached"
    assert not engine.has_work
    assert set(log.finished) == {"a", "b"}
    release_all(engine)
    engine.submit(request("again", ids, 4, hold_at_end=False))
    assert run(engine).tokens["again"] == expected_tokens(ids, 4)
