"""Who runs when, on a clock that the model moves: pauses for pressing turns, steps within the decode gap, planned pages."""

from __future__ import annotations

from typing import Any

from engine.batch import ForwardBatch
from tests.engine.helpers import Log, make_engine, prompt, release_all, request, run
from tests.fakes.hash_model import HashModel, expected_tokens, make_spec

MS = 1_000_000


class Ticking(HashModel):
    """A pass takes fixed_ms and each_us per prompt token; `now_ns` is the time."""

    def __init__(self, fixed_ms: int = 5, each_us: int = 1000, **more: Any) -> None:
        super().__init__(**more)
        self.fixed_ms, self.each_us = fixed_ms, each_us
        self.now_ns = 0

    def forward(self, batch: ForwardBatch, kv: Any, states: Any) -> Any:
        prefill = sum(seq.length for seq in batch.seqs if seq.length > 1)
        self.now_ns += self.fixed_ms * MS + self.each_us * prefill * 1000
        return super().forward(batch, kv, states)


def ticking(fixed_ms: int = 5, each_us: int = 1000, **settings: Any):
    model = Ticking(fixed_ms, each_us, spec=make_spec(max_context=8192))
    return model, make_engine(model, clock_ns=lambda: model.now_ns, **settings)


def test_a_long_answer_is_paused_for_a_turn_that_cannot_wait_and_goes_on_unchanged():
    model, engine = ticking(max_rows=1)
    engine.submit(request("long", prompt(1, 20), 300, hold_at_end=False))
    log = Log()
    while len(log.tokens["long"]) < 100:
        log.add(engine.step())
    urgent = prompt(2, 40)
    engine.submit(request("urgent", urgent, 5, due_us=model.now_ns // 1000 + 60_000, hold_at_end=False))
    log.add(engine.step())
    engine.check()
    assert log.tokens["urgent"], "it was let in at once"
    assert engine.stats().pauses == 1
    run(engine, log)
    assert log.tokens["long"] == expected_tokens(prompt(1, 20), 300)
    assert log.tokens["urgent"] == expected_tokens(urgent, 5)
    assert log.progress["long"] == [20], "nothing was computed twice"
    assert sum(length for step in model.forwards for _, length in step) == 20 + 299 + 40 + 4
    release_all(engine)


def test_an_answer_within_its_quantum_is_not_paused_so_that_pauses_cannot_stop_everything():
    model, engine = ticking(max_rows=1)
    engine.submit(request("first", prompt(1, 20), 300, hold_at_end=False))
    log = Log()
    for _ in range(10):
        log.add(engine.step())
    engine.submit(request("urgent", prompt(2, 40), 5, due_us=model.now_ns // 1000 + 330_000, hold_at_end=False))
    while not log.progress["urgent"]:
        log.add(engine.step())
        assert engine.stats().pauses == (1 if log.progress["urgent"] else 0)
    assert 64 <= len(log.tokens["first"]) <= 66
    run(engine, log)
    assert log.tokens["first"] == expected_tokens(prompt(1, 20), 300)


def test_answers_that_never_end_take_turns_on_one_row():
    """Three of 400 tokens, 20 seconds each: each is paused for the others again and again, all get on."""
    _, engine = ticking(50, max_rows=1)
    prompts = {str(i): prompt(i, 10 + i) for i in range(3)}
    for id, ids in prompts.items():
        engine.submit(request(id, ids, 400, due_us=100_000, hold_at_end=False))
    log = run(engine)
    assert engine.stats().pauses >= 3
    first_end = min(len(log.tokens[id]) for id in prompts)
    assert first_end == 400
    for id, ids in prompts.items():
        assert log.tokens[id] == expected_tokens(ids, 400)
    release_all(engine)


def test_a_long_prompt_with_time_gives_its_row_to_a_pressing_turn():
    model, engine = ticking(max_rows=1)
    engine.submit(request("long", prompt(1, 900), 2, due_us=60_000_000, hold_at_end=False))
    log = Log()
    for _ in range(3):
        log.add(engine.step())
    engine.submit(request("urgent", prompt(2, 40), 3, due_us=model.now_ns // 1000 + 70_000, hold_at_end=False))
    log.add(engine.step())
    assert log.tokens["urgent"]
    run(engine, log)
    assert log.progress["long"] == [*range(64, 900, 64), 900], "its chunks went on where they stopped"
    assert log.tokens["long"] == expected_tokens(prompt(1, 900), 2)


def test_a_cut_of_a_paused_request_is_still_held_and_a_cancelled_one_leaves_nothing():
    model, engine = ticking(max_rows=1)
    engine.submit(request("long", prompt(1, 300), 2, cuts=(250,), due_us=60_000_000))
    log = Log()
    log.add(engine.step())
    for id in ("urgent", "gone"):
        engine.submit(request(id, prompt(2, 40), 3, due_us=model.now_ns // 1000 + 120_000, hold_at_end=False))
    log.add(engine.step())
    engine.cancel("gone")
    run(engine, log)
    assert log.hold_at("long", 250)
    assert log.finished["gone"].reason == "cancelled"
    release_all(engine)


def test_steps_stay_within_the_gap_while_an_answer_runs_and_are_whole_when_it_has_ended():
    model, engine = ticking(30, chunk_tokens=512, decode_gap_ms=120, kv_tokens=16 * 600)
    engine.submit(request("stream", prompt(1, 30), 60, hold_at_end=False))
    log = Log()
    log.add(engine.step())
    engine.submit(request("long", prompt(2, 6000), 1, hold_at_end=False))
    gaps: list[int] = []
    while "stream" not in log.finished:
        began = model.now_ns
        log.add(engine.step())
        gaps.append((model.now_ns - began) // MS)
    # 64 tokens at 1 ms and 30 ms for the pass fit, 128 do not. Alone, that would cost a third more.
    assert max(gaps[1:]) <= 120, "the first one taught it what a prompt costs"
    assert log.progress["long"][-1] >= 64 * 40
    before = log.progress["long"][-1]
    assert all(position % 64 == 0 for position in log.progress["long"])
    run(engine, log)
    assert [p for p in log.progress["long"] if p > before] == [*(p for p in range(512, 6000, 512) if p > before), 6000]
    assert log.tokens["stream"] == expected_tokens(prompt(1, 30), 60)
    assert log.tokens["long"] == expected_tokens(prompt(2, 6000), 1)


def test_short_prompts_that_come_beside_a_long_one_do_not_lengthen_its_steps():
    model, engine = ticking(30, chunk_tokens=512, decode_gap_ms=120, kv_tokens=16 * 600)
    engine.submit(request("stream", prompt(1, 30), 60, hold_at_end=False))
    log, gaps = Log(), []
    log.add(engine.step())
    engine.submit(request("long", prompt(2, 6000), 1, hold_at_end=False))
    while "stream" not in log.finished:
        if len(gaps) % 8 == 4:
            engine.submit(request(f"short{len(gaps)}", prompt(3 + len(gaps), 30), 1, hold_at_end=False))
        began = model.now_ns
        log.add(engine.step())
        gaps.append((model.now_ns - began) // MS)
    assert max(gaps[1:]) <= 120
    assert sum(name.startswith("short") for name in log.finished) >= 6


def test_a_lone_prompt_is_cut_where_that_costs_little_so_that_who_comes_soon_hears_what_to_expect():
    model, engine = ticking(chunk_tokens=512, decode_gap_ms=120, kv_tokens=16 * 600)
    engine.submit(request("teacher", prompt(1, 2000), 1, hold_at_end=False))
    run(engine)
    engine.submit(request("long", prompt(2, 4000), 1, hold_at_end=False))
    log, steps = Log(), []
    while "long" not in log.finished:
        began = model.now_ns
        log.add(engine.step())
        steps.append((model.now_ns - began) // MS)
    assert max(steps) <= 120
    assert sum(steps) <= 1.125 * (4000 + 8 * 5)
    assert log.tokens["long"] == expected_tokens(prompt(2, 4000), 1)


def test_a_pass_that_costs_the_same_whatever_it_carries_is_not_cut_up():
    """Experts streamed from the host: 600 ms for 64 tokens as for 512. Smaller chunks would only multiply the wait."""
    _, engine = ticking(600, 0, chunk_tokens=512, decode_gap_ms=120, kv_tokens=16 * 400)
    engine.submit(request("stream", prompt(1, 512), 30, hold_at_end=False))
    log = Log()
    while len(log.tokens["stream"]) < 3:
        log.add(engine.step())
    engine.submit(request("long", prompt(2, 3000), 1, hold_at_end=False))
    run(engine, log)
    assert log.progress["long"] == [512, 1024, 1536, 2048, 2560, 3000]


def test_requests_that_would_soon_need_pages_wait_instead_of_being_let_in_and_sent_away():
    """32 pages of 4; each answer takes 12 of them. What answers take is known after the first one."""
    engine = make_engine(page_size=4, kv_tokens=4 * 32, chunk_tokens=16, snapshot_rows=8)
    engine.submit(request("teacher", prompt(0, 8), 40, hold_at_end=False))
    run(engine)
    prompts = {str(i): prompt(i, 8) for i in range(6)}
    for id, ids in prompts.items():
        engine.submit(request(id, ids, 40, hold_at_end=False))
    log = run(engine)
    assert engine.stats().preemptions == 0
    assert max(len(step) for step in engine.model.forwards) == 2  # pyright: ignore[reportAttributeAccessIssue]
    for id, ids in prompts.items():
        assert log.tokens[id] == expected_tokens(ids, 40)


def test_an_owner_with_many_prompts_gets_no_more_steps_than_one_with_a_single_one():
    _, engine = ticking(max_rows=16, chunk_tokens=64, decode_gap_ms=0)
    log, far = Log(), 10**12
    for number in range(8):
        name = f"many{number}"
        engine.submit(request(name, prompt(number, 640), 1, due_us=far, owner="many", share=name, hold_at_end=False))
    for _ in range(8):
        log.add(engine.step())
    engine.submit(request("one", prompt(9, 640), 1, due_us=far, owner="one", share="one", hold_at_end=False))
    before = sum(map(len, log.progress.values()))
    while not log.tokens["one"]:
        log.add(engine.step())
    steps = sum(map(len, log.progress.values())) - before
    assert steps <= 2 * 10 + 1, "of its ten steps each waited for at most one of the other owner's"
    run(engine, log)
    release_all(engine)
