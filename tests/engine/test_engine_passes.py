"""Passes that span steps: others decode at the edges, and whatever is asked of a request inside one waits for its end."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from engine.types import CutReached, Finished, PrefillProgress, TokenEvent
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import StagedHashModel, expected_tokens, make_spec


def staged(stages: int = 6, **settings):
    """A clock that stands still: only what runs beside a pass decides how far a step takes it."""
    return make_engine(StagedHashModel(make_spec(), stages), clock_ns=lambda: 0, **settings)


def step_until(engine, condition, log: Log | None = None, limit: int = 200):
    events = []
    for _ in range(limit):
        new = engine.step()
        engine.check()
        events += new
        if log is not None:
            log.add(new)
        if any(condition(event) for event in new):
            return events
    raise AssertionError("it never happened")


def test_another_request_decodes_at_every_edge_of_a_pass():
    engine, ids, log = staged(), prompt(1, 60), Log()
    engine.submit(request("short", [3], 40))
    step_until(engine, lambda event: isinstance(event, TokenEvent), log)
    engine.submit(request("long", ids, 4))
    events = step_until(engine, lambda event: isinstance(event, PrefillProgress) and event.request_id == "long", log)
    assert sum(isinstance(event, TokenEvent) and event.request_id == "short" for event in events) == 7
    run(engine, log)
    assert log.tokens["long"] == expected_tokens(ids, 4, engine.model.spec)
    release_all(engine)


def test_alone_a_pass_runs_through_in_one_step():
    engine, ids = staged(), prompt(1, 60)
    engine.submit(request("a", ids, 1))
    assert any(isinstance(event, PrefillProgress) for event in engine.step())


def test_a_pass_alone_comes_back_to_the_caller_after_a_while():
    now = iter(range(0, 10**12, 30_000_000))
    engine = make_engine(StagedHashModel(make_spec(), 9), clock_ns=lambda: next(now))
    engine.submit(request("a", prompt(1, 60), 1))
    steps = 0
    while not any(isinstance(event, PrefillProgress) for event in engine.step()):
        steps += 1
    assert 2 <= steps <= 9


def long_and_short():
    """A pass over `long` that has begun, while `short` decodes."""
    engine = staged()
    engine.submit(request("short", [3], 60))
    step_until(engine, lambda event: isinstance(event, TokenEvent))
    engine.submit(request("long", prompt(2, 50), 6))
    engine.step()
    assert engine.passes.open is not None
    return engine


@pytest.mark.parametrize("hold", [True, False])
def test_a_cancel_inside_a_pass_takes_effect_at_its_end(hold):
    engine = long_and_short()
    engine.cancel("long", hold=hold)
    events = step_until(engine, lambda event: isinstance(event, Finished) and event.request_id == "long")
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.reason == "cancelled"
    held = [event for event in events if isinstance(event, CutReached)]
    assert [event.position for event in held] == ([50] if hold else [])
    engine.cancel("short")
    run(engine)
    release_all(engine)


def test_a_cut_inside_an_open_pass_is_too_late_and_one_at_its_end_is_not():
    engine = long_and_short()
    with pytest.raises(InvalidRequest, match="50 or later"):
        engine.declare_cut("long", 20)
    engine.declare_cut("long", 50)
    events = step_until(engine, lambda event: isinstance(event, CutReached))
    assert [e.position for e in events if isinstance(e, CutReached)] == [50]
    for id in ("short", "long"):
        engine.cancel(id)
    engine.step()
    release_all(engine)


def test_a_failure_beside_a_pass_ends_the_passes_requests_too():
    engine = long_and_short()
    forward = engine.model.forward
    engine.model.forward = lambda *args: (_ for _ in ()).throw(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    engine.model.forward = forward
    ends = {event.request_id: event for event in engine.step() if isinstance(event, Finished)}
    assert {end.reason for end in ends.values()} == {"error"}
    assert set(ends) == {"short", "long"}
    assert engine.passes.open is None
    release_all(engine)


def test_a_failure_of_a_pass_is_raised_and_its_requests_end():
    engine = long_and_short()
    assert engine.passes.open is not None
    engine.passes.open.work.advance = lambda: (_ for _ in ()).throw(RuntimeError("broken pass"))
    with pytest.raises(RuntimeError, match="broken pass"):
        engine.step()
    ends = {event.request_id: event.reason for event in engine.step() if isinstance(event, Finished)}
    assert ends["long"] == "error"
    engine.cancel("short")
    run(engine)
    release_all(engine)


def test_pages_for_decoding_are_never_taken_from_a_request_inside_a_pass():
    engine, log = staged(stages=40, kv_tokens=16 * 5, max_rows=3), Log()
    engine.submit(request("old", prompt(4, 15), 30))
    step_until(engine, lambda event: isinstance(event, TokenEvent), log)
    engine.submit(request("new", prompt(5, 30), 2))
    run(engine, log)
    assert log.finished["old"].reason == log.finished["new"].reason == "length"
    assert log.tokens["new"] == expected_tokens(prompt(5, 30), 2, engine.model.spec)
    release_all(engine)
