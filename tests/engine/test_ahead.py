"""Steps that a model begins with before anybody has read the tokens of the step before: nobody can tell them from others.

The fake computes such a step at once, and never again if it is asked for, so that whatever is still read of what lies beneath
it has to be what it was, and whatever it wrote must not be seen where it was not wanted.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ahead import Begun, worth_guessing
from engine.types import EngineEvent, SamplingParams, TokenEvent
from tests.budget import examples
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import Plain, StagedHashModel, expected_tokens, make_spec

NEW = 20
LONG = 50  # within one page


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


class Only:
    """A mask that always allows the same two tokens."""

    def words(self):
        words = np.zeros(4, dtype=np.uint32)
        words[1] = 6  # tokens 33 and 34
        return words

    def accept(self, token):
        assert token in (33, 34)


class Any(Only):
    """One that allows everything."""

    def words(self):
        return None

    def accept(self, token):
        pass


def test_a_mask_that_decides_is_soon_guessed_no_more_and_then_nobody_beside_it():
    model, engine = engine_with()
    engine.submit(request("a", prompt(1, 9), NEW, mask=Only()))
    engine.submit(request("greedy", prompt(2, 9), NEW))
    log = run(engine)
    assert set(log.tokens["a"]) <= {33, 34}
    assert log.tokens["greedy"] == expected_tokens(prompt(2, 9), NEW, model.spec)
    assert counts(engine) == Begun(wrong=3, guesses=3, wrong_guesses=3)
    release_all(engine)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=NEW, temperature=2.0, seed=1),
        SamplingParams(max_tokens=NEW, temperature=0.0, presence_penalty=1e-5, repetition_penalty=1.00001),
    ],
)
def test_a_mask_or_a_penalty_that_changes_nothing_does_not_keep_a_step_from_being_begun(sampling):
    model, engine = engine_with()
    engine.submit(request("a", prompt(1, 9), sampling=sampling, mask=Any()))
    run(engine)
    assert model.used_ahead == NEW - 2
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


def told(engine) -> dict[str, list[tuple]]:
    """Run to the end: of every answer its tokens with all that is said of them."""
    events: dict[str, list[tuple]] = {}

    def take(step: list[EngineEvent]) -> None:
        for event in step:
            if isinstance(event, TokenEvent):
                events.setdefault(event.request_id, []).append((event.token_id, event.logprob, event.top_logprobs))

    while engine.has_work:
        take(engine.step())
        engine.check()
    return events


def counts(engine) -> Begun:
    assert engine.passes.ahead is not None
    return engine.passes.ahead.counts


samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, NEW),
    temperature=st.sampled_from([0.0, 0.4, 3.0, 8.0]),
    top_k=st.sampled_from([0, 1, 8, 40]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1 << 64),
    logprobs=st.sampled_from([None, None, 0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 2.0]),
    stop_token_ids=st.sampled_from([(), (), (5, 17, 40)]),
)


@settings(max_examples=examples(20, 300), deadline=None)
@given(
    answers=st.lists(samplings, min_size=1, max_size=4),
    recurrent=st.booleans(),
    every=st.integers(1, 9),
    mask=st.sampled_from([None, Any, Only]),
)
def test_what_is_drawn_does_not_depend_on_what_was_begun_nor_on_guesses(answers, recurrent, every, mask):
    """Also where every so-many guess is wrong, which costs nothing but steps. (Equal logits are, by themselves.)"""
    said = []
    for rows, wrong in ((0, None), (4, None), (4, every)):
        model, engine = engine_with(recurrent, ahead_rows=rows)
        model.wrong = lambda number, wrong=wrong: wrong is not None and number % wrong == 0
        for index, sampling in enumerate(answers):
            engine.submit(request(str(index), prompt(index, 5 + index), sampling=sampling, mask=mask and mask()))
        said.append(told(engine))
        assert model.used_ahead == (counts(engine).used if rows else 0)
        release_all(engine)
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=LONG, temperature=3.0, seed=3),
        SamplingParams(max_tokens=LONG, temperature=3.0, top_k=20, top_p=0.95, seed=4),
        SamplingParams(max_tokens=LONG, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=LONG, temperature=3.0, logprobs=0, min_p=0.01, seed=5),
    ],
)
def test_every_step_of_an_answer_that_is_drawn_is_begun_before_it_is_asked_for(sampling):
    model, engine = engine_with()
    engine.submit(request("a", prompt(1, 9), sampling=sampling))
    engine.submit(request("greedy", prompt(2, 9), LONG))
    log = run(engine)
    assert log.tokens["greedy"] == expected_tokens(prompt(2, 9), LONG, model.spec)
    assert len(set(log.tokens["a"])) > 5
    assert model.used_ahead == LONG - 2
    assert counts(engine) == Begun(used=LONG - 2, guesses=LONG - 2)
    release_all(engine)


def test_a_wrong_guess_costs_its_step_and_the_others_go_on():
    model, engine = engine_with()
    model.wrong = lambda number: number in (20, 21, 40)
    for id in ("a", "b"):
        engine.submit(request(id, prompt(1, 9), sampling=SamplingParams(max_tokens=LONG, temperature=3.0, seed=3)))
    log = run(engine)
    assert log.tokens["a"] == log.tokens["b"]
    # Two at a time: the first two are of one step.
    assert counts(engine) == Begun(used=LONG - 4, wrong=2, guesses=2 * (LONG - 2), wrong_guesses=3)
    assert model.used_ahead == LONG - 4
    release_all(engine)


def test_an_answer_whose_guesses_are_often_wrong_is_guessed_no_more():
    model, engine = engine_with()
    model.wrong = lambda number: True
    engine.submit(request("a", prompt(1, 9), sampling=SamplingParams(max_tokens=LONG, temperature=3.0, seed=3)))
    run(engine)
    assert counts(engine) == Begun(wrong=3, guesses=3, wrong_guesses=3)
    model.wrong = lambda number: False
    engine.submit(request("b", prompt(1, 9), sampling=SamplingParams(max_tokens=LONG, temperature=3.0, seed=3)))
    run(engine)
    assert counts(engine).used == LONG - 2  # another request begins anew
    release_all(engine)


def test_one_wrong_guess_in_sixteen_is_borne():
    assert all(worth_guessing(guesses, 2) for guesses in range(2, 100))
    assert not worth_guessing(3, 3)
    assert worth_guessing(1600, 102)
    assert not worth_guessing(1600, 103)


def test_steps_that_were_begun_for_nothing_are_told_by_what_came_in_between():
    _, engine = engine_with()
    log = Log()
    drawn = SamplingParams(max_tokens=LONG, temperature=3.0, seed=3)
    engine.submit(request("a", prompt(1, 9), sampling=drawn))
    engine.submit(request("b", prompt(2, 9), sampling=drawn))
    step_until(engine, log, "a", 6)
    engine.cancel("b")
    step_until(engine, log, "a", 9)
    assert (counts(engine).ended, counts(engine).joined) == (1, 0)
    engine.submit(request("c", prompt(3, 1), sampling=drawn))
    step_until(engine, log, "c", 6)
    assert (counts(engine).ended, counts(engine).joined) == (1, 1)
    stats = engine.stats()
    assert (stats.ahead_used, stats.ahead_ended, stats.ahead_joined) == (counts(engine).used, 1, 1)
    assert (stats.guesses, stats.wrong_guesses) == (counts(engine).guesses, 0)
    run(engine, log)
    release_all(engine)
