"""What saved states are filed under."""

from __future__ import annotations

import numpy as np

from agentserve.worker.naming import namespace_of
from engine.types import ROW, StateComponent, StateLayout
from tests.fakes.engine import FakeEngine

DELTA = StateComponent("layer.0.delta", "float32", (6,), 24)
CONV = StateComponent("layer.0.conv", "float32", (2,), 8)


def test_components_are_kept_as_one_whose_order_and_sizes_are_in_the_name():
    info = FakeEngine().info
    layout = StateLayout(16, (DELTA, CONV), 11)
    name, kept = namespace_of(info, layout)
    assert kept.state == ((ROW, 32),)
    others = (
        (CONV, DELTA),
        (DELTA, StateComponent("layer.0.conv", "int32", (2,), 8)),
        (StateComponent("a", "float32", (8,), 32),),
    )
    assert len({name, *(namespace_of(info, StateLayout(16, other, 11))[0] for other in others)}) == 4
    row = np.arange(32, dtype=np.uint8)
    parts = layout.split({ROW: row})
    assert list(parts) == ["layer.0.delta", "layer.0.conv"]
    assert np.array_equal(np.concatenate(list(parts.values())), row)


def test_a_model_without_recurrence_has_none():
    layout = StateLayout(16, (), 11)
    assert namespace_of(FakeEngine().info, layout)[1].state == ()
    assert layout.split({}) == {}
