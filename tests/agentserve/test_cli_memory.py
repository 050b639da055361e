"""`agentserve memory`: what is said of a worker, and what percent come to."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from agentserve.cli import memory

NOW: dict[str, Any] = {
    "slots": 32, "wanted_slots": 32, "least_slots": 8, "most_slots": 64, "experts": 128, "slot_bytes": 6 << 20, "pages": 100,
    "wanted_pages": 100, "page_tokens": 64, "page_bytes": 1 << 20, "moves": 0, "lent_bytes": 0, "fixed": "", "trouble": "",
}  # fmt: skip


def worker(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "worker": 0, "answered": True, "memory": NOW | changes}


def test_a_worker_is_told_in_a_few_lines():
    experts, kv = memory.lines(worker())
    assert experts == "m/0: experts in 32 slots (25% of 128), 192 MiB; 8 to 64 can be asked for"
    assert kv == "  KV for 6400 tokens, 100 MiB"
    more = memory.lines(
        worker(wanted_slots=40, lent_bytes=1 << 30, fixed="the driver lacks cuMemMap", trouble="need 3 KV pages")
    )[2:]
    assert [line.split(":")[0].strip() for line in more] == [
        "on the way to 40 slots, KV for 6400 tokens",
        "1 GiB are left to other programs",
        "slots keep their memory when they are fewer",
        "the last change was given up",
    ]
    assert memory.lines(worker() | {"memory": None}) == ["m/0: nothing to divide, its experts and KV are not on a device"]
    assert memory.lines(worker() | {"memory": None, "answered": False}) == ["m/0: does not answer"]


def test_percent_are_of_the_experts_of_the_model_that_was_named():
    others = [worker() | {"model": "other", "memory": None}, worker()]
    assert memory.slots_of(others, None, 25) == 32
    assert memory.slots_of(others, "m", 0.1) == 1
    with pytest.raises(typer.Exit):
        memory.slots_of(others, "other", 25)
