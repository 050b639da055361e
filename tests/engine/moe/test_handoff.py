"""The hand-off to the CPU executor over plain shared memory: right numbers, no reply taken for another, and a dead or hanging
executor is an error in time."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device.host import HostDevice
from engine.kernels import cpu, plain, reference
from engine.moe import handoff
from engine.moe.handoff import BoxLayout, Executor, Mailbox, NativeExecutor, PlainExecutor, explain
from engine.moe.host_bank import HostBank, Record

LAYERS, EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 3, 6, 48, 20, 3, 16
SOON_US = 200_000
needs_library = pytest.mark.skipif(not cpu.available(), reason="needs the C++ library")
KINDS = [pytest.param(NativeExecutor, marks=needs_library, id="native"), pytest.param(PlainExecutor, id="plain")]


def bank(dtype: torch.dtype = torch.float32) -> HostBank:
    made = HostBank(LAYERS * EXPERTS, Record(HIDDEN, INTER, dtype))
    generator = torch.Generator().manual_seed(3)
    for _ in range(LAYERS):
        layer = made.layer(EXPERTS, INTER, HIDDEN, dtype)
        layer.gate_up.copy_(torch.randn(layer.gate_up.shape, generator=generator) / 4)
        layer.down.copy_(torch.randn(layer.down.shape, generator=generator) / 4)
    return made


class Side:
    """What the device does, in Python: asks and waits with the plain kernels."""

    def __init__(self, kind: type, dtype: torch.dtype = torch.float32) -> None:
        self.bank = bank(dtype)
        self.box = Mailbox(HostDevice(), TOKENS, HIDDEN, TOP_K, dtype)
        self.executor: Executor = kind(self.box, self.bank, EXPERTS)
        self.generator = torch.Generator().manual_seed(4)
        self.dtype = dtype

    def ask(self, layer: int, tokens: int, counts: tuple[int, int] = (0, 1), taken: int = 0) -> torch.Tensor:
        """Publish a request of random ids, without the last `taken` inner rows; returns what the reply must be."""
        x = torch.randn(tokens, HIDDEN, generator=self.generator).to(self.dtype)
        ids = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=self.generator, dtype=torch.int32)
        weights = torch.rand(tokens, TOP_K, generator=self.generator)
        self.counts, shares = torch.tensor([*counts, 0, 1], dtype=torch.int32), torch.tensor([7, taken], dtype=torch.int32)
        self.executor.wake()
        box = self.box
        request = (box.request, box.x, box.ids, box.weights)
        plain.publish(x, ids, weights, self.counts, shares, box.epoch, layer, *request)
        rows = slice(layer * EXPERTS, (layer + 1) * EXPERTS)
        whole = self.bank.record.views(self.bank.bytes)
        return reference.experts_forward(x, ids, weights, whole.gate_up[rows], whole.down[rows], slice(INTER - taken))

    def wait(self, limit_us: int = 60_000_000) -> int:
        plain.wait_reply(self.counts, self.box.epoch, self.box.reply, limit_us, self.box.status)
        return int(self.box.status[0])


@contextmanager
def side(kind: type, dtype: torch.dtype = torch.float32) -> Iterator[Side]:
    made = Side(kind, dtype)
    try:
        yield made
    finally:
        made.executor.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_the_experts_outputs_for_every_layer_and_size(kind):
    with side(kind) as device:
        for turn in range(40):
            tokens = 1 + turn % TOKENS
            want = device.ask(turn % LAYERS, tokens)
            assert device.wait() == 0
            torch.testing.assert_close(device.box.out[:tokens], want, rtol=1e-4, atol=1e-4)
            assert int(device.box.reply[0]) == int(device.box.epoch[0]) == turn + 1
        state = device.executor.state()
        assert (state.alive, state.served) == (True, 40)
        assert state.busy_ns > 0
        assert state.bytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_takes_is_left_out_of_the_reply_and_of_its_bytes(kind):
    with side(kind) as device:
        whole = bank().record.nbytes
        for turn, taken in enumerate((0, 5, 1, INTER - 1, 0)):
            before = device.executor.state().bytes
            want = device.ask(turn % LAYERS, 3, taken=taken)
            assert device.wait() == 0
            torch.testing.assert_close(device.box.out[:3], want, rtol=1e-4, atol=1e-4)
            used = len({e for e in device.box.ids[:3].flatten().tolist() if e >= 0})
            record = 3 * HIDDEN * INTER * 4
            assert device.executor.state().bytes - before == used * record * (INTER - taken) // INTER <= used * whole


@needs_library
@pytest.mark.parametrize("taken", [-1, INTER])
def test_a_request_that_leaves_the_executor_no_row_is_refused(taken):
    with side(NativeExecutor) as device:
        device.ask(0, 2)
        assert device.wait() == 0
        device.box.request[3] = taken
        device.box.epoch += 1
        device.box.request[0] = int(device.box.epoch)
        assert device.wait() == handoff.FAILED


@needs_library
def test_bf16_replies_stay_within_rounding():
    with side(NativeExecutor, torch.bfloat16) as device:
        want = device.ask(1, 9)
        assert device.wait() == 0
        assert ((device.box.out[:9] - want).abs().max() / want.abs().max()).item() < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_without_work_for_the_cpu_nothing_is_asked_and_nothing_waited_for(kind):
    with side(kind) as device:
        device.ask(0, 4, counts=(2, 0))
        assert int(device.box.epoch[0]) == int(device.box.request[0]) == 0
        assert device.wait(limit_us=0) == 0
        assert device.executor.state().served == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_to_an_earlier_request_does_not_satisfy_a_later_one(kind):
    with side(kind) as device:
        device.ask(0, 2)
        assert device.wait() == 0
        device.executor.fault(2, 2)
        device.ask(1, 2)
        assert int(device.box.reply[0]) == 1
        assert device.wait(SOON_US) == handoff.TIMED_OUT
        assert int(device.box.status[1]) == 2


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (1, handoff.TIMED_OUT, "thread has ended"),
        (2, handoff.TIMED_OUT, "did not answer request 3"),
        (3, handoff.FAILED, "failed at request 3"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_injected_fault_is_explained_and_later_layers_do_not_wait(kind, fault, status, words):
    with side(kind) as device:
        device.executor.fault(fault, 3)
        for _ in range(2):
            device.ask(0, 2)
            assert device.wait() == 0
        device.ask(0, 2)
        assert (device.wait(SOON_US) if status == handoff.TIMED_OUT else device.wait()) == status
        assert words in explain(status, int(device.box.status[1]), device.executor.state())
        # The step is lost: what is left of it must not add one time limit for every layer.
        device.ask(1, 2)
        device.box.reply[0] = -1
        assert device.wait(limit_us=1 << 60) == status


@needs_library
def test_a_hanging_executor_can_be_stopped():
    device = Side(NativeExecutor)
    device.executor.fault(2, 1)
    device.ask(0, 1)
    assert device.wait(SOON_US) == handoff.TIMED_OUT
    assert device.executor.stop() is True
    assert device.executor.stop() is True


@needs_library
def test_an_idle_executor_parks_and_still_answers():
    with side(NativeExecutor) as device:
        while device.executor.state().parks < 3:
            pass
        want = device.ask(2, 5)
        assert device.wait() == 0
        torch.testing.assert_close(device.box.out[:5], want, rtol=1e-4, atol=1e-4)


@needs_library
def test_a_request_for_a_layer_that_is_not_there_is_refused():
    with side(NativeExecutor) as device:
        device.ask(0, 2)
        assert device.wait() == 0
        device.box.request[1] = LAYERS
        device.box.epoch += 1
        device.box.request[0] = int(device.box.epoch)
        assert device.wait() == handoff.FAILED


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 16), st.sampled_from([2, 4]))
def test_the_parts_of_a_mailbox_do_not_overlap(tokens, hidden, top_k, item):
    layout = BoxLayout(tokens, hidden, top_k, item)
    parts = [
        (0, 16),
        (handoff.REPLY_EPOCH, 16),
        (layout.x, tokens * hidden * item),
        (layout.ids, tokens * top_k * 4),
        (layout.weights, tokens * top_k * 4),
        (layout.out, tokens * hidden * 4),
    ]
    for (start, size), (after, _) in zip(parts, [*parts[1:], (layout.nbytes, 0)], strict=True):
        assert start + size <= after
    assert all(start % 256 == 0 for start, _ in parts[2:])


def test_the_header_has_the_same_offsets():
    header = Path(handoff.__file__).parent.parent / "csrc" / "handoff.h"
    stated = dict(re.findall(r"ASV_BOX_(\w+) = (\d+)", header.read_text()))
    assert {name: int(value) for name, value in stated.items()} == {name: getattr(handoff, name) for name in stated}
    assert len(stated) == 8


@needs_library
def test_both_sides_agree_on_the_size_of_the_configuration():
    from engine.kernels import native

    library = native.load()
    assert library is not None
    assert library.asv_serve_config_bytes() == ctypes.sizeof(handoff._Config)
