"""Namespace, salt, chained block keys."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from statecache.keys import KEY_BYTES, KeyChain, block_keys, canonical, namespace, salt_for, token_bytes
from statecache.types import Layout

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)

FIELDS = {
    "weights_digest": "ab" * 32,
    "layout": Layout(4096, (("layer.0.delta", 512), ("layer.0.conv", 64)), 151_936),
    "geometry": {"layers": 12, "heads": 8, "kv_heads": 2, "head_dim": 64},
    "kv_dtype": "bfloat16",
    "state_dtype": "float32",
    "rope": {"theta": 10_000.0, "factor": 1.0, "kind": "default"},
    "numerics": {"attention": "1", "delta": "2"},
}


@given(shared=tokens, mine=tokens, yours=tokens)
def test_keys_agree_exactly_on_the_shared_prefix(shared, mine, yours):
    a, b = shared + mine, shared + yours
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ka, kb = (block_keys(b"n", b"s", t, block=4) for t in (a, b))
    full = common // 4
    assert ka[:full] == kb[:full]
    assert not set(ka[full:]) & set(kb[full:])


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=200), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_chain_gives_the_same_keys_however_tokens_arrive(ids, cuts):
    chain = KeyChain(b"n", b"s", block=16)
    edges = sorted({0, len(ids), *(min(c, len(ids)) for c in cuts)})
    for start, end in itertools.pairwise(edges):
        chain.extend(token_bytes(ids[start:end]))
    assert chain.joined == b"".join(block_keys(b"n", b"s", ids, block=16))


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=200), known=st.integers(0, 12))
def test_a_chain_continues_from_known_keys(ids, known):
    keys = block_keys(b"n", b"s", ids, block=16)
    known = min(known, len(keys))
    chain = KeyChain(b"n", b"s", known=b"".join(keys[:known]), block=16)
    chain.extend(token_bytes(ids[16 * known :]))
    assert chain.joined == b"".join(keys)


def test_keys_follow_the_written_definition():
    ids = np.arange(130, dtype=np.int64)
    key = xxhash.xxh3_128_digest(b"name" + b"salt")
    expected = []
    for block in range(2):
        key = xxhash.xxh3_128_digest(key + ids[64 * block : 64 * (block + 1)].astype("<u4").tobytes())
        expected.append(key)
    assert block_keys(b"name", b"salt", ids) == expected
    assert all(len(k) == KEY_BYTES for k in expected)


PRINT_KEYS = """
import numpy as np
from statecache.keys import block_keys, namespace, salt_for
from statecache.types import Layout
name = namespace(weights_digest="ab" * 32, layout=Layout(4096, (("layer.0.delta", 512), ("layer.0.conv", 64)), 151936),
    geometry={"head_dim": 64, "kv_heads": 2, "heads": 8, "layers": 12}, kv_dtype="bfloat16", state_dtype="float32",
    rope={"kind": "default", "factor": 1.0, "theta": 10000.0}, numerics={"delta": "2", "attention": "1"})
salt = salt_for("alice", b"secret")
print(name.hex(), salt.hex(), *(k.hex() for k in block_keys(name, salt, np.arange(200))))
"""


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_golden_vectors_hold_in_another_process(seed):
    """Restored state is found by these bytes after a restart: a change here orphans every stored checkpoint."""
    out = subprocess.run(
        [sys.executable, "-c", PRINT_KEYS],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
    ).stdout.split()
    name, salt = namespace(**FIELDS), salt_for("alice", b"secret")
    assert out == [name.hex(), salt.hex(), *(k.hex() for k in block_keys(name, salt, np.arange(200)))]
    assert out == GOLDEN_VECTORS


GOLDEN_VECTORS = [
    "b4d5d9b7720050613fdb4cf59d333d968f9b7d13b45492b10b4a170998ca42c2",
    "383b68a8a366a7e1586046300ba249af422a7d2014b5a37dbbac0f9fd85b87b4",
    "cb893b67ce69106941af750650fffd62",
    "2d26a6eed8b60b45d65cd1d1b6cbf65d",
    "0a2f164511989bfbe39a4e07f30a1cca",
]


def test_any_changed_field_changes_the_namespace():
    base = namespace(**FIELDS)
    changes = {
        "weights_digest": "ac" * 32,
        "layout": Layout(4096, (("layer.0.delta", 512), ("layer.0.conv", 65)), 151_936),
        "geometry": FIELDS["geometry"] | {"heads": 9},
        "kv_dtype": "float16",
        "state_dtype": "bfloat16",
        "rope": FIELDS["rope"] | {"theta": 1_000_000.0},
        "numerics": FIELDS["numerics"] | {"delta": "3"},
        "quantization": "int8",
        "adapters": ("cd" * 32,),
        "codec": "zstd",
    }
    names = {namespace(**(FIELDS | {field: value})) for field, value in changes.items()}
    assert len(names) == len(changes)
    assert base not in names
    assert namespace(**FIELDS) == base


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(a=plain, b=plain)
def test_the_canonical_encoding_tells_values_apart(a, b):
    assert (canonical(a) == canonical(b)) == (_typed(a) == _typed(b))


def _typed(value):
    """Values with their types, since 1 == True == 1.0 and -0.0 == 0.0 in Python."""
    if isinstance(value, dict):
        return ("m", sorted((k.encode(), _typed(v)) for k, v in value.items()))
    if isinstance(value, list):
        return ("l", [_typed(v) for v in value])
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


def test_salts_differ_by_principal_and_secret():
    assert len({salt_for("a"), salt_for("b"), salt_for("a", b"x"), salt_for("b", b"x")}) == 4
    assert len(salt_for("a")) == 32


@pytest.mark.parametrize("bad", [[-1], [2**32], [[1, 2]], [1.5]])
def test_impossible_token_ids_are_refused(bad):
    with pytest.raises(ValueError, match="token id"):
        token_bytes(np.array(bad))
