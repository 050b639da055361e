"""What the saved states of an engine are filed under."""

from __future__ import annotations

from engine.types import ROW, ModelInfo, StateLayout
from statecache import keys
from statecache import types as cache_types


def namespace_of(info: ModelInfo, layout: StateLayout) -> tuple[bytes, cache_types.Layout]:
    """What the states of this engine are filed under, and their sizes. Two engines share states only if both are equal."""
    state = ((ROW, layout.state_bytes),) if layout.state else ()
    cache_layout = cache_types.Layout(layout.kv_token_bytes, state, layout.vocab_size)
    numerics = dict(info.numerics)
    namespace = keys.namespace(
        weights_digest=info.weights_digest,
        layout=cache_layout,
        geometry={"model_type": info.model_type, "layers": info.layers, "parameters": info.parameters},
        kv_dtype=info.dtype,
        state_dtype=",".join(f"{c.name}:{c.dtype}:{c.nbytes}" for c in layout.state),  # in the order in which they lie there
        rope={name: value for name, value in numerics.items() if name.startswith("rope")},
        numerics={**numerics, "backend": info.backend},
    )
    return namespace, cache_layout
