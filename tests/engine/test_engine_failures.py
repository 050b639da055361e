"""Faults that other engines had, each as a test. Freed memory is NaN throughout; every reuse test shows that it reused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from engine.errors import InvalidRequest, SnapshotMismatch
from engine.outcomes import Outcomes
from engine.sampling import Sampler
from engine.types import KvRun, SamplingParams, StateSnapshot
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import HashModel, Plain, expected_tokens


def snapshot_of(ids: list[int], position: int | None = None, **settings) -> StateSnapshot:
    """State after the first `position` tokens (default: all, with logits), from an engine of its own."""
    engine = make_engine(**settings)
    at = len(ids) if position is None else position
    engine.submit(request("source", ids, 0, cuts=(at,)))
    return engine.copy_out(run(engine).hold_at("source", at))


def test_saved_state_is_at_the_position_that_it_is_saved_under():
    """A recurrent state that ran ahead of its KV: page 64, cut at 100, prompt of 200."""
    ids = prompt(1, 200)
    snapshot = snapshot_of(ids, 100, page_size=64)
    plain = Plain(ids[:100])
    assert np.array_equal(snapshot.kv[0].rows, plain.kv_bytes())
    for got, want in zip(snapshot.state.values(), plain.state_bytes(), strict=True):
        assert np.array_equal(got, want)


def test_each_request_of_a_batch_gets_its_own_snapshot():
    """Lengths 37 and 91 in one pass, both cut."""
    engine = make_engine(chunk_tokens=128, step_tokens=256)
    left, right = prompt(1, 37), prompt(2, 91)
    engine.submit(request("left", left, 0, cuts=(20, 37)))
    engine.submit(request("right", right, 0, cuts=(64, 91)))
    log = run(engine)
    assert engine.model.forwards == [[(0, 37), (0, 91)]]
    for id, ids in (("left", left), ("right", right)):
        for cut in log.cuts[id]:
            plain = Plain(ids[: cut.position])
            snapshot = engine.copy_out(cut.hold)
            assert np.array_equal(snapshot.kv[0].rows, plain.kv_bytes())
            assert all(np.array_equal(a, b) for a, b in zip(snapshot.state.values(), plain.state_bytes(), strict=True))


@pytest.mark.parametrize("page", [16, 64])
def test_every_suffix_length_after_a_restore(page):
    """The first token after a restore, with 1 to 65 tokens left to compute."""
    ids = prompt(3, 165)
    engine = make_engine(page_size=page, snapshot_rows=100)
    engine.submit(request("a", ids[:100], 0))
    log = run(engine)
    for suffix in range(1, 66):
        id = f"s{suffix}"
        engine.submit(request(id, ids[: 100 + suffix], 2, restore=log.hold_at("a", 100), hold_at_end=False))
        run(engine, log)
        assert sum(length for slices in engine.model.forwards for _, length in slices) == suffix + 1 + (
            100 if suffix == 1 else 0
        ), "only the suffix and one generated token are computed"
        engine.model.forwards.clear()
        assert log.tokens[id] == expected_tokens(ids[: 100 + suffix], 2)


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 31, 32, 33])
def test_the_same_prompt_again_computes_nothing(length):
    """Also prompts shorter than a page, of exactly k pages, and one token either side."""
    ids = prompt(4, length)
    engine = make_engine()
    engine.submit(request("a", ids, 3, cuts=(length,)))
    log = run(engine)
    engine.model.forwards.clear()
    engine.submit(request("b", ids, 3, restore=log.hold_at("a", length)))
    run(engine, log)
    assert log.progress["b"] == []
    assert [slices[0][1] for slices in engine.model.forwards] == [1, 1], "two decode steps, no prefill"
    assert log.tokens["b"] == log.tokens["a"] == expected_tokens(ids, 3)
    release_all(engine)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_cut_at_the_end_is_held_once(max_tokens):
    engine = make_engine()
    engine.submit(request("a", prompt(5, 20), max_tokens, cuts=(20,)))
    (cut,) = run(engine).cuts["a"]
    assert cut.position == 20
    assert engine.copy_out(cut.hold).logits is not None


def test_two_sharers_admitted_in_one_step():
    """Both restore the same partial page and write behind it in the same pass."""
    base = prompt(5, 50)
    engine = make_engine()
    engine.submit(request("base", base, 0))
    log = run(engine)
    left, right = base + prompt(6, 10), base + prompt(7, 10)
    for id, ids in (("left", left), ("right", right)):
        engine.submit(request(id, ids, 10, restore=log.hold_at("base", 50)))
    engine.model.forwards.clear()
    log.add(engine.step())
    assert engine.model.forwards == [[(50, 10), (50, 10)]]
    run(engine, log)
    assert log.tokens["left"] == expected_tokens(left, 10)
    assert log.tokens["right"] == expected_tokens(right, 10)
    release_all(engine)


def test_two_identical_prompts_in_one_step_do_not_read_each_other():
    ids = prompt(8, 40)
    engine = make_engine()
    engine.submit(request("a", ids, 5))
    engine.submit(request("b", ids, 5))
    log = run(engine)
    assert log.tokens["a"] == log.tokens["b"] == expected_tokens(ids, 5)


def test_nan_ends_one_request_and_keeps_nothing_behind_the_last_good_cut():
    model = HashModel(nan_token=96)
    engine = make_engine(model)
    good = [t % 96 for t in prompt(9, 150)]
    bad = list(good)
    bad[100] = 96
    fine = [t % 96 for t in prompt(10, 70)]
    engine.submit(request("bad", bad, 5, cuts=(30, 64, 80, 110, 150)))
    engine.submit(request("fine", fine, 6))
    log = run(engine)
    assert log.finished["bad"].reason == "error"
    assert "NaN or infinity in the logits after position 128" in (log.finished["bad"].error or "")
    assert [c.position for c in log.cuts["bad"]] == [30, 64], "cuts of the broken chunk are not published"
    assert log.tokens["bad"] == []
    assert log.tokens["fine"] == expected_tokens(fine, 6)
    engine.submit(request("again", good, 5, restore=log.hold_at("bad", 64)))
    run(engine, log)
    assert log.tokens["again"] == expected_tokens(good, 5)
    release_all(engine)


def test_nan_in_decode_ends_the_request_without_a_hold():
    ids = [t % 50 for t in prompt(11, 20)]
    want = expected_tokens(ids, 10)
    index, poison = next((i, t) for i, t in enumerate(want) if i > 1 and t not in ids + want[:i])
    engine = make_engine(HashModel(nan_token=poison))
    engine.submit(request("a", ids, 10, cuts=(20,)))
    log = run(engine)
    assert log.finished["a"].reason == "error"
    assert log.tokens["a"] == want[: index + 1]
    assert [c.position for c in log.cuts["a"]] == [20]
    release_all(engine)


def test_pages_left_full_of_nan_serve_the_next_request():
    model = HashModel(nan_token=96)
    engine = make_engine(model, kv_tokens=16 * 4, poison_freed=False)
    engine.submit(request("bad", [96] * 40, 2))
    log = run(engine)
    assert log.finished["bad"].reason == "error"
    ids = [t % 96 for t in prompt(13, 45)]
    engine.submit(request("good", ids, 4))
    run(engine, log)
    assert log.tokens["good"] == expected_tokens(ids, 4)


@pytest.mark.parametrize(("steps", "hold"), list(product(range(7), (False, True))))
def test_cancel_at_every_chunk_then_replay(steps, hold):
    """Before admission (0 steps), in each prefill chunk, in decode: what was held continues right, the rest is free."""
    ids = prompt(14, 230)
    engine = make_engine()
    engine.submit(request("a", ids, 50, cuts=(100,)))
    log = Log()
    for _ in range(steps):
        log.add(engine.step())
    engine.cancel("a", hold=hold)
    run(engine, log)
    assert log.finished["a"].reason == "cancelled"
    computed = [0, 64, 128, 192, 230, 231, 232][steps]
    positions = [c.position for c in log.cuts["a"]]
    assert positions == [100] * (computed >= 100) + [computed] * (hold and computed > 0)
    engine.cancel("a")
    assert not engine.has_work
    full = ids + log.tokens["a"] + prompt(15, 5)
    for cut in log.cuts["a"]:
        id = f"from{cut.position}"
        engine.submit(request(id, full, 4, restore=cut.hold))
        engine.release(cut.hold)
        run(engine, log)
        assert log.tokens[id] == expected_tokens(full, 4)
    release_all(engine)


def test_cancel_between_match_and_load_gives_the_pin_back():
    ids = prompt(16, 60)
    engine = make_engine(max_rows=1)
    engine.submit(request("base", ids, 0))
    log = run(engine)
    hold = log.hold_at("base", 60)
    engine.submit(request("busy", prompt(17, 10), 20, hold_at_end=False))
    log.add(engine.step())
    engine.submit(request("queued", [*ids, 1], 5, restore=hold))
    engine.submit(request("hosted", [*ids, 1], 5, restore=engine.copy_out(hold)))
    engine.release(hold)
    engine.cancel("queued", hold=True)
    engine.cancel("hosted")
    log.add(engine.step())
    assert log.finished["queued"].reason == log.finished["hosted"].reason == "cancelled"
    assert log.cuts["queued"] == []
    run(engine, log)
    assert engine.stats().held == 0
    release_all(engine)


def test_an_abort_before_admission_is_not_lost():
    engine = make_engine(max_rows=1)
    engine.submit(request("running", prompt(1, 10), 10))
    log = Log()
    log.add(engine.step())
    engine.submit(request("queued", prompt(2, 10), 10))
    engine.cancel("queued")
    log.add(engine.step())
    assert log.finished["queued"].reason == "cancelled"
    run(engine, log)
    assert log.tokens["queued"] == []


def test_cancelling_what_is_unknown_does_nothing():
    engine = make_engine()
    engine.cancel("nobody")
    assert engine.step() == []


def test_a_thousand_refused_submits_leak_nothing():
    """The fault comes after the hold was found."""
    ids = prompt(18, 40)
    engine = make_engine()
    engine.submit(request("a", ids, 0))
    log = run(engine)
    hold = log.hold_at("a", 40)
    snapshot = engine.copy_out(hold)
    short = replace(snapshot, state={})
    for _ in range(1000):
        with pytest.raises(InvalidRequest):
            engine.submit(request("b", [*ids, 1], restore=hold, sampling=SamplingParams(1, top_p=2.0)))
        with pytest.raises(SnapshotMismatch):
            engine.submit(request("b", ids[:30], restore=hold))
        with pytest.raises(SnapshotMismatch):
            engine.submit(request("b", [*ids, 1], restore=short))
    assert not engine.has_work
    release_all(engine)


def test_save_restart_restore_append_reuses_everything():
    ids = prompt(19, 120)
    engine = make_engine()
    engine.submit(request("first", ids, 10))
    log = run(engine)
    cut = log.cuts["first"][-1]
    snapshot = engine.copy_out(cut.hold)
    longer = ids + log.tokens["first"] + prompt(20, 30)
    restarted = make_engine()
    restarted.submit(request("second", longer, 6, restore=snapshot))
    log = run(restarted)
    assert log.tokens["second"] == expected_tokens(longer, 6)
    assert sum(length for slices in restarted.model.forwards for _, length in slices) == 31 + 5
    release_all(restarted)


def _cut_runs(s: StateSnapshot, tokens: int) -> StateSnapshot:
    return replace(s, kv=(KvRun(0, s.kv[0].rows[:tokens].copy()),))


COMPONENT_FAULTS = {
    "a recurrent component is missing": (
        lambda s: replace(s, state={k: v for k, v in s.state.items() if k != "layer.2.conv"}),
        "missing \\['layer.2.conv'\\]",
    ),
    "an unknown component": (lambda s: replace(s, state={**s.state, "layer.9.delta": s.state["layer.2.delta"]}), "unknown"),
    "a component too short": (lambda s: replace(s, state={**s.state, "layer.2.delta": np.zeros(4, np.uint8)}), "layer.2.delta"),
    "kv one token short": (lambda s: _cut_runs(s, 49), "kv rows end at 49, the snapshot is at 50"),
    "no kv": (lambda s: replace(s, kv=()), "kv rows end at 0"),
    "kv not from the start": (lambda s: replace(s, kv=(KvRun(10, s.kv[0].rows[10:].copy()),)), "starts at 10, expected 0"),
    "kv with a gap": (
        lambda s: replace(s, kv=(KvRun(0, s.kv[0].rows[:10].copy()), KvRun(20, s.kv[0].rows[20:].copy()))),
        "starts at 20, expected 10",
    ),
    "kv of another width": (lambda s: replace(s, kv=(KvRun(0, s.kv[0].rows[:, :-4].copy()),)), "expected contiguous uint8"),
    "kv not contiguous": (lambda s: replace(s, kv=(KvRun(0, np.asfortranarray(s.kv[0].rows)),)), "expected contiguous uint8"),
    "another position": (lambda s: replace(s, position=49), "kv rows end at 50"),
    "position zero": (lambda s: replace(s, position=0), "restored position 0"),
    "logits of another vocabulary": (lambda s: replace(s, logits=np.zeros(5, np.float32)), "logits"),
    "logits not finite": (lambda s: replace(s, logits=np.full(97, np.nan, np.float32)), "NaN"),
}


@pytest.mark.parametrize("fault", COMPONENT_FAULTS)
def test_a_snapshot_with_one_bad_component_is_refused_and_the_good_one_accepted(fault):
    ids = prompt(21, 50)
    snapshot = snapshot_of(ids)
    change, message = COMPONENT_FAULTS[fault]
    engine = make_engine()
    with pytest.raises(SnapshotMismatch, match=message):
        engine.submit(request("a", [*ids, 3], restore=change(snapshot)))
    assert not engine.has_work
    engine.submit(request("a", [*ids, 3], 4, restore=snapshot))
    log = run(engine)
    assert log.progress["a"] == [51]
    assert log.tokens["a"] == expected_tokens([*ids, 3], 4)


def test_a_snapshot_of_a_recurrent_model_does_not_fit_one_without():
    from tests.fakes.hash_model import make_spec

    engine = make_engine(HashModel(make_spec(recurrent=False)))
    ids = prompt(22, 20)
    with pytest.raises(SnapshotMismatch, match="unknown"):
        engine.submit(request("a", [*ids, 1], restore=snapshot_of(ids)))


def test_warm_and_cold_runs_share_their_chunk_edges():
    """Restored at any position, the passes behind the first common edge are the same as in a cold run."""
    ids = prompt(23, 300)
    engine = make_engine()
    engine.submit(request("cold", ids, 1, cuts=(10, 64, 100, 190), hold_at_end=False))
    log = run(engine)
    cold = [slices[0] for slices in engine.model.forwards]
    for position in (10, 64, 100, 190):
        engine.model.forwards.clear()
        engine.submit(request(f"w{position}", ids, 1, restore=log.hold_at("cold", position), hold_at_end=False))
        run(engine, log)
        warm = [slices[0] for slices in engine.model.forwards]
        edge = next(context for context, _ in cold if context >= position)
        assert [part for part in warm if part[0] >= edge] == [part for part in cold if part[0] >= edge]
        assert sum(length for _, length in warm) == 300 - position


def test_a_pass_that_raises_ends_its_requests_and_no_others():
    model = HashModel(raise_token=96)
    engine = make_engine(model, max_rows=2)
    ids = [t % 96 for t in prompt(24, 10)]
    engine.submit(request("bad", [*ids, 96], 3, cuts=(4,), due_us=0))
    engine.submit(request("beside", ids, 3))
    engine.submit(request("queued", ids, 3))
    with pytest.raises(RuntimeError, match="told to fail"):
        engine.step()
    engine.check()
    log = run(engine)
    assert log.finished["bad"].error == log.finished["beside"].error == "the forward pass failed"
    assert log.cuts["bad"] == []
    assert log.tokens["queued"] == expected_tokens(ids, 3)
    release_all(engine)


def test_seeded_sampling_does_not_depend_on_batch_restore_or_preemption():
    ids = prompt(25, 30)
    sampling = SamplingParams(20, temperature=0.9, top_p=0.95, seed=42, presence_penalty=0.3)
    alone = make_engine()
    alone.submit(request("a", ids, sampling=sampling, cuts=(20,)))
    log = run(alone)
    want = log.tokens["a"]
    assert len(set(want)) > 5
    crowded = make_engine(page_size=4, kv_tokens=4 * 22, chunk_tokens=8)
    for i in range(3):
        crowded.submit(request(f"n{i}", prompt(i, 12), 25, hold_at_end=False))
    crowded.submit(request("a", ids, sampling=sampling, restore=alone.copy_out(log.hold_at("a", 20)), hold_at_end=False))
    got = run(crowded)
    assert crowded.stats().preemptions > 0
    assert got.tokens["a"] == want


def test_a_choice_that_fails_ends_its_request_and_no_others(monkeypatch):
    engine = make_engine(max_rows=2)
    ids = prompt(26, 10)
    engine.submit(request("bad", ids, sampling=SamplingParams(3, temperature=1.0)))
    engine.submit(request("beside", ids, 3))
    monkeypatch.setattr(Sampler, "_draw", lambda *_: [][-1])
    log = run(engine)
    assert log.finished["bad"].reason == "error"
    assert "sampling" in (log.finished["bad"].error or "")
    assert log.tokens["beside"] == expected_tokens(ids, 3)
    release_all(engine)


def test_a_step_that_fails_between_passes_leaves_no_request_behind(monkeypatch):
    """Not even one that is wholly restored, which no later pass would touch again."""
    engine = make_engine(max_rows=2)
    ids = prompt(27, 10)
    engine.submit(request("cold", ids, 1, cuts=(10,)))
    hold = run(engine).hold_at("cold", 10)
    engine.submit(request("warm", ids, 3, restore=hold))
    monkeypatch.setattr(Outcomes, "_accept", lambda *_: [][-1])
    with pytest.raises(IndexError):
        engine.step()
    monkeypatch.undo()
    assert engine.has_work
    assert run(engine).finished["warm"].reason == "error"
    assert not engine.has_work
    engine.submit(request("again", ids, 3))
    assert run(engine).tokens["again"] == expected_tokens(ids, 3)
