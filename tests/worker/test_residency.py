"""States in the engine's pools, on real architectures and the exact backend: bit for bit what a cold run computes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from agentserve.worker.messages import Cut, FromWorker, Matched, Sampling, StartTurn, Tokens, TurnFinished
from agentserve.worker.naming import namespace_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from engine.config import EngineConfig
from engine.engine import Engine
from statecache.durable import open_states
from statecache.types import BoundaryKind, MarkerTable
from tests.engine.checkpoints import make, save
from tests.engine.helpers import prompt

ANSWER = 6


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_5_moe"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make(request.param), tmp_path_factory.mktemp(request.param))


class Worker:
    """An engine, a cache and turns. copies: calls that took bytes out of the pools."""

    def __init__(self, model_dir: Path, *, stays: bool = True, **changes: int) -> None:
        sizes = {"threads": 1, "page_size": 16, "chunk_tokens": 32, "kv_tokens": 2048, "snapshot_rows": 24, "max_rows": 3}
        fields = {"backend": "exact", "poison_freed": True, **sizes, **changes}
        self.engine = Engine.load(EngineConfig(model_dir=model_dir, **fields))  # pyright: ignore[reportArgumentType]
        self.cache = open_states(*namespace_of(self.engine.info, self.engine.layout), 64 << 20).cache
        self.frames: list[FromWorker] = []
        self.bridge = StateBridge(self.engine, self.cache, stays=stays)
        self.loop = TurnLoop(self.engine, self.bridge, self.frames.append)
        self.copies: list[str] = []
        for name in ("copy_kv", "copy_rest"):
            self._count(name)

    def _count(self, name: str) -> None:
        real = getattr(self.engine, name)
        setattr(self.engine, name, lambda *arguments: self.copies.append(name) or real(*arguments))

    def start(self, turn_id: str, ids: list[int], max_tokens: int = ANSWER) -> None:
        self.loop.start(
            StartTurn(
                turn_id=turn_id,
                ids=np.array(ids, "<u4").tobytes(),
                cuts=(Cut(min(20, len(ids)), BoundaryKind.SYSTEM),),
                markers=MarkerTable(),
                salt=b"salt",
                session="s",
                sampling=Sampling(max_tokens=max_tokens, temperature=0.0, logprobs=3),
                accepted_at=time.monotonic(),
            )
        )

    def run(self) -> None:
        while self.engine.has_work:
            self.loop.step()
            self.engine.check()

    def said(self, turn_id: str) -> list[tuple]:
        """Tokens with their log-probabilities, which are compared as floats: equal means bitwise equal logits' sums."""
        frames = [f for f in self.frames if isinstance(f, Tokens) and f.turn_id == turn_id]
        return [(id, lp.logprob, lp.top) for f in frames for id, lp in zip(f.ids, f.logprobs, strict=True)]

    def ask(self, turn_id: str, ids: list[int], max_tokens: int = ANSWER) -> list[tuple]:
        self.start(turn_id, ids, max_tokens)
        self.run()
        return self.said(turn_id)

    def matched(self, turn_id: str) -> tuple[int, str | None]:
        frame = next(f for f in self.frames if isinstance(f, Matched) and f.turn_id == turn_id)
        return frame.position, frame.tier

    def everything_goes(self) -> None:
        assert self.bridge.cache_errors == self.bridge.release_errors == 0
        for info in self.cache.checkpoints():
            assert self.cache.evict(info.id)
        self.engine.check()
        stats = self.engine.stats()
        assert (stats.free_pages, stats.free_rows, stats.held) == (stats.total_pages, stats.total_rows, 0)


def cold(model_dir: Path, ids: list[int]) -> list[tuple]:
    return Worker(model_dir).ask("cold", ids)


def ids_of(said: list[tuple]) -> list[int]:
    return [token for token, *_ in said]


def test_a_turn_that_goes_on_takes_its_pages_over_and_copies_nothing(model_dir: Path) -> None:
    worker = Worker(model_dir)
    base = prompt(1, 100)
    first = worker.ask("a", base)
    context = [*base, *ids_of(first), 5, 6, 7]
    free = worker.engine.stats().free_pages
    worker.start("b", context)
    worker.loop.step()
    assert worker.matched("b") == (105, "device")
    # 109 tokens and the first sampled one are 7 pages of 16; 6 whole ones are shared, the seventh is written behind the hold.
    assert free - worker.engine.stats().free_pages == 1
    worker.run()
    assert worker.copies == []
    assert worker.said("b") == cold(model_dir, context)
    worker.everything_goes()


def test_others_that_ran_in_between_and_forks_change_nothing(model_dir: Path) -> None:
    worker = Worker(model_dir)
    base = prompt(2, 90)
    first = worker.ask("a", base)
    for number in range(4):
        worker.ask(f"other{number}", prompt(10 + number, 60))
    context = [*base, *ids_of(first)]
    left, right = [*context, 3, 4], [*context, 9, 9, 9]
    worker.start("left", left)
    worker.start("right", right)
    worker.run()
    again = worker.ask("again", [*left[:-1], 8])
    for turn_id, ids in (("left", left), ("right", right), ("again", [*left[:-1], 8])):
        assert worker.matched(turn_id)[1] == "device", turn_id
        assert worker.matched(turn_id)[0] >= 95
        assert worker.said(turn_id) == cold(model_dir, ids)
    assert again == worker.said("again")
    assert worker.copies == []
    worker.everything_goes()


def test_the_identical_prompt_computes_nothing_and_copies_nothing(model_dir: Path) -> None:
    worker = Worker(model_dir)
    ids = prompt(3, 70)
    first = worker.ask("a", ids)
    worker.engine.model.forward = None  # pyright: ignore[reportAttributeAccessIssue]
    worker.start("b", ids, 1)
    worker.run()
    assert worker.said("b") == first[:1]
    assert worker.matched("b") == (70, "device")
    assert worker.copies == []


@pytest.mark.parametrize("spare", [1, 3])
def test_pools_too_small_for_what_is_held_change_no_answer(model_dir: Path, spare: int) -> None:
    """Twelve sessions in turns, three at a time, in a pool for about three: held states leave all the time, through memory."""
    worker = Worker(model_dir, kv_tokens=16 * 26, snapshot_rows=spare)
    contexts = {n: prompt(20 + n, 50 + 7 * n) for n in range(6)}
    asked: dict[str, list[int]] = {}
    for turn in range(3):
        for group in ((0, 1, 2), (3, 4, 5)):
            for n in group:
                asked[f"{n}.{turn}"] = list(contexts[n])
                worker.start(f"{n}.{turn}", contexts[n])
            worker.run()
            for n in group:
                contexts[n] = [*contexts[n], *ids_of(worker.said(f"{n}.{turn}")), 5 + turn]
    assert worker.copies, "states were copied out before they left"
    tiers = {worker.matched(turn_id)[1] for turn_id in asked}
    assert "ram" in tiers
    reused = sum(worker.matched(turn_id)[0] for turn_id in asked)
    assert reused > 0.4 * sum(map(len, asked.values()))
    reference = Worker(model_dir, stays=False)
    for turn_id, ids in asked.items():
        assert all(f.reason == "length" for f in worker.frames if isinstance(f, TurnFinished) and f.turn_id == turn_id)
        assert worker.said(turn_id) == reference.ask(turn_id, ids), turn_id
    worker.everything_goes()
    reference.everything_goes()


def test_a_pool_that_one_turn_fills_gives_all_held_states_up_for_it(model_dir: Path) -> None:
    worker = Worker(model_dir, kv_tokens=16 * 10, snapshot_rows=4)
    small, large = prompt(40, 60), prompt(41, 140)
    first = worker.ask("small", small)
    assert worker.said("small")
    said = worker.ask("large", large)
    assert said == cold(model_dir, large)
    context = [*small, *ids_of(first), 4]
    assert worker.ask("back", context) == cold(model_dir, context)
    assert worker.matched("back") == (65, "ram")
    worker.everything_goes()


def test_chores_make_room_before_the_next_turn_needs_it(model_dir: Path) -> None:
    worker = Worker(model_dir, kv_tokens=16 * 20, snapshot_rows=6)
    for n in range(3):
        worker.ask(f"t{n}", prompt(50 + n, 80))
    while worker.bridge.chore():
        worker.engine.check()
    room = worker.engine.room
    assert 4 * room.free_pages >= room.total_pages
    assert 4 * room.free_rows >= room.total_rows
    copies = len(worker.copies)
    worker.ask("next", prompt(60, 60))
    assert len(worker.copies) == copies
    worker.everything_goes()


def test_a_device_only_session_is_listed_and_counted_there(model_dir: Path) -> None:
    worker = Worker(model_dir)
    worker.ask("a", prompt(70, 50))
    rows = worker.bridge.checkpoints("s")
    assert {row.tiers for row in rows} == {("device",)}
    worker.ask("b", [*prompt(70, 50), 3])
    load = worker.loop.load()
    assert load.cache_checkpoints["device"] == len(worker.bridge.checkpoints("s"))
    assert load.cache_bytes["device"] == worker.engine.held_bytes > 0
    assert (load.counters["device_hits"], load.counters["ram_hits"]) == (1, 0)
    worker.everything_goes()
    assert worker.loop.load().cache_bytes["device"] == 0
