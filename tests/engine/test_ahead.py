"""Steps that a model begins with before anybody has read the tokens of the step before: nobody can tell them from others.

The fake computes such a step at once, and never again if it is asked for, so that whatever is still read of what lies beneath
it has to be what it was, and whatever it wrote must not be seen where it was not wanted.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.types import SamplingParams
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import Plain, StagedHashModel, expected_tokens, make_spec

NEW = 20


def engine_with(recurrent: bool = True, **settings):
    model = StagedHashModel(make_spec(recurrent), 1)
    return model, make_engine(model, page_size=64, chunk_tokens=64, kv_tokens=64 * 40, **settings)


def step_until(engine, log: Log, id: str, tokens: int) -> None:
    while len(log.tokens[id]) < tokens:
        log.add(engine.step())
        engine.check()


def assert_held(engine, hold, tokens, spec) -> None:
    snapshot, plain = engine.copy_out(hold), Plain(tokens, spec)
    assert snapshot.position == len(tokens)
    assert np.array_equal(snapshot.kv[0].rows, plain.kv_bytes())
    if spec.delta_layers:
        assert all(np.array_equal(a, b) for a, b in zip(snapshot.state.values(), plain.state_bytes(), strict=True))


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_step_of_greedy_answers_but_the_first_is_begun_before_it_is_asked_for(recurrent, count):
    model, engine = engine_with(recurrent)
    prompts = {str(i): prompt(i, 5 + i) for i in range(count)}
    for id, ids in prompts.items():
        engine.submit(request(id, ids, NEW))
    log = run(engine)
    for id, ids in prompts.items():
        assert log.tokens[id] == expected_tokens(ids, NEW, model.spec)
    assert model.used_ahead == NEW - 2  # the prompt's pass gives the first token, and the second step cannot know it
    release_all(engine)


def test_answers_of_different_length_leave_one_by_one():
    model, engine = engine_with()
    for id in range(1, 4):
        engine.submit(request(str(id), prompt(id, 9), 4 * id))
    log = run(engine)
    for id in range(1, 4):
        assert log.tokens[str(id)] == expected_tokens(prompt(id, 9), 4 * id, model.spec)
    assert model.used_ahead == 4 * 3 - 2
    release_all(engine)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=NEW, temperature=0.7, seed=3),
        SamplingParams(max_tokens=NEW, temperature=0.0, presence_penalty=0.5),
        SamplingParams(max_tokens=NEW, temperature=0.0, repetition_penalty=1.2),
        SamplingParams(max_tokens=NEW, temperature=0.0, logprobs=1),
    ],
)
def test_no_step_is_begun_whose_tokens_the_host_must_choose(sampling):
    model, engine = engine_with()
    engine.submit(request("greedy", prompt(1, 9), NEW))
    engine.submit(request("other", prompt(2, 9), sampling=sampling))
    log = run(engine)
    assert log.tokens["greedy"] == expected_tokens(prompt(1, 9), NEW, model.spec)
    assert model.used_ahead == 0
    release_all(engine)


def test_a_mask_is_asked_after_every_token():
    class Only:
        def words(self):
            words = np.zeros(4, dtype=np.uint32)
            words[1] = 6  # tokens 33 and 34
            return words

        def accept(self, token):
            assert token in (33, 34)

    model, engine = engine_with()
    engine.submit(request("a", prompt(1, 9), NEW, mask=Only()))
    log = run(engine)
    assert set(log.tokens["a"]) <= {33, 34}
    assert model.used_ahead == 0
    release_all(engine)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("late", [0, 1])
def test_a_cut_that_is_declared_when_its_token_has_come_holds_the_state_before_the_step_that_was_begun(recurrent, late):
    """late 0: the newest token is not in the state yet; 1: the state is to be held with it."""
    model, engine = engine_with(recurrent)
    ids, log = prompt(3, 11), Log()
    engine.submit(request("a", ids, NEW))
    step_until(engine, log, "a", 8)
    assert model._ahead is not None
    position = len(ids) + len(log.tokens["a"]) - 1 + late
    engine.declare_cut("a", position)
    run(engine, log)
    want = expected_tokens(ids, NEW, model.spec)
    assert log.tokens["a"] == want
    assert_held(engine, log.hold_at("a", position), (ids + want)[:position], model.spec)
    assert model.used_ahead == NEW - 2
    release_all(engine)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_an_answer_that_ends_where_nobody_knew_is_held_as_it_was(recurrent, how):
    model, engine = engine_with(recurrent)
    ids, log = prompt(4, 13), Log()
    want = expected_tokens(ids, NEW, model.spec)
    at = next(i for i in range(4, NEW) if want[i] not in want[:i])
    stop = (want[at],) if how == "stop" else ()
    engine.submit(
        request("a", ids, sampling=SamplingParams(max_tokens=NEW, temperature=0.0, stop_token_ids=stop), hold_at_end=True)
    )
    step_until(engine, log, "a", at + 1)
    assert model._ahead is not None
    if how == "cancel":
        engine.cancel("a", hold=True)
    run(engine, log)
    assert log.tokens["a"] == want[: at + 1]
    computed = (ids + want)[: len(ids) + at]
    hold = log.hold_at("a", len(computed))
    assert_held(engine, hold, computed, model.spec)
    # And it goes on from there as if nothing had been computed behind it.
    engine.submit(request("b", ids + want[: at + 1], 5, restore=hold))
    assert run(engine).tokens["b"] == want[at + 1 : at + 6] + expected_tokens(ids + want, max(0, at + 6 - NEW), model.spec)
    release_all(engine)


def test_a_turn_that_comes_in_between_is_as_if_nothing_had_been_begun():
    model, engine = engine_with()
    log = Log()
    engine.submit(request("a", prompt(5, 9), NEW))
    step_until(engine, log, "a", 6)
    engine.submit(request("b", prompt(6, 70), 8))
    run(engine, log)
    assert log.tokens["a"] == expected_tokens(prompt(5, 9), NEW, model.spec)
    assert log.tokens["b"] == expected_tokens(prompt(6, 70), 8, model.spec)
    release_all(engine)


@pytest.mark.parametrize("recurrent", [True, False])
def test_an_answer_that_went_to_the_host_and_came_back_takes_no_step_that_was_begun_before(recurrent):
    model, engine = engine_with(recurrent)
    log = Log()
    engine.submit(request("a", prompt(5, 9), NEW))
    step_until(engine, log, "a", 6)
    assert model._ahead is not None
    used = model.used_ahead
    engine.scheduler._to_host(engine.scheduler.running[0])
    step_until(engine, log, "a", 7)
    assert model.used_ahead == used
    run(engine, log)
    assert log.tokens["a"] == expected_tokens(prompt(5, 9), NEW, model.spec)
    assert model.used_ahead > used
    release_all(engine)


def test_more_answers_than_there_are_rows_for_are_not_begun():
    model, engine = engine_with(ahead_rows=2)
    for id in range(3):
        engine.submit(request(str(id), prompt(id, 9), 6 if id else 12))
    log = run(engine)
    for id in range(3):
        assert log.tokens[str(id)] == expected_tokens(prompt(id, 9), 6 if id else 12, model.spec)
    assert model.used_ahead == 12 - 6  # from the step on behind which it is alone
    release_all(engine)


def test_it_can_be_turned_off():
    model, engine = engine_with(ahead_rows=0)
    engine.submit(request("a", prompt(5, 9), NEW))
    assert run(engine).tokens["a"] == expected_tokens(prompt(5, 9), NEW, model.spec)
    assert model.used_ahead == 0
    assert len(engine.store.rows.refs) == engine.stats().total_rows
    release_all(engine)


def test_a_step_that_fails_after_another_was_begun_ends_the_answer_and_frees_both_rows():
    model, engine = engine_with()
    log = Log()
    want = expected_tokens(prompt(5, 9), NEW, model.spec)
    at = next(i for i in range(3, NEW) if want[i] not in want[:i] + prompt(5, 9))
    model.raise_token = want[at]
    engine.submit(request("a", prompt(5, 9), NEW))
    step_until(engine, log, "a", at + 1)
    with pytest.raises(RuntimeError, match="told to fail"):
        engine.step()
    run(engine, log)
    assert log.finished["a"].reason == "error"
    release_all(engine)
