"""States that stay in an engine's pools: found without a copy, copied in pieces, released when room is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from statecache.keys import xxh3_128
from statecache.policy import Policy, worth_copying
from statecache.store import StateCache
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind
from tests.statecache.world import OTHER_SALT, SALT, Clock, close_books, context, make, same, save, truth

TURN, LADDER = BoundaryKind.TURN, BoundaryKind.LADDER


@dataclass
class FakeCopy:
    """Comes when it was looked at `late` times. fails: it does not."""

    kv: tuple[np.ndarray, ...] = ()
    state: dict[str, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray | None = None
    late: int = 0
    fails: bool = False

    @property
    def done(self) -> bool:
        self.late -= 1
        return self.late < 0

    def result(self):
        if self.fails:
            raise OSError("the device is gone")
        for array in (*self.kv, *self.state.values()):
            array.flags.writeable = False
        return self


class FakePools:
    """Holds are token prefixes; what is copied is computed from them. copied: sizes of the pieces, in tokens.

    late: how often a copy is looked at before it is there. fails: copies do not arrive.
    """

    def __init__(self) -> None:
        self.holds: dict[int, tuple[np.ndarray, bytes]] = {}
        self.copied: list[int] = []
        self.budget_bytes = 1 << 20
        self.late = 0
        self.fails = False

    def hold(self, tokens: np.ndarray, salt: bytes = SALT) -> int:
        hold = len(self.copied) + 1000 * len(self.holds) + 1
        while hold in self.holds:
            hold += 1
        self.holds[hold] = (tokens, salt)
        return hold

    @property
    def used_bytes(self) -> int:
        return sum(self.own_bytes(hold) for hold in self.holds)

    def tokens(self, hold: int) -> np.ndarray:
        return self.holds[hold][0].astype(np.uint32)

    def rows(self, hold: int, start: int, stop: int, each: int) -> FakeCopy:
        self.copied.append(stop - start)
        rows = self._rows(hold, start, stop)
        return FakeCopy(
            tuple(rows[at : at + each].copy() for at in range(0, len(rows), each)), late=self.late, fails=self.fails
        )

    def rest(self, hold: int, start: int) -> FakeCopy:
        tokens, salt = self.holds[hold]
        if start < len(tokens):
            self.copied.append(len(tokens) - start)
        kv = (self._rows(hold, start, len(tokens)),) if start < len(tokens) else ()
        payload = truth(tokens, salt, len(tokens), logits=True)
        state = {name: part.copy() for name, part in payload.state.items()}
        return FakeCopy(kv, state, payload.logits, late=self.late, fails=self.fails)

    def _rows(self, hold: int, start: int, stop: int) -> np.ndarray:
        tokens, salt = self.holds[hold]
        return truth(tokens, salt, stop, start=start).kv[0].rows.copy()

    def own_bytes(self, hold: int) -> int:
        return 8 * len(self.holds[hold][0])

    def release(self, hold: int) -> None:
        del self.holds[hold]


class World:
    def __init__(self, budget: int = 1 << 20, **kwargs) -> None:
        self.clock = Clock()
        self.cache: StateCache = make(budget, clock=self.clock, **kwargs)
        self.pools = FakePools()
        self.cache.attach(self.pools)

    def admit(self, tokens, kind=TURN, *, salt=SALT, logits=False, session="", stays=True):
        hold = self.pools.hold(tokens, salt)
        boundary = Boundary(len(tokens), kind)
        return self.cache.admit(tokens, salt, boundary, hold, logits=logits, session=session, stays=stays)

    def check(self) -> None:
        residents = self.cache._kept.device.residents  # pyright: ignore[reportOptionalMemberAccess]
        assert {r.hold for r in residents.values()} == set(self.pools.holds)
        close_books(self.cache)

    def everything_goes(self) -> None:
        self.check()
        for info in self.cache.checkpoints():
            assert self.cache.evict(info.id)
        assert self.pools.holds == {}
        assert all(tier.used_bytes == 0 for tier in self.cache.stats().tiers.values())


def test_a_state_on_the_device_is_found_and_nothing_is_copied():
    w = World()
    tokens = context(1, 200)
    result = w.admit(tokens, session="s")
    assert (result.existed, result.written_bytes, result.tier) == (False, 0, "device")
    with w.cache.match(context(1, 200), SALT, limit=199) as short, w.cache.match(np.append(tokens, 7), SALT) as match:
        assert short.position == 0
        assert (match.position, match.tier, match.nbytes) == (200, "device", 0)
        assert match.resident is not None
        assert match.resident.hold in w.pools.holds
        assert w.pools.copied == []
        assert same(match.read(), tokens, SALT)
        out = np.empty((200, 8), np.uint8)
        assert same(match.read(out), tokens, SALT)
        assert np.shares_memory(match.read(out).kv[0].rows, out)
    (info,) = w.cache.checkpoints("s")
    assert (info.tier, info.tiers, info.exclusive_bytes) == ("device", ("device",), 1600)
    stats = w.cache.stats().tiers["device"]
    assert (stats.hits, stats.checkpoints, stats.used_bytes) == (1, 1, 1600)
    assert w.cache.match(np.append(tokens, 7), OTHER_SALT).position == 0
    w.everything_goes()


def test_of_two_holds_for_one_place_the_one_with_logits_stays():
    w = World()
    tokens = context(2, 100)
    w.admit(tokens)
    assert w.cache.match(tokens, SALT).position == 0, "a whole context needs its logits"
    w.admit(tokens, logits=True)
    assert len(w.pools.holds) == 1
    w.admit(tokens)
    assert len(w.pools.holds) == 1
    with w.cache.match(tokens, SALT) as match:
        assert (match.position, match.tier) == (100, "device")
    w.everything_goes()


def test_logits_that_only_memory_has_are_used_from_there():
    w = World()
    tokens = context(3, 100)
    save(w.cache, tokens, 100, logits=True)
    w.admit(tokens)
    with w.cache.match(tokens, SALT) as whole, w.cache.match(np.append(tokens, 1), SALT) as longer:
        assert (whole.position, whole.tier) == (100, "ram")
        assert whole.read().logits is not None
        assert (longer.position, longer.tier) == (100, "device")
    w.everything_goes()


def test_what_is_wanted_is_copied_in_bounded_pieces_and_then_goes_down():
    w = World(tiers=[RamTier(1 << 20), RamTier(1 << 20, name="disk")], write_behind=True)
    told: list[int] = []
    w.cache.on_waiting = lambda: told.append(len(w.cache._kept.waiting))
    tokens = context(4, 1000)
    id = w.admit(tokens, logits=True).checkpoint_id
    assert id is not None
    w.cache.want([id])
    assert w.cache.stats().to_leave == 1
    pieces = 0
    while w.cache.move(128 * 8, short=False):
        w.check()
        pieces += 1
    assert w.pools.copied == [128] * 7 + [64, 40]
    assert pieces == 9, "the last rows travel with the state"
    assert told == [1]
    assert w.cache.copy_next()
    (info,) = w.cache.checkpoints()
    assert info.tiers == ("device", "ram", "disk")
    assert w.cache.stats().left_bytes == 960 * 8 + 32
    w.cache.make_device_room(1)
    with w.cache.match(tokens, SALT) as match:
        assert match.tier == "ram"
        assert same(match.read(), tokens, SALT)
    w.everything_goes()


def test_without_a_lower_tier_nothing_is_copied_before_room_is_needed():
    w = World()
    id = w.admit(context(5, 300)).checkpoint_id
    assert id is not None
    w.cache.want([id])
    w.cache.want_all()
    assert not w.cache.move(1 << 20, short=False)
    assert w.pools.copied == []
    while w.cache.move(1 << 20, short=True):
        w.check()
    assert [info.tiers for info in w.cache.checkpoints()] == [("ram",)]
    w.everything_goes()


def test_room_is_made_by_worth_and_what_is_worth_it_is_copied_first():
    w = World(policy=Policy(slack_permille=0, prefill_us_per_token=1))
    base = context(6, 400)
    w.admit(base[:300], BoundaryKind.SYSTEM)
    ladder = w.admit(np.append(base[:300], [9] * 3), LADDER).checkpoint_id
    w.clock.now += 10
    assert w.cache.make_device_room(1) == 1
    assert ladder not in {info.id for info in w.cache.checkpoints()} or w.pools.copied
    assert w.cache.make_device_room(1 << 20) == 1
    assert w.cache.make_device_room(1) == 0
    w.everything_goes()


@pytest.mark.parametrize(("tokens", "nbytes", "worth"), [(100, 100_000, True), (100, 100_001_000, False), (0, 0, False)])
def test_a_copy_is_worth_it_when_computing_again_takes_longer(tokens, nbytes, worth):
    assert worth_copying(tokens, nbytes, Policy(prefill_us_per_token=1000)) is worth


def test_what_would_be_cheaper_to_compute_again_is_let_go_without_a_copy():
    w = World(policy=Policy(slack_permille=0, prefill_us_per_token=0))
    w.admit(context(7, 300))
    assert w.cache.make_device_room(1) == 1
    assert w.pools.copied == []
    assert w.cache.stats().left_uncopied == 1
    assert w.cache.match(np.append(context(7, 300), 1), SALT).divergence.cause == "evicted"
    w.everything_goes()


def test_pins_go_last_and_are_copied_whatever_that_costs_and_readers_stay():
    w = World(policy=Policy(slack_permille=0, prefill_us_per_token=0))
    pinned, read, plain = context(8, 200), context(9, 200), context(10, 200)
    id = w.admit(pinned, LADDER).checkpoint_id
    assert id is not None
    w.cache.pin(id, "s")
    w.admit(read)
    w.admit(plain, BoundaryKind.SYSTEM)
    with w.cache.match(np.append(read, 1), SALT) as match:
        assert w.cache.make_device_room(1) == 1
        assert {len(t) for t, _ in w.pools.holds.values()} == {200}
        assert w.cache.match(np.append(plain, 1), SALT).position == 0
        assert w.cache.make_device_room(1) == 1
        assert w.cache.match(np.append(pinned, 1), SALT).tier == "ram"
        assert w.cache.make_device_room(1) == 0, "what is about to be restored is not taken away"
        assert not w.cache.evict(match.checkpoint_id or "")
        assert same(match.read(), read, SALT)
    w.cache.forget("s")
    assert w.cache.make_device_room(1) == 1


def test_a_state_that_memory_refuses_stays_until_a_turn_needs_its_room():
    w = World(200)
    w.admit(context(11, 300))
    steps = 0
    while w.cache.move(1 << 20, short=True):
        steps += 1
        assert steps < 10, "what was refused is not tried again and again"
    assert len(w.pools.holds) == 1
    assert w.cache.make_device_room(1) == 1
    assert w.cache.checkpoints() == []
    w.check()


def test_a_copy_whose_beginning_was_evicted_meanwhile_starts_again():
    w = World()
    tokens = context(12, 640)
    below = save(w.cache, tokens, 320).checkpoint_id
    assert below is not None
    w.admit(tokens)
    assert w.cache.move(64 * 8, short=True)
    assert w.cache.evict(below)
    while w.cache.move(64 * 8, short=True):
        w.check()
    with w.cache.match(np.append(tokens, 1), SALT) as match:
        assert (match.position, match.tier) == (640, "ram")
        assert same(match.read(), tokens, SALT)
    w.everything_goes()


def test_a_copy_under_way_is_finished_when_its_room_is_needed():
    w = World()
    tokens = context(13, 640)
    w.admit(tokens)
    w.cache.move(128 * 8, short=True)
    before = sum(w.pools.copied)
    assert w.cache.make_device_room(1) == 1
    assert sum(w.pools.copied) == 640, f"{before} tokens were not copied twice"
    with w.cache.match(np.append(tokens, 1), SALT) as match:
        assert same(match.read(), tokens, SALT)
    w.everything_goes()


def test_a_state_evicted_while_it_is_copied_is_gone():
    w = World()
    id = w.admit(context(14, 640)).checkpoint_id
    assert id is not None
    w.cache.move(128 * 8, short=True)
    assert w.cache.evict(id)
    assert not w.cache.move(1 << 20, short=True)
    w.everything_goes()


def test_without_residency_a_state_is_copied_at_once():
    w = World()
    tokens = context(15, 300)
    result = w.admit(tokens, stays=False)
    assert result.tier == "ram"
    assert w.pools.holds == {}
    small = World(100)
    assert small.admit(tokens, stays=False).checkpoint_id is None
    assert small.pools.holds == {}
    w.everything_goes()


def test_with_keys_of_eight_bits_only_truth_is_served_and_no_hold_is_lost():
    w = World(hash128=lambda data: xxh3_128(data)[:1] * 16)
    contexts = [context(seed, 70 + seed) for seed in range(60)]
    kept = [w.admit(tokens).checkpoint_id for tokens in contexts]
    assert None in kept
    w.check()
    while w.cache.move(1 << 20, short=True):
        w.check()
    for tokens, id in zip(contexts, kept, strict=True):
        with w.cache.match(np.append(tokens, 1), SALT) as match:
            assert match.position == (len(tokens) if id is not None else 0)
            assert not match.position or same(match.read(), tokens, SALT)
    w.everything_goes()


def test_memory_keeps_a_read_only_array_that_is_its_own_and_copies_every_other():
    w = World()
    tokens = context(16, 128)
    payload = truth(tokens, SALT, 128)
    state = {name: part.copy() for name, part in payload.state.items()}
    for part in state.values():
        part.flags.writeable = False
    mixed = dict(state, delta=payload.state["delta"].copy())
    w.cache.put(tokens, SALT, Boundary(128, TURN), type(payload)(128, payload.kv, mixed))
    with w.cache.match(np.append(tokens, 1), SALT) as match:
        stored = match.read()
    assert np.shares_memory(stored.state["conv"], state["conv"])
    mixed["delta"][:] = 0
    assert same(stored, tokens, SALT)


def test_what_is_copied_is_looked_for_once():
    w, asked = World(), 0
    shelf = w.cache._kept.shelves[0]
    stored_blocks = shelf.stored_blocks

    def counted(*arguments):
        nonlocal asked
        asked += 1
        return stored_blocks(*arguments)

    shelf.stored_blocks = counted
    tokens = context(17, 300)
    result = w.admit(tokens, stays=False)
    assert (result.tier, asked) == ("ram", 1)
    with w.cache.match(np.append(tokens, 1), SALT) as match:
        assert (match.position, match.tier) == (300, "ram")
        assert same(match.read(), tokens, SALT)
    w.everything_goes()


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_context_that_memory_cannot_hold_goes_past_it_to_the_disk(leaves_first):
    w = World(tiers=[RamTier(12_000), RamTier(1 << 20, name="disk")], write_behind=True)
    tokens = context(17, 1900)
    below = w.admit(tokens[:300]).checkpoint_id
    for position in (300, 420, 540, 660, 780, 900, 1020, 1140, 1260, 1380, 1500, 1620, 1740, 1860):
        id = w.admit(tokens[:position]).checkpoint_id
        assert id is not None
        w.cache.want([id])
        while w.cache.move(64 * 8, short=False):
            w.check()
        if leaves_first:
            w.cache.make_device_room(1 << 20)
            w.check()
        while w.cache.copy_next() is not None:
            w.check()
    assert below is not None
    w.cache.make_device_room(1 << 20)
    assert w.pools.holds == {}
    with w.cache.match(tokens, SALT) as match:
        assert (match.position, match.tier) == (1860, "disk")
        assert same(match.read(), tokens, SALT)
    w.everything_goes()


def test_a_copy_that_is_on_its_way_is_not_waited_for_and_one_more_begins_when_it_has_come():
    w = World()
    tokens = context(20, 640)
    w.pools.late = 3
    w.admit(tokens)
    looks = 0
    while w.cache.move(128 * 8, short=True):
        looks += 1
        w.check()
        assert len(w.pools.copied) <= 1 + looks // 3
    assert w.pools.copied == [128] * 5
    with w.cache.match(np.append(tokens, 1), SALT) as match:
        assert match.tier == "ram"
        assert same(match.read(), tokens, SALT)
    w.everything_goes()


def test_room_that_is_needed_now_waits_for_what_is_on_its_way_and_for_the_rest():
    w = World(policy=Policy(prefill_us_per_token=1000))
    tokens = context(21, 640)
    w.pools.late = 1000
    w.admit(tokens)
    assert w.cache.move(128 * 8, short=True)
    assert w.cache.make_device_room(1) == 1
    with w.cache.match(np.append(tokens, 1), SALT) as match:
        assert match.tier == "ram"
        assert same(match.read(), tokens, SALT)
    w.everything_goes()


def test_a_copy_that_fails_loses_its_checkpoint_alone_and_is_told_once(caplog):
    w = World()
    w.pools.fails = True
    for seed in (22, 23, 24):
        w.admit(context(seed, 200))
    while w.cache.move(1 << 20, short=True):
        w.check()
    assert [info.tiers for info in w.cache.checkpoints()] == [("device",)] * 3
    assert w.cache.make_device_room(1 << 30) == 3
    assert w.cache.checkpoints() == []
    assert [r.levelname for r in caplog.records if "not copied" in r.message].count("WARNING") == 1
    w.everything_goes()


def test_one_order_of_victims_serves_several_shortages_as_far_as_nothing_happened_to_them():
    w = World()
    contexts = [context(20 + number, 200) for number in range(7)]
    ids = []
    for tokens in contexts:
        ids.append(w.admit(tokens).checkpoint_id)
        w.clock.now += 100
    asked, real = [], w.pools.own_bytes
    w.pools.own_bytes = lambda hold: asked.append(hold) or real(hold)
    weighed = [0]

    def gone() -> tuple[int, ...]:
        asked.clear()
        assert w.cache.make_device_room(1) == 1
        weighed[0] = len(asked)
        here = {info.id for info in w.cache.checkpoints() if "device" in info.tiers}
        return tuple(number for number, id in enumerate(ids) if id not in here)

    assert gone() == (0,)
    assert weighed == [8]  # all of them, and what the one that goes gives back
    assert gone() == (0, 1)
    assert weighed == [1]
    w.cache.match(np.append(contexts[2], 1), SALT).release()
    assert gone() == (0, 1, 3), "the next one was used since then"
    assert w.cache.pin(ids[4] or "", "s")
    assert gone() == (0, 1, 3, 5), "and this one was pinned"
    w.clock.now += 100
    assert gone() == (0, 1, 3, 5, 6), "before one that was used twice"
    assert weighed > [1], "an order ends by itself"
    w.cache.forget("s")
    w.check()
