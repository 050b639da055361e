"""The offloaded engine begins with steps before they are asked for: same tokens, same states, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import Draw, SeqSlice
from engine.device.host import HostDevice
from engine.engine import Engine
from engine.errors import DeviceError
from engine.gpu.model import GpuModel
from engine.gpu.tables import DecodeTables
from engine.kernels import plain
from engine.types import SamplingParams, TokenEvent
from tests.engine.gpu.models import DEVICES, TYPES, check_slots, directory, engine_on
from tests.engine.helpers import Log, prompt, release_all, request, run

NEW = 24


def used(engine: Engine) -> int:
    model = engine.model
    assert isinstance(model, GpuModel)
    return model.steps.used_ahead


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", ["auto", 5])
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_and_held_states_are_those_of_an_engine_that_waits(model_type, slots, device, tmp_path_factory):
    """Three answers of different length, holds inside and at the end, one declared when its token had come, a stop that nobody
    could foresee, and a request that goes on from it."""
    where = directory(model_type, tmp_path_factory)
    seen = []
    for rows in (0, 4):
        with engine_on(where, device, slots=slots, ahead_rows=rows, page_size=64) as engine:
            log = Log()
            for id, length in (("a", 5), ("b", 30), ("c", 1)):
                engine.submit(request(id, prompt(length, length), NEW - length // 2, hold_at_end=True))
            engine.declare_cut("b", 33)
            while len(log.tokens["a"]) < 7:
                log.add(engine.step())
            engine.declare_cut("a", 5 + len(log.tokens["a"]) - 1)
            run(engine, log)
            answer = log.tokens["a"]
            at = next((i for i in range(3, len(answer)) if answer[i] not in answer[:i]), len(answer) - 1)
            stopping = SamplingParams(max_tokens=NEW, temperature=0.0, stop_token_ids=(answer[at],))
            engine.submit(request("d", prompt(5, 5), sampling=stopping, hold_at_end=True))
            run(engine, log)
            hold = log.cuts["d"][-1].hold
            engine.submit(request("e", prompt(5, 5) + log.tokens["d"], 6, restore=hold))
            run(engine, log)
            held = [(cut.request_id, cut.position, engine.copy_out(cut.hold)) for cuts in log.cuts.values() for cut in cuts]
            seen.append((dict(log.tokens), held))
            assert used(engine) == 0 if rows == 0 else used(engine) >= NEW - 4
            if slots != "auto":
                check_slots(engine.model.experts)  # type: ignore[attr-defined]
            release_all(engine)
    (tokens, states), (ahead_tokens, ahead_states) = seen
    assert ahead_tokens == tokens
    assert [key[:2] for key in ahead_states] == [key[:2] for key in states]
    assert len(states) >= 5
    for (_, _, got), (_, _, want) in zip(ahead_states, states, strict=True):
        # Where experts run depends on what came before, and so does the last bit.
        exact = slots == "auto" and device == "host"
        for part, other in ((got.kv[0].rows, want.kv[0].rows), *((got.state[n], want.state[n]) for n in want.state)):
            if exact:
                assert np.array_equal(part, other)
            else:
                np.testing.assert_allclose(part.view(np.float32), other.view(np.float32), rtol=1e-3, atol=1e-3)


DRAWN = (
    SamplingParams(max_tokens=16, temperature=1.3, seed=7),
    SamplingParams(max_tokens=16, temperature=0.9, top_k=20, top_p=0.95, seed=8, logprobs=2),
    SamplingParams(max_tokens=7, temperature=0.0, logprobs=1),
    SamplingParams(max_tokens=13, temperature=0.0),
)


def told(engine: Engine) -> dict[str, list[tuple]]:
    """Run to the end: of every answer its tokens with all that is said of them."""
    events: dict[str, list[tuple]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                events.setdefault(event.request_id, []).append((event.token_id, event.logprob, event.top_logprobs))
        engine.check()
    return events


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", ["auto", 5])
def test_what_is_drawn_is_that_of_an_engine_that_waits_also_where_guesses_are_wrong(
    slots, device, tmp_path_factory, monkeypatch
):
    """The device writes its logits again while the host draws from them."""
    where = directory("qwen3_5_moe", tmp_path_factory)
    guess, calls = plain.guess, []

    def wrong(logits, draws, turn, guesses, found):
        guess(logits, draws, turn, guesses, found)
        calls.append(len(logits))
        if len(calls) % 9 == 0:
            drawn = draws[0, : len(logits)] > 0
            guesses[: len(logits)][drawn] = (guesses[: len(logits)][drawn] + 1) % logits.shape[1]
            found[int(turn) & 1, : len(logits)] = guesses[: len(logits)]

    seen = []
    for rows, errs in ((0, False), (4, False), *([(4, True)] if device == "host" else [])):
        with monkeypatch.context() as patched, engine_on(where, device, slots=slots, ahead_rows=rows, page_size=64) as engine:
            if errs:
                patched.setattr(plain, "guess", wrong)
            for index, sampling in enumerate(DRAWN):
                engine.submit(request(str(index), prompt(index, 4 + index), sampling=sampling))
            seen.append(told(engine))
            assert used(engine) == engine.stats().ahead_used
            assert used(engine) == 0 if rows == 0 else used(engine) >= (8 if errs else 12)
            assert engine.stats().wrong_guesses == 0 or errs
            assert engine.stats().ahead_wrong >= 1 or not errs
            release_all(engine)
    for others in seen[1:]:
        assert others.keys() == seen[0].keys()
        for id, want in seen[0].items():
            assert [token for token, _, _ in others[id]] == [token for token, _, _ in want]
            for (_, got, top), (_, p, best) in zip(others[id], want, strict=True):
                assert got == (p if p is None else pytest.approx(p, abs=1e-3))
                assert [token for token, _ in top] == [token for token, _ in best]


def tables_for(rows: int = 2) -> DecodeTables:
    return DecodeTables(HostDevice(), rows, 8, 16)


def a_slice(context: int, pages: list[int], row: int = 0, row_out: int = -1) -> SeqSlice:
    return SeqSlice(0, 1, context, torch.tensor(pages, dtype=torch.int32), row, False, (), row_out)


class Late:
    """A step that is not over before somebody waits."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def reached(self) -> bool:
        return self.waited


def test_what_is_told_for_a_step_waits_for_the_one_before_the_last_and_not_for_the_last():
    tables = tables_for()
    first, second = Late(), Late()
    tables.fill(torch.tensor([7]), [a_slice(3, [4])])
    tables.launched(first)
    tables.fill(torch.tensor([-1]), [a_slice(4, [4], 0, 1)])
    assert not first.waited
    tables.launched(second)
    tables.fill(torch.tensor([-1]), [a_slice(5, [4], 1, 0)])
    assert first.waited
    assert not second.waited


def test_a_step_finds_its_slot_rows_and_pages():
    tables = tables_for()
    tables.fill(torch.tensor([7, -1]), [a_slice(18, [4, 9], 3), a_slice(2, [6], 5, 1)])
    told = tables.told[1]
    assert told[:5].tolist() == [[7, -1], [18, 2], [9 * 16 + 2, 6 * 16 + 2], [3, 5], [3, 1]]
    assert tables.pages[:, :2].tolist() == [[4, 9], [6, 0]]
    assert tables.holds_pages(0, np.array([4]))
    assert not tables.holds_pages(0, np.array([4, 9, 2]))
    assert not tables.holds_pages(0, np.array([9]))
    tables.launched(Late())
    tables.fill(torch.tensor([1]), [a_slice(0, [2])])
    assert tables.told[0, :5].tolist() == [[1, 0], [0, -1], [2 * 16, -1], [0, -1], [0, -1]]


def test_a_step_finds_how_its_rows_will_be_drawn_with_every_bit_of_the_number():
    tables = tables_for()
    number = 0.1 + 2.0**-40
    tables.fill(
        torch.tensor([7, 8]), [a_slice(18, [4, 9], 3), a_slice(2, [6], 5)._replace(draw=Draw(0.5, 20, 0.75, 0.25, number))]
    )
    plain.begin(*tables.beginning)
    assert tables.draws[:4].tolist() == [[0, 0.5], [0, 20], [0, 0.75], [0, 0.25]]
    assert float(tables.draws[4:, 1].double().sum()) == pytest.approx(number, rel=1e-14)
    tables.launched(Late())
    tables.fill(torch.tensor([7]), [a_slice(18, [4, 9], 3)])
    plain.begin(*tables.beginning)
    tables.launched(Late())
    tables.fill(torch.tensor([7, 8]), [a_slice(18, [4, 9], 3), a_slice(2, [6], 5)])
    plain.begin(*tables.beginning)
    assert not tables.draws.any()


def test_results_of_another_step_are_refused():
    tables = tables_for()
    tables.found[1] = torch.tensor([11, 12, 5], dtype=torch.int32)
    assert tables.chosen(5, 2) == [11, 12]
    with pytest.raises(DeviceError, match="decode step 3 left the results of step 5"):
        tables.chosen(3, 2)
    tables.found[0, 2] = -(2**31)
    assert tables.chosen(2**31, 1) == [0]  # the counter on the device has 32 bits


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_executor_is_told_of_its_own_step_and_what_was_begun_is_forgotten(device, tmp_path_factory):
    with engine_on(directory("qwen3_5_moe", tmp_path_factory), device, slots=5, expert_mode="cpu") as engine:
        model, log = engine.model, Log()
        assert isinstance(model, GpuModel)
        assert model.experts is not None
        engine.submit(request("a", prompt(1, 9), NEW))
        while len(log.tokens["a"]) < 5:
            log.add(engine.step())
        assert used(engine) > 0
        model.experts.inject_fault(3, int(model.experts.box.epoch) + 1)
        with pytest.raises(DeviceError, match="executor failed"):
            run(engine, log)
        assert model.steps._ahead is None
        assert 5 <= len(log.tokens["a"]) <= 6
