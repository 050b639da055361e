"""The step loop on the hash model: chunking, batching, restoring and ending give the tokens of the plain computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.errors import ContextTooLong, InvalidRequest, SnapshotMismatch, UnknownHold
from engine.models.base import Logits
from engine.types import CutReached, Finished, HoldId, KvRun, SamplingParams, StateSnapshot, TokenEvent
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import HashModel, expected_logits, expected_tokens, make_spec


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("recurrent", [True, False])
def test_tokens_are_those_of_the_plain_computation(length, recurrent):
    spec = make_spec(recurrent)
    engine = make_engine(HashModel(spec))
    ids = prompt(length, length)
    engine.submit(request("a", ids, 20))
    log = run(engine)
    assert log.tokens["a"] == expected_tokens(ids, 20, spec)
    assert log.finished["a"] == Finished("a", "length", length, 20)
    assert [c.position for c in log.cuts["a"]] == [length + 19]
    release_all(engine)


def test_chunks_end_at_multiples_of_chunk_tokens_whatever_was_restored():
    engine = make_engine()
    ids = prompt(1, 200)
    engine.submit(request("a", ids, 1, cuts=(100,)))
    log = run(engine)
    assert engine.model.forwards == [[(0, 64)], [(64, 64)], [(128, 64)], [(192, 8)]]
    engine.model.forwards.clear()
    engine.submit(request("b", ids, 1, restore=log.hold_at("a", 100)))
    run(engine, log)
    assert engine.model.forwards == [[(100, 28)], [(128, 64)], [(192, 8)]]
    assert log.tokens["a"] == log.tokens["b"]


def test_extra_edges_replay_another_schedule():
    engine = make_engine()
    engine.submit(request("a", prompt(1, 150), 1, edges=(70, 10)))
    run(engine)
    assert engine.model.forwards == [[(0, 10)], [(10, 54)], [(64, 6)], [(70, 58)], [(128, 22)]]


def test_requests_batched_give_what_each_gives_alone():
    engine = make_engine()
    prompts = {str(i): prompt(i, n) for i, n in enumerate([3, 64, 91, 37, 150, 16])}
    for id, ids in prompts.items():
        engine.submit(request(id, ids, 12))
    log = run(engine)
    for id, ids in prompts.items():
        assert log.tokens[id] == expected_tokens(ids, 12)
    assert max(len(slices) for slices in engine.model.forwards) == 6
    release_all(engine)


def test_a_step_runs_decodes_beside_prefill_within_the_budget():
    engine = make_engine()
    engine.submit(request("short", prompt(1, 8), 30))
    log = Log()
    log.add(engine.step())
    engine.submit(request("long", prompt(2, 500), 1))
    engine.submit(request("other", prompt(3, 20), 1))
    run(engine, log)
    for slices in engine.model.forwards[1:9]:
        assert (slices[0][1], len(slices) > 1) == (1, True)
        assert sum(length for _, length in slices[1:]) <= 64
    assert log.tokens["other"] == expected_tokens(prompt(3, 20), 1)


def test_prefills_take_turns():
    engine = make_engine()
    engine.submit(request("long", prompt(2, 640), 1))
    engine.submit(request("next", prompt(3, 64), 1))
    log = Log()
    log.add(engine.step())
    log.add(engine.step())
    assert log.finished["next"].reason == "length", "a 64-token prompt must not wait behind a 640-token one"
    run(engine, log)


def test_a_cut_at_every_position_restores_from_the_device_and_from_the_host():
    ids = prompt(5, 100)
    engine = make_engine(snapshot_rows=128)
    engine.submit(request("a", ids, 4, cuts=tuple(range(1, 101))))
    log = run(engine)
    want = expected_tokens(ids, 4)
    assert [c.position for c in log.cuts["a"]] == [*range(1, 101), 103]
    assert engine.model.forwards[:2] == [[(0, 64)], [(64, 36)]], "cuts must not split chunks"
    for position in range(1, 101):
        hold = log.hold_at("a", position)
        snapshot = engine.copy_out(hold)
        engine.submit(request(f"d{position}", ids, 4, restore=hold, hold_at_end=False))
        other = make_engine()
        other.submit(request("h", ids, 4, restore=snapshot))
        assert run(other).tokens["h"] == want
        release_all(other)
        run(engine, log)
        assert log.tokens[f"d{position}"] == want
    release_all(engine)


def test_a_restored_hold_may_be_released_at_once():
    ids = prompt(6, 90)
    engine = make_engine()
    engine.submit(request("a", ids, 1, cuts=(50,), hold_at_end=False))
    log = run(engine)
    hold = log.hold_at("a", 50)
    engine.submit(request("b", ids, 5, restore=hold, hold_at_end=False))
    engine.release(hold)
    engine.check()
    run(engine, log)
    assert log.tokens["b"] == expected_tokens(ids, 5)
    assert engine.stats().free_pages == engine.stats().total_pages


def test_a_hold_inside_a_page_keeps_what_it_saw_while_its_writer_and_two_heirs_go_on():
    base = prompt(7, 40)
    engine = make_engine()
    engine.submit(request("writer", base, 30, cuts=(37,)))
    log = Log()
    log.add(engine.step())
    hold = log.hold_at("writer", 37)
    left, right = base[:37] + prompt(8, 20), base[:37] + prompt(9, 20)
    engine.submit(request("left", left, 20, restore=hold))
    engine.submit(request("right", right, 20, restore=hold))
    run(engine, log)
    engine.submit(request("late", base, 30, restore=hold))
    run(engine, log)
    assert log.tokens["writer"] == log.tokens["late"] == expected_tokens(base, 30)
    assert log.tokens["left"] == expected_tokens(left, 20)
    assert log.tokens["right"] == expected_tokens(right, 20)
    release_all(engine)


def test_restoring_on_the_device_takes_one_page_for_a_partial_tail_and_none_for_a_full_one():
    engine = make_engine()
    ids = prompt(3, 160)
    engine.submit(request("a", ids, 1, cuts=(150, 160), hold_at_end=False))
    log = run(engine)
    free = engine.stats().free_pages
    engine.submit(request("tail", ids, 2, restore=log.hold_at("a", 150), hold_at_end=False))
    log.add(engine.step())
    assert engine.stats().free_pages == free - 1
    run(engine, log)
    longer = ids + prompt(4, 5)
    engine.submit(request("full", longer, 2, restore=log.hold_at("a", 160), hold_at_end=False))
    log.add(engine.step())
    assert engine.stats().free_pages == free - 1
    run(engine, log)
    assert log.tokens["full"] == expected_tokens(longer, 2)
    assert engine.stats().free_pages == free


def test_a_whole_prompt_with_logits_needs_no_forward_pass():
    ids = prompt(11, 48)
    engine = make_engine()
    engine.submit(request("a", ids, 6, cuts=(48,)))
    log = run(engine)
    snapshot = engine.copy_out(log.hold_at("a", 48))
    assert snapshot.logits is not None
    assert np.array_equal(snapshot.logits, expected_logits(ids))
    engine.model.forwards.clear()
    engine.submit(request("b", ids, 1, restore=log.hold_at("a", 48)))
    engine.submit(request("c", ids, 1, restore=snapshot))
    run(engine, log)
    assert engine.model.forwards == []
    engine.submit(request("d", ids, 6, restore=snapshot))
    run(engine, log)
    assert log.tokens["b"] == log.tokens["c"] == log.tokens["a"][:1]
    assert log.tokens["d"] == log.tokens["a"]
    assert len(engine.model.forwards) == 5
    release_all(engine)


def test_declared_cuts_in_the_output_hold_the_state_there():
    ids = prompt(12, 20)
    engine = make_engine()
    engine.submit(request("a", ids, 10))
    log = Log()
    log.add(engine.step())
    engine.declare_cut("a", 20)
    engine.declare_cut("a", 25)
    engine.declare_cut("a", 99)
    run(engine, log)
    assert [c.position for c in log.cuts["a"]] == [20, 25, 29]
    full = ids + log.tokens["a"]
    for cut in log.cuts["a"]:
        longer = full[: cut.position] + prompt(4, 30)
        engine.submit(request(f"r{cut.position}", longer, 5, restore=cut.hold))
        run(engine, log)
        assert log.tokens[f"r{cut.position}"] == expected_tokens(longer, 5)
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.declare_cut("a", 30)
    release_all(engine)


def test_a_cut_that_is_already_passed_is_refused():
    engine = make_engine()
    engine.submit(request("a", prompt(1, 80), 10))
    engine.step()
    with pytest.raises(InvalidRequest, match="64 or later"):
        engine.declare_cut("a", 63)


def test_max_tokens_zero_only_prefills_and_holds_the_end_with_logits():
    ids = prompt(13, 70)
    engine = make_engine()
    engine.submit(request("a", ids, 0))
    log = run(engine)
    assert log.finished["a"] == Finished("a", "length", 70, 0)
    (cut,) = log.cuts["a"]
    assert cut.position == 70
    snapshot = engine.copy_out(cut.hold)
    assert np.array_equal(snapshot.logits, expected_logits(ids))


def test_copy_out_from_a_position_gives_only_the_rows_behind_it():
    engine = make_engine()
    ids = prompt(14, 50)
    engine.submit(request("a", ids, 0))
    (cut,) = run(engine).cuts["a"]
    whole = engine.copy_out(cut.hold).kv[0].rows
    part = engine.copy_out(cut.hold, 33).kv[0]
    assert (part.start, part.rows.shape) == (33, (17, engine.layout.kv_token_bytes))
    assert np.array_equal(part.rows, whole[33:])
    assert engine.copy_out(cut.hold, 50).kv == ()
    with pytest.raises(InvalidRequest, match="kv_start"):
        engine.copy_out(cut.hold, 51)


def test_snapshot_bytes_survive_a_round_trip():
    engine, other = make_engine(), make_engine()
    ids = prompt(15, 77)
    engine.submit(request("a", ids, 0))
    (cut,) = run(engine).cuts["a"]
    first = engine.copy_out(cut.hold)
    other.submit(request("b", ids, 0, restore=first))
    (back,) = run(other).cuts["b"]
    second = other.copy_out(back.hold)
    assert np.array_equal(first.kv[0].rows, second.kv[0].rows)
    assert all(np.array_equal(first.state[name], second.state[name]) for name in first.state)
    assert [c.name for c in engine.layout.state] == list(first.state)
    assert np.array_equal(first.logits, second.logits)


@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_a_snapshot_in_several_runs_is_one_state(limit):
    engine = make_engine(restore_bytes=limit)
    ids = prompt(16, 77)
    engine.submit(request("a", ids, 3, cuts=(70,)))
    log = run(engine)
    hold = log.hold_at("a", 70)
    whole = engine.copy_out(hold)
    rows = whole.kv[0].rows
    rows.flags.writeable = False
    runs = tuple(KvRun(a, rows[a:b]) for a, b in ((0, 5), (5, 5), (5, 8), (8, 32), (32, 70)))
    engine.submit(request("b", ids, 3, restore=StateSnapshot(70, runs, whole.state)))
    run(engine, log)
    assert log.tokens["a"] == log.tokens["b"]


def test_generation_ends_at_the_context_limit():
    engine = make_engine(max_context=40)
    engine.submit(request("a", prompt(1, 30), 100))
    log = run(engine)
    assert log.finished["a"] == Finished("a", "length", 30, 10)
    with pytest.raises(ContextTooLong, match="40 tokens, this engine holds at most 39"):
        engine.submit(request("b", prompt(1, 40)))


def test_stop_ids_and_stop_strings_end_a_request():
    ids = prompt(17, 20)
    want = expected_tokens(ids, 12)
    engine = make_engine()
    engine.submit(request("id", ids, sampling=SamplingParams(12, temperature=0.0, stop_token_ids=(want[5],))))
    engine.set_token_bytes([f"<{i}>".encode() for i in range(97)])
    text = f"{want[3]}><{want[4]}".encode()
    engine.submit(request("text", ids, sampling=SamplingParams(12, temperature=0.0, stop=(b"never", text))))
    log = run(engine)
    first = want.index(want[5])
    assert (log.finished["id"].reason, log.tokens["id"]) == ("stop", want[: first + 1])
    assert (log.finished["text"].reason, log.tokens["text"]) == ("stop_string", want[:5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuts": (0,)}, "cuts: got 0"),
        ({"cuts": (21,)}, "cuts: got 21"),
        ({"edges": (21,)}, "edges: got 21"),
        ({"sampling": SamplingParams(1, temperature=-1.0)}, "temperature"),
        ({"sampling": SamplingParams(1, temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(1, top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(-1)}, "max_tokens"),
        ({"sampling": SamplingParams(1, stop=(b"x",))}, "set_token_bytes"),
        ({"sampling": SamplingParams(1, stop=(b"",))}, "stop"),
        ({"sampling": SamplingParams(1, stop_token_ids=(97,))}, "stop_token_ids"),
    ],
)
def test_bad_fields_are_refused_by_name(change, message):
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(request("a", prompt(1, 20), **change))
    assert not engine.has_work


def test_bad_ids_are_refused():
    engine = make_engine()
    for ids in ([], [97], [-1]):
        with pytest.raises(InvalidRequest, match="token_ids"):
            engine.submit(request("a", ids))
    engine.submit(request("a", [1]))
    with pytest.raises(InvalidRequest, match="not in use"):
        engine.submit(request("a", [1]))
    with pytest.raises(UnknownHold, match="hold 5"):
        engine.submit(request("b", [1, 2], restore=HoldId(5)))
    with pytest.raises(UnknownHold):
        engine.release(HoldId(5))


def test_a_hold_of_other_tokens_is_refused():
    engine = make_engine()
    ids = prompt(1, 40)
    engine.submit(request("a", ids, 1, cuts=(30,)))
    hold = run(engine).hold_at("a", 30)
    wrong = [*ids[:20], ids[20] % 96 + 1, *ids[21:]]
    with pytest.raises(SnapshotMismatch, match="differ at position 20"):
        engine.submit(request("b", wrong, restore=hold))
    with pytest.raises(SnapshotMismatch, match="needs its final logits"):
        engine.submit(request("b", ids[:30], restore=hold))
    with pytest.raises(SnapshotMismatch, match="restored position 30, the prompt has 29"):
        engine.submit(request("b", ids[:29], restore=hold))


def test_events_of_a_turn_come_in_order():
    engine = make_engine()
    engine.submit(request("a", prompt(1, 70), 2, cuts=(10, 70)))
    events = []
    while engine.has_work:
        events += engine.step()
    kinds = [type(e).__name__ for e in events]
    assert kinds[:4] == ["PrefillProgress", "CutReached", "PrefillProgress", "CutReached"]
    assert kinds[4:] == ["TokenEvent", "TokenEvent", "CutReached", "Finished"]
    assert isinstance(events[1], CutReached)
    assert isinstance(events[4], TokenEvent)


class Looking(HashModel):
    """Says where the largest value of each row is, and hides the values."""

    def forward(self, batch: ForwardBatch, kv: Any, states: Any) -> Logits:
        rows = super().forward(batch, kv, states).rows
        finite = rows.isfinite().all(-1)
        return Logits(torch.zeros_like(rows), torch.where(finite, rows.argmax(-1), -1).tolist())


def test_a_greedy_token_is_the_one_that_the_model_named():
    """Whoever samples, or is also to hear probabilities, is served from the logits themselves."""
    engine = make_engine(Looking(nan_token=96))
    likely = SamplingParams(max_tokens=5, temperature=0.0, logprobs=1)
    engine.submit(request("plain", prompt(1, 70), 6))
    engine.submit(request("other", prompt(2, 9), 9))
    engine.submit(request("broken", [96, *prompt(3, 30)], 9))
    engine.submit(request("likely", prompt(4, 12), sampling=likely))
    log = run(engine)
    assert log.tokens["plain"] == expected_tokens(prompt(1, 70), 6)
    assert log.tokens["other"] == expected_tokens(prompt(2, 9), 9)
    assert log.tokens["likely"] == [0] * 5
    assert log.finished["broken"].reason == "error"
    assert "NaN" in str(log.finished["broken"].error)


class InFront:
    """Has everything of a model, and counts the passes."""

    def __init__(self, model):
        self.model, self.passes = model, 0

    @property
    def spec(self):
        return self.model.spec

    def forward(self, *arguments):
        self.passes += 1
        return self.model.forward(*arguments)


def test_a_model_that_is_put_in_front_of_the_other_runs_the_passes():
    engine = make_engine()
    engine.model = InFront(engine.model)
    engine.submit(request("a", prompt(1, 5), 3))
    assert run(engine).tokens["a"] == expected_tokens(prompt(1, 5), 3)
    assert engine.model.passes == 3
