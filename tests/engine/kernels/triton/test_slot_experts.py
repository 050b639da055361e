"""Experts in slots: fetched whole, computed in place, summed with the CPU's part; against the plain ones."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import plain, reference
from tests.budget import FULL

from .common import DEVICE, DTYPES, close, few, ints, poisoned, randn, spaced

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops


@pytest.fixture(params=DTYPES, ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def pool_of(slots: int, inter: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down as views of one record a slot, with a gap behind each."""
    split, whole = 2 * inter * hidden, 3 * inter * hidden
    memory = poisoned(slots, whole + 24, dtype=dtype)
    gate_up, down = memory[:, :split].unflatten(1, (2 * inter, hidden)), memory[:, split:whole].unflatten(1, (hidden, inter))
    gate_up.copy_(randn(slots, 2 * inter, hidden, dtype=dtype, seed=1) / hidden**0.5)
    down.copy_(randn(slots, hidden, inter, dtype=dtype, seed=2) / inter**0.5)
    return gate_up, down


def routes(tokens: int, top_k: int, slots: int, holes: float, seed: int) -> torch.Tensor:
    """Distinct slots for each token, some of them −1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, slots, generator=generator).argsort(1)[:, :top_k]
    return torch.where(torch.rand(tokens, top_k, generator=generator) < holes, -1, ids).int().to(DEVICE)


@few
@given(
    tokens=st.sampled_from([1, 1, 2, 5, 16, 19]),
    top_k=st.integers(1, 4),
    hidden=st.sampled_from([20, 64, 150]),
    inter=st.sampled_from([8, 33]),
    holes=st.sampled_from([0.0, 0.5, 1.0]),
    accumulate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_slot_experts_equal_the_plain_ones(
    dtype: torch.dtype, tokens: int, top_k: int, hidden: int, inter: int, holes: float, accumulate: bool, seed: int
) -> None:
    if tokens > 5 and not FULL:  # either is several blocks; both together take the interpreter seconds
        hidden = 20
    gate_up, down = pool_of(6, inter, hidden, dtype)
    x, ids, weights = spaced(randn(tokens, hidden, dtype=dtype)), routes(tokens, top_k, 6, holes, seed), randn(tokens, top_k)
    out = randn(tokens, hidden, seed=5) if accumulate else poisoned(tokens, hidden)
    inner = poisoned(tokens * top_k, inter, dtype=dtype)
    want = reference.experts_forward(x.float(), ids, weights, gate_up.float(), down.float()) + (out if accumulate else 0)
    ops.slot_experts(x, ids, weights, gate_up, down, inner, out, accumulate)
    close(out, want, dtype)


def host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Where the CPU's experts lie: in pinned memory."""
    memory = [t.cpu() for t in tensors]
    return [t.pin_memory() for t in memory] if DEVICE == "cuda" else memory


@few
@given(
    tokens=st.sampled_from([1, 1, 2, 4, 17]),
    hidden=st.sampled_from([20, 150]),
    inter=st.sampled_from([33, 64]),
    holes=st.sampled_from([0.0, 0.5]),
    misses=st.sampled_from([1, 2, 3, 9]),
    seed=st.integers(0, 99),
)
def test_the_last_rows_of_experts_in_host_memory_are_added(
    dtype: torch.dtype, tokens: int, hidden: int, inter: int, holes: float, misses: int, seed: int
) -> None:
    shares = (0, 16, 0, 32)
    taken = shares[min(misses, 3)]
    gate_up, down = host(*pool_of(6, inter, hidden, dtype))
    gate_up.unflatten(1, (2, inter))[:, :, : inter - taken] = float("nan")
    down[:, :, : inter - taken] = float("nan")
    x, ids, weights = spaced(randn(tokens, hidden, dtype=dtype)), routes(tokens, 2, 6, holes, seed), randn(tokens, 2)
    out, inner = randn(tokens, hidden, seed=5), poisoned(tokens * 2, inter, dtype=dtype)
    want = out.clone()
    if taken:
        part = slice(inter - taken, inter)
        wide = [t.float().to(DEVICE) for t in (gate_up, down)]
        want += reference.experts_forward(x.float(), ids, weights, *wide, part)
    counts = ints([0, int((ids >= 0).sum()), 0, misses])
    for kernels in (ops, plain) if DEVICE == "cpu" else (ops,):
        got = out.clone()
        kernels.bank_experts(x, ids, weights, counts, ints(shares), gate_up, down, inner, got)
        close(got, want, dtype)
        if not taken:
            assert torch.equal(got, out)


@few
@given(
    tokens=st.sampled_from([1, 1, 3]),
    fetched=st.integers(0, 6),
    resident=st.integers(0, 3),
    sixteenths=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_every_division_of_a_layers_experts_sums_to_the_layer(
    dtype: torch.dtype, tokens: int, fetched: int, resident: int, sixteenths: int, seed: int
) -> None:
    """Some experts in slots, some fetched, and of the others the first rows on the CPU, the last ones read by the device."""
    experts, inter, hidden, taken = 6, 64, 48, 16 * sixteenths
    gate_up, down = host(*pool_of(experts, inter, hidden, dtype))
    x, ids, weights = randn(tokens, hidden, dtype=dtype), routes(tokens, 2, experts, 0.2, seed), randn(tokens, 2)
    pools = [t.to(DEVICE) for t in (gate_up, down)]
    here, there = ids.clone(), ids.clone()
    here[ids >= min(experts, resident + fetched)] = -1
    there[ids < min(experts, resident + fetched)] = -1
    out, inner = torch.zeros(tokens, hidden, device=DEVICE), poisoned(tokens * 2, inter, dtype=dtype)
    counts = ints([fetched, int((there >= 0).sum()), 0, 1])
    ops.slot_experts(x, here, weights, *pools, inner, out, False)
    ops.bank_experts(x, there, weights, counts, ints([0, taken]), gate_up, down, inner, out)
    out += reference.experts_forward(x.cpu(), there.cpu(), weights.cpu(), gate_up, down, slice(inter - taken)).to(DEVICE)
    close(out, reference.experts_forward(x.float(), ids, weights, *(t.float() for t in pools)), dtype)


@pytest.mark.parametrize("tokens", [1, 2])
def test_without_experts_on_the_cpu_nothing_is_read_and_nothing_added(dtype: torch.dtype, tokens: int) -> None:
    gate_up, down = host(*pool_of(3, 32, 16, dtype))
    gate_up[:], down[:] = float("nan"), float("nan")
    x, ids, weights = randn(tokens, 16, dtype=dtype), ints([[-1, -1]] * tokens), randn(tokens, 2)
    out, inner = randn(tokens, 16), poisoned(tokens * 2, 32, dtype=dtype)
    before = out.clone()
    ops.bank_experts(x, ids, weights, ints([2, 0, 0, 2]), ints([0, 16, 16]), gate_up, down, inner, out)
    assert torch.equal(out, before)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "inter"), [(1, 520), (3, 520), (70, 20)])
def test_slot_experts_in_blocks_of_every_dimension(dtype: torch.dtype, tokens: int, inter: int) -> None:
    """More inner values, columns and tokens than one block holds."""
    gate_up, down = pool_of(4, inter, 40, dtype)
    x, ids, weights = randn(tokens, 40, dtype=dtype), routes(tokens, 2, 4, 0.2, 1), randn(tokens, 2)
    out, inner = poisoned(tokens, 40), poisoned(tokens * 2, inter, dtype=dtype)
    ops.slot_experts(x, ids, weights, gate_up, down, inner, out, False)
    close(out, reference.experts_forward(x.float(), ids, weights, gate_up.float(), down.float()), dtype)


def test_a_slot_that_nobody_chose_is_not_read(dtype: torch.dtype) -> None:
    for tokens in (1, 2):
        gate_up, down = pool_of(3, 8, 16, dtype)
        gate_up[1], down[1] = float("nan"), float("nan")
        x, ids, weights = randn(tokens, 16, dtype=dtype), ints([[0, 2]] * tokens), randn(tokens, 2)
        out, inner = poisoned(tokens, 16), poisoned(tokens * 2, 8, dtype=dtype)
        ops.slot_experts(x, ids, weights, gate_up, down, inner, out, False)
        assert not out.isnan().any()


@few
@given(
    work=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=5, unique_by=lambda pair: pair[1]),
    record=st.sampled_from([16, 48, 65552]),
)
def test_fetch_copies_whole_records_and_nothing_else(work: list[tuple[int, int]], record: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bank = torch.randint(0, 256, (9, record), generator=generator, dtype=torch.uint8)
    bank = bank.pin_memory() if DEVICE == "cuda" else bank
    pool = torch.randint(0, 256, (5, record + 32), generator=generator, dtype=torch.uint8).to(DEVICE)
    want = pool.clone()
    for source, slot in work:
        want[slot, :record] = bank[source].to(DEVICE)
    ops.fetch(bank, pool[:, :record], ints([*work, (8, 4), (8, 4)]), ints([len(work), 9, 9, 9]), ctas=3)
    assert torch.equal(pool, want)


def test_fetch_refuses_records_that_do_not_fit_wide_words() -> None:
    bank = torch.zeros(2, 24, dtype=torch.uint8)
    with pytest.raises(ShapeMismatch, match="multiples of 16"):
        ops.fetch(bank, bank.clone(), ints([[0, 0]]), ints([1]))


class Box:
    """The mapped memory of a hand-off."""

    def __init__(self, tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
        def mapped(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            made = torch.full(shape, -7, dtype=kind)
            return made.pin_memory() if DEVICE == "cuda" else made

        self.request, self.reply = mapped(16), mapped(16)
        self.x, self.ids = mapped(tokens, hidden, kind=dtype), mapped(tokens, top_k)
        self.weights = mapped(tokens, top_k, kind=torch.float32)
        self.epoch, self.status = ints([40]), ints([0, 0, 0, 0])

    def publish(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, layer: int) -> None:
        where = (self.epoch, layer, self.request, self.x, self.ids, self.weights)
        ops.publish(x, ids, weights, counts, ints([0, 32, 16]), *where)
        if DEVICE == "cuda":
            torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("tokens", "hidden", "layer", "misses"), [(1, 20, 0, 1), (3, 5000, 1, 2), (2, 64, 7, 9), (6, 4100, 2, 1)]
)
def test_publish_writes_the_payload_under_a_new_epoch(
    dtype: torch.dtype, tokens: int, hidden: int, layer: int, misses: int
) -> None:
    box = Box(7, hidden, 2, dtype)
    x, ids, weights = spaced(randn(tokens, hidden, dtype=dtype)), ints([[3, -1]] * tokens), randn(tokens, 2)
    box.publish(x, ids, weights, ints([0, 1, 0, misses]), layer)
    assert box.epoch.tolist() == [41]
    assert box.request[:4].tolist() == [41, layer, tokens, (0, 32, 16)[min(misses, 2)]]
    for got, want in ((box.x, x), (box.ids, ids), (box.weights, weights)):
        assert torch.equal(got[:tokens], want.cpu())
        assert (got[tokens:] == -7).all()


def test_a_layer_without_cpu_work_publishes_nothing_and_waits_for_nothing(dtype: torch.dtype) -> None:
    box, counts = Box(1, 16, 2, dtype), ints([3, 0, 5, 3])
    for tokens in (1, 6):
        box = Box(6, 16, 2, dtype)
        box.publish(randn(tokens, 16, dtype=dtype), ints([[-1, -1]] * tokens), randn(tokens, 2), counts, 3)
        assert box.epoch.tolist() == [40]
        assert (box.request == -7).all()
        assert (box.x == -7).all()
    ops.wait_reply(counts, box.epoch, box.reply, 10**9, box.status)
    assert box.status.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("answer", "fault"), [((40, 0), 0), ((40, 5), 2), ((39, 0), 1), ((41, 0), 1)])
def test_wait_ends_with_the_reply_or_with_a_fault(answer: tuple[int, int], fault: int) -> None:
    box = Box(1, 16, 2, torch.float32)
    box.reply[0], box.reply[1] = answer
    ops.wait_reply(ints([0, 1, 0, 0]), box.epoch, box.reply, 50, box.status)
    assert box.status.tolist()[:2] == [fault, 40 if fault else 0]


def test_after_a_fault_nothing_is_waited_for_and_the_fault_stays() -> None:
    box = Box(1, 16, 2, torch.float32)
    box.status.copy_(ints([2, 7, 0, 0]))
    ops.wait_reply(ints([0, 1, 0, 0]), box.epoch, box.reply, 10**9, box.status)
    assert box.status.tolist() == [2, 7, 0, 0]


def test_wait_sees_a_reply_that_comes_while_it_polls() -> None:
    box = Box(1, 16, 2, torch.float32)

    def answer() -> None:
        while box.reply[1] != 0:
            time.sleep(0)
        for _ in range(50):
            time.sleep(0)  # meanwhile the waiting thread polls more than once
        box.reply[0] = 40

    thread = threading.Thread(target=answer)
    thread.start()
    box.reply[1] = 0
    ops.wait_reply(ints([0, 1, 0, 0]), box.epoch, box.reply, 60_000_000, box.status)
    thread.join()
    assert box.status.tolist() == [0, 0, 0, 0]


def test_stamps_add_up_the_time_and_the_records_of_fetches() -> None:
    clock, counts = ints([100, 5, 0, 0], torch.int64), ints([2, 0, 0, 0])
    ops.stamp(clock, counts, True)
    ops.stamp(clock, counts, False)
    spent, records, began, _ = clock.tolist()
    assert spent > 100
    assert records == 7
    assert began > 0
    ops.stamp(clock, ints([0, 3, 0, 0]), True)
    ops.stamp(clock, ints([0, 3, 0, 0]), False)
    assert clock.tolist()[:2] == [spent, 7]
