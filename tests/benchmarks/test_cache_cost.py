"""The comparison of a server that saves with one that does not: both do their part of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks import cache_cost
from benchmarks.cache_cost import Lane, interval, message_pair


def played(lane: Lane, number: int) -> None:
    lane.begin(*message_pair(number), f"{number:06d}")
    while lane.go():
        pass
    lane.finish()


def test_one_server_saves_all_that_it_should_and_the_other_nothing(tmp_path: Path):
    saves, plain = Lane(tmp_path / "a", saves=True), Lane(tmp_path / "b", saves=False)
    for lane in (saves, plain):
        for number in range(2):
            played(lane, number)
        assert 0 < lane.decoded < lane.spent
        assert 0 <= sum(lane.inside) < lane.spent
    stats = saves.server.states.cache.stats()
    assert stats.checkpoints == 12
    assert stats.waiting == stats.to_leave == 0
    assert stats.tiers["disk"].checkpoints >= 2
    ledger = saves.server.states.ledger
    assert ledger is not None
    assert not ledger.trouble
    assert plain.server.states.cache.stats().checkpoints == 0
    assert plain.server.engine.held_bytes == 0
    saves.save_no_more()
    plain.saves = True
    for lane in (saves, plain):
        played(lane, 2)
    assert plain.server.states.cache.stats().checkpoints == 6
    assert saves.server.states.cache.stats().checkpoints <= 12
    assert saves.server.engine.held_bytes == 0
    for lane in (saves, plain):
        lane.server.close()


def test_both_shares_are_told_with_their_intervals(monkeypatch):
    monkeypatch.setattr(cache_cost, "WARM_UP", 0)
    figures = cache_cost.saving(1)
    assert figures["checkpoints_a_turn"] == 6.0
    for name in ("share_of_decode", "counted_of_decode"):
        assert figures[name]["n"] == 1
        assert figures[name]["interval"][0] == figures[name]["interval"][1]


def test_an_interval_holds_the_median_and_narrows_with_more_of_the_same():
    few, many = [0.01, 0.02, 0.03, 0.04, 0.05], [0.01, 0.02, 0.03, 0.04, 0.05] * 40
    (low, high), (lower, higher) = interval(many), interval(few)
    assert lower <= low <= 0.03 <= high <= higher
    assert high - low < higher - lower
