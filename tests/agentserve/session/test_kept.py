"""What a bounded cache says that it takes is what its values and their entries take, and never above its limit."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from agentserve.config import StoreConfig
from agentserve.metrics import Metrics
from agentserve.session.kept import ENTRY_BYTES, Kept
from agentserve.session.store import SqlStore

LIMIT = 4 * ENTRY_BYTES
STEPS = st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.sampled_from("abcdef"), st.integers(0, 2 * ENTRY_BYTES)))


@given(STEPS)
def test_it_keeps_the_newest_that_fit_with_their_entries(steps: list[tuple[str, str, int]]) -> None:
    kept: Kept[int] = Kept(LIMIT)
    model: OrderedDict[str, int] = OrderedDict()
    for what, key, size in steps:
        if what == "put":
            kept.put(key, size, size)
            model.pop(key, None)
            model[key] = size
            while sum(model.values()) + ENTRY_BYTES * len(model) > LIMIT and len(model) > 1:
                model.popitem(last=False)
        elif what == "get":
            assert kept.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        else:
            kept.drop(key)
            model.pop(key, None)
        assert kept.size_bytes == sum(model.values()) + ENTRY_BYTES * len(model)
    kept.clear()
    assert kept.size_bytes == 0


def test_metrics_tell_what_a_store_keeps_now() -> None:
    store, metrics = SqlStore(StoreConfig(url="sqlite://")), Metrics()
    for what, cache in store.caches.items():
        metrics.watch_kept(what, lambda cache=cache: cache.size_bytes)
    assert b'agentserve_kept_bytes{what="contexts"} 0.0' in metrics.render()
    store._contexts.put("resp_1", (b"1234", 0), 4)
    assert f'agentserve_kept_bytes{{what="contexts"}} {4.0 + ENTRY_BYTES}'.encode() in metrics.render()
    assert set(store.caches) == {"responses", "contexts", "digests", "aliases"}
