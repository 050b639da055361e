"""Namespace, salt and chained block keys: how a token prefix is named.

A key only locates. Whoever finds something by key compares namespace, salt and token ids before using a byte, so a
collision (xxh3 is not made to resist them) can cost a miss and never a wrong answer.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xxhash

from statecache.types import BLOCK_TOKENS, Layout

KEY_BYTES = 16
FORMAT_VERSION = 1
"""Part of every namespace; raised when the meaning of stored bytes changes."""

Hash128 = Callable[[bytes], bytes]
"""bytes → 16 bytes. Injectable so that tests can force collisions."""

Plain = None | bool | int | float | str | bytes | Sequence["Plain"] | Mapping[str, "Plain"]


def canonical(value: Plain) -> bytes:
    """Encode plain data so that equal values, and only those, give equal bytes in every process.

    Tag, then length or count, then content; map keys in byte order; floats as IEEE-754 doubles. Raises TypeError on others.
    """
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            digits = str(value).encode()
            return b"i" + struct.pack("<I", len(digits)) + digits
        case float():
            return b"d" + struct.pack("<d", value)
        case str():
            raw = value.encode()
            return b"s" + struct.pack("<I", len(raw)) + raw
        case bytes():
            return b"b" + struct.pack("<I", len(value)) + value
        case Mapping():
            pairs = sorted((k.encode(), v) for k, v in value.items())
            body = b"".join(canonical(k) + canonical(v) for k, v in pairs)
            return b"m" + struct.pack("<I", len(pairs)) + body
        case list() | tuple():
            return b"l" + struct.pack("<I", len(value)) + b"".join(map(canonical, value))
        case _:
            raise TypeError(f"{type(value).__name__} has no canonical encoding")


def namespace(
    *,
    weights_digest: str,
    layout: Layout,
    geometry: Mapping[str, Plain],
    kv_dtype: str,
    state_dtype: str,
    rope: Mapping[str, Plain],
    numerics: Mapping[str, Plain] | int,
    quantization: str = "none",
    adapters: Sequence[str] = (),
    codec: str = "raw",
) -> bytes:
    """Digest of everything that makes two states interchangeable: 32 bytes, SHA-256.

    weights_digest: content digest of the weights. adapters: content digests, in the order applied.
    geometry: layers, heads, widths as the model file names them. numerics: raised by hand when kernels change results.
    """
    fields: dict[str, Plain] = {
        "format": FORMAT_VERSION,
        "block_tokens": BLOCK_TOKENS,
        "weights": weights_digest,
        "adapters": tuple(adapters),
        "quantization": quantization,
        "layout": (layout.kv_token_bytes, tuple((n, b) for n, b in layout.state), layout.vocab_size),
        "geometry": geometry,
        "kv_dtype": kv_dtype,
        "state_dtype": state_dtype,
        "rope": rope,
        "numerics": numerics,
        "codec": codec,
    }
    return hashlib.sha256(canonical(fields)).digest()


def salt_for(principal: str, secret: bytes = b"") -> bytes:
    """Isolation digest of a principal, 32 bytes. secret: the server's own, so that a salt cannot be computed outside."""
    return hmac.new(secret, b"statecache salt 1\0" + principal.encode(), hashlib.sha256).digest()


def token_bytes(tokens: np.ndarray | Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises ValueError on an id outside [0, 2³²)."""
    ids = np.ascontiguousarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"token ids must have one dimension, got {ids.ndim}")
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {ids.dtype}")
    if ids.size and ids.dtype != np.uint32 and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF):
        raise ValueError("token id outside [0, 2**32)")
    return ids.astype("<u4", copy=False).tobytes()


def xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


class KeyChain:
    """Block keys of one growing token sequence.

    k_0 = H(namespace ‖ salt); k_i = H(k_{i−1} ‖ ids of block i as u32le). Each block is hashed once, however the tokens
    arrive. `known` starts the chain in the middle: the keys (16 bytes each, joined) of blocks hashed earlier.
    """

    def __init__(
        self, namespace: bytes, salt: bytes, *, known: bytes = b"", block: int = BLOCK_TOKENS, hash128: Hash128 = xxh3_128
    ) -> None:
        self._hash = hash128
        self._block_bytes = 4 * block
        self._keys = bytearray(known)
        self._last = bytes(known[-KEY_BYTES:]) if known else hash128(namespace + salt)
        self._rest = b""

    def extend(self, ids: bytes) -> None:
        """Append token ids (u32le) that follow those given before."""
        data = memoryview(self._rest + ids)
        step, hash128, last, keys = self._block_bytes, self._hash, self._last, self._keys
        end = len(data) - len(data) % step
        for at in range(0, end, step):
            last = hash128(last + data[at : at + step])
            keys += last
        self._last = last
        self._rest = bytes(data[end:])

    @property
    def joined(self) -> bytes:
        """Keys of all full blocks, 16 bytes each, in order."""
        return bytes(self._keys)


def block_keys(
    namespace: bytes, salt: bytes, tokens: np.ndarray | Sequence[int], block: int = BLOCK_TOKENS, *, hash128: Hash128 = xxh3_128
) -> list[bytes]:
    """Keys of the full blocks of `tokens`; a partial last block has none."""
    chain = KeyChain(namespace, salt, block=block, hash128=hash128)
    chain.extend(token_bytes(tokens))
    joined = chain.joined
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]
