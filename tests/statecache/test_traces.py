"""Trace regret: recorded sessions replayed against placement and the store must stay near the ideal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces import Turn, load, replay_policies, replay_store
from statecache.policy import Policy

NAME = "shared/traces/coding_agent_blocks.jsonl.gz"
FILE = next((p / NAME for p in Path(__file__).resolve().parents if (p / NAME).exists()), None)


def turn(blocks: list[int], t: float = 0.0) -> Turn:
    return Turn(t, 64 * len(blocks) + 10, 5, np.array(blocks))


def test_a_hand_counted_session():
    """Append, then an edit one block before the end: the last end is lost, one shadow of two blocks saves all but one block."""
    session = [turn([1, 2, 3, 4]), turn([1, 2, 3, 4, 5, 6]), turn([1, 2, 3, 4, 5, 9, 10])]
    figures = replay_policies([session])
    asked = 64 * 17 + 30
    assert figures["ideal"]["hit"] == round(64 * 9 / asked, 4)
    assert figures["last end"]["hit"] == round(64 * 4 / asked, 4)
    assert figures["last 2 ends"]["hit"] == round(64 * 8 / asked, 4)
    assert figures["last end + shadow"]["hit"] == round(64 * 8 / asked, 4)
    assert figures["last 2 + shadows"]["hit"] == round(64 * 9 / asked, 4)
    store = replay_store([session], Policy(), 1 << 40, 0, 1)
    assert store["hit"] == round(64 * 9 / asked, 4)
    assert store["re_prefill"] == 1.0


@pytest.mark.skipif(FILE is None, reason="needs the recorded traces")
def test_recorded_sessions_are_prefilled_near_the_ideal():
    assert FILE is not None
    sessions = load(FILE, 6)
    figures = replay_policies(sessions)
    assert figures["last 2 + shadows + ladder"]["re_prefill"] <= 1.03
    assert figures["last end"]["re_prefill"] > 1.1
    assert replay_store(sessions, Policy(), 1 << 50, 0, 2)["re_prefill"] <= 1.03
    assert replay_store(sessions, Policy(), 8 << 30, 24 << 30, 2)["re_prefill"] <= 1.10
