"""The learned cost of steps against machines whose cost is known."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.pace import KNEE, Pace, Work, chunk_now, chunk_sizes, chunk_within, pairs


def laptop(work: Work) -> float:
    """A machine with experts in host memory: few tokens cost nearly as much as a chunk."""
    us = 20_000.0 + 3000 * work.rows + work.context / 4
    if work.prefill:
        us += 7000 * min(work.prefill, KNEE) + 900 * work.prefill + work.pairs / 40
    return us


def small(work: Work) -> float:
    return 2500.0 + 900 * work.rows + work.context / 20 + 420 * work.prefill + work.pairs / 100


def some_work(rng: random.Random, mixed: bool = True) -> Work:
    rows = rng.choice((0, 0, 1, 2, 4, 8)) if mixed else rng.choice((1, 2, 4, 8))
    prefill = rng.choice((8, 64, 128, 256, 512, 300, 17)) if mixed or not rows else 0
    start = rng.randrange(30_000)
    return Work(rows, rows * rng.randrange(8000), prefill, pairs(start, start + prefill) if prefill else 0)


@pytest.mark.parametrize("machine", [laptop, small])
def test_after_some_steps_any_step_is_predicted(machine) -> None:
    rng, pace = random.Random(1), Pace()
    for number in range(300):
        work = some_work(rng, mixed=number % 3 == 0)
        pace.observe(work, round(machine(work) * rng.uniform(0.9, 1.1)))
    errors = sorted(abs(pace.step_us(work) / machine(work) - 1) for work in (some_work(rng) for _ in range(200)))
    assert errors[100] < 0.08
    assert errors[190] < 0.25


@pytest.mark.parametrize("machine", [laptop, small])
def test_a_whole_prompt_costs_what_its_steps_cost(machine) -> None:
    rng, pace = random.Random(2), Pace()
    for number in range(300):
        work = some_work(rng, mixed=number % 3 == 0)
        pace.observe(work, round(machine(work)))
    for context, tokens, chunk in ((0, 30_000, 512), (9_000, 700, 256), (500, 8, 512)):
        true = 0.0
        for start in range(context, context + tokens, chunk):
            end = min(start + chunk, context + tokens)
            true += machine(Work(2, 4000, end - start, pairs(start, end)))
        assert pace.prefill_us(context, tokens, chunk, 2, 4000) == pytest.approx(true, rel=0.12)
    assert pace.prefill_us(100, 0, 512) == 0


def test_it_follows_a_machine_that_becomes_slower_and_shrugs_off_one_interruption() -> None:
    pace = Pace()
    work = Work(0, 0, 512, pairs(0, 512))
    for _ in range(60):
        pace.observe(work, 100_000)
    pace.observe(work, 5_000_000)
    assert pace.step_us(work) < 120_000
    for _ in range(300):
        pace.observe(work, 300_000)
    assert pace.step_us(work) == pytest.approx(300_000, rel=0.1)


def test_what_is_kept_gives_the_same_answers() -> None:
    rng, pace = random.Random(3), Pace()
    for _ in range(100):
        work = some_work(rng)
        pace.observe(work, round(small(work)))
    again = Pace()
    before = pace.step_us(Work(2, 5000, 256, pairs(900, 1156)))
    again.recall(pace.known())
    assert again.step_us(Work(2, 5000, 256, pairs(900, 1156))) == pytest.approx(before, rel=1e-3)
    assert again.seen == pace.seen
    for bad in ([], [1] * 7, [-1] * 8, [1 << 63] * 8):
        with pytest.raises(ValueError, match="known"):
            again.recall(bad)


@given(chunk=st.integers(1, 4096), least=st.integers(1, 512), start=st.integers(0, 5000), length=st.integers(1, 5000))
def test_shorter_chunks_keep_every_edge_of_the_whole_ones(chunk, least, start, length):
    sizes = chunk_sizes(chunk, min(least, chunk))
    assert sizes[0] == chunk
    assert all(a == 2 * b for a, b in pairwise(sizes))
    whole = {p for p in range(start, start + length) if p % chunk == 0}
    assert all(whole <= {p for p in range(start, start + length) if p % size == 0} for size in sizes)


@given(fixed=st.integers(0, 500), each=st.integers(0, 20), limit=st.integers(0, 5000), waste=st.integers(0, 8))
def test_the_largest_chunk_within_the_limit_that_does_not_waste_the_pass(fixed, each, limit, waste):
    sizes = chunk_sizes(512, 64)

    def cost(size):
        return fixed + each * size

    chosen = chunk_within(limit, sizes, cost, waste)
    thrifty = [size for size in sizes if 8 * cost(size) * 512 <= (8 + waste) * cost(512) * size]
    within = [size for size in thrifty if cost(size) <= limit]
    assert chosen == (within[0] if within else thrifty[-1])


def knowing(step: int, token: int, pair_ps: int, row: int = 2_000) -> Pace:
    """A pace that has seen a machine: µs of a step, of a token and of a row, ps of a token looked back on."""
    pace, rng = Pace(), random.Random(1)
    for _ in range(400):
        rows, size, start = rng.choice((0, 4)), rng.choice((0, 64, 128, 256, 512)), rng.choice((0, 4_000, 30_000))
        work = Work(rows, rows * 200, size, pairs(start, start + size))
        pace.observe(work, step + row * rows + token * size + pair_ps * work.pairs // 1_000_000)
    return pace


SIZES = chunk_sizes(512, 64)
LIMIT = 120_000


def test_a_chunk_fits_the_deepest_prompt_whoever_is_first() -> None:
    pace = knowing(step=10_000, token=370, pair_ps=40_000)
    assert chunk_now(pace.step_us, SIZES, LIMIT, 4, 800, 0, [40_000_000], presses=False) == 256
    deep = chunk_now(pace.step_us, SIZES, LIMIT, 4, 800, 28_000, [60_000, 40_000_000], presses=False)
    assert deep == 64
    assert pace.step_us(Work(4, 800, deep, pairs(28_000, 28_000 + deep))) <= LIMIT


def test_short_prompts_beside_a_long_one_do_not_end_its_smooth_chunks() -> None:
    pace = knowing(step=60_000, token=1_000, pair_ps=0)
    smooth = chunk_now(pace.step_us, SIZES, LIMIT, 4, 800, 0, [40_000_000], presses=False)
    assert smooth == chunk_now(pace.step_us, SIZES, LIMIT, 4, 800, 0, [40_000_000, 90_000], presses=False) == 128
    assert chunk_now(pace.step_us, SIZES, LIMIT, 4, 800, 0, [40_000_000, 9_000_000], presses=False) == 256, (
        "much work goes before"
    )
    assert chunk_now(pace.step_us, SIZES, LIMIT, 4, 800, 0, [40_000_000], presses=True) == 256, "so does one in a hurry"


def test_a_lone_prompt_is_cut_for_who_may_come_only_where_that_is_cheap_and_helps() -> None:
    cheap = knowing(step=10_000, token=800, pair_ps=0)
    assert chunk_now(cheap.step_us, SIZES, LIMIT, 0, 0, 0, [1_000_000], presses=False) == 128
    dear = knowing(step=150_000, token=3_300, pair_ps=0)
    assert chunk_now(dear.step_us, SIZES, LIMIT, 0, 0, 0, [1_000_000], presses=False) == 512
    assert chunk_now(cheap.step_us, SIZES, 0, 4, 800, 0, [1_000_000, 1_000_000], presses=True) == 512, "0 is no limit"
