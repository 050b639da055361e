"""Bytes → KV pages and recurrent rows. Integers only; allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.base import ModelSpec

MAX_AUTO_SNAPSHOT_ROWS = 64


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """pages: of page_size positions. rows: recurrent rows in all (0 for a pure attention model), snapshot_rows of them
    beyond one per running request. max_context: tokens that one request may reach."""

    pages: int
    rows: int
    snapshot_rows: int
    max_context: int


def kv_token_bytes(spec: ModelSpec) -> int:
    """Keys and values of one token over all attention layers."""
    return len(spec.attention_layers) * 2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize


def state_row_bytes(spec: ModelSpec) -> int:
    """Recurrent state of one sequence: f32 delta state plus the convolution tail, over all delta layers."""
    delta = spec.H_v * spec.d_k * spec.d_v * 4
    conv = spec.conv_dim * max(0, spec.conv_kernel - 1) * spec.dtype.itemsize
    return len(spec.delta_layers) * (delta + conv)


def pool_sizes(
    *,
    memory_bytes: int,
    kv_token_bytes: int,
    state_row_bytes: int,
    page_size: int,
    max_rows: int,
    max_context: int,
    kv_tokens: int | None,
    snapshot_rows: int | None,
) -> PoolSizes:
    """Divide memory_bytes. Rows of running requests come first, then snapshots (at most a quarter), then pages.

    kv_tokens and snapshot_rows, where given, are taken as they are. Pages never exceed what max_rows full contexts need.
    At least one page and, for a recurrent model, one snapshot row are always given: a machine that cannot afford that
    fails at allocation, with a message of the allocator.
    """
    left = memory_bytes
    if state_row_bytes == 0:
        rows = snapshot_rows = 0
    else:
        if snapshot_rows is None:
            affordable = memory_bytes // 4 // state_row_bytes
            snapshot_rows = max(1, min(MAX_AUTO_SNAPSHOT_ROWS, affordable))
        rows = max_rows + snapshot_rows
        left -= rows * state_row_bytes
    if kv_tokens is not None:
        pages = -(-kv_tokens // page_size)
    else:
        useful = max_rows * -(-max_context // page_size)
        affordable = useful if kv_token_bytes == 0 else max(0, left) // (page_size * kv_token_bytes)
        pages = max(1, min(useful, affordable))
    return PoolSizes(pages, rows, snapshot_rows, min(max_context, pages * page_size))
