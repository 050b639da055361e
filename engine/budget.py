"""Bytes → KV pages and recurrent rows. Integers only; allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import OutOfDeviceMemory
from engine.models.base import ModelSpec

MAX_AUTO_SNAPSHOT_ROWS = 64
AGENT_CONTEXT_TOKENS = 65536
"""What an agent's context grows to within an hour: KV for one of them is kept free of experts where it fits."""
MAX_PASS_TOKENS = 16384
RESERVE_BYTES = 512 << 20
"""Left to the driver, libraries' workspaces and a desktop."""


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


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """slots: of experts. pages, snapshot_rows, max_context: as in PoolSizes. left_bytes: what is used for nothing."""

    slots: int
    pages: int
    snapshot_rows: int
    max_context: int
    left_bytes: int


def vram_budget(free_bytes: int, total_bytes: int, wanted_bytes: int | None) -> int:
    """Device memory that the engine may take. wanted_bytes: as asked for, None = all that is free less a reserve, which is a
    twentieth of the device on small ones and RESERVE_BYTES at most."""
    if wanted_bytes is not None:
        return min(wanted_bytes, free_bytes)
    return max(0, free_bytes - min(RESERVE_BYTES, total_bytes // 20))


def pass_tokens(budget_bytes: int, token_bytes: int, max_context: int) -> int:
    """Tokens of one prefill pass: what a sixteenth of the budget holds, in steps of 64, at most MAX_PASS_TOKENS.

    token_bytes: of activations that are kept for each token of a pass.
    """
    most = min(MAX_PASS_TOKENS, -(-max_context // 64) * 64)
    return max(64, min(most, budget_bytes // 16 // max(1, token_bytes) // 64 * 64))


def device_sizes(
    *,
    budget_bytes: int,
    record_bytes: int,
    experts: int,
    top_k: int,
    layers: int,
    kv_token_bytes: int,
    state_row_bytes: int,
    page_size: int,
    max_rows: int,
    max_context: int,
    kv_tokens: int | None,
    snapshot_rows: int | None,
    slots: int | None,
    spare_rows: int = 0,
) -> DeviceSizes:
    """Divide what is left after weights and workspaces between state and experts.

    experts, layers: all of the model, and its MoE layers (0 for a model without any). Rows of running requests come first, with
    spare_rows that they share, then
    snapshots (a sixteenth), then KV for one agent's context, but no more than half, then slots, then KV for more contexts.
    kv_tokens, snapshot_rows and slots, where given, are taken as they are. Raises OutOfDeviceMemory where not even one page and
    the experts of one token in one layer fit.
    """
    left = budget_bytes
    if state_row_bytes:
        if snapshot_rows is None:
            snapshot_rows = max(1, min(MAX_AUTO_SNAPSHOT_ROWS, left // 16 // state_row_bytes))
        left -= (max_rows + spare_rows + snapshot_rows) * state_row_bytes
    else:
        snapshot_rows = 0
    page_bytes = page_size * kv_token_bytes
    useful = max_rows * -(-max_context // page_size)
    least_slots = min(experts, max(top_k, 1)) if experts else 0
    least = page_bytes + least_slots * record_bytes
    if left < least:
        what = "recurrent states, one KV page and the experts of one token"
        raise OutOfDeviceMemory(what, budget_bytes - left + least, budget_bytes)
    if kv_tokens is not None:
        pages = -(-kv_tokens // page_size)
    elif not page_bytes:
        pages = useful
    else:
        one = min(useful, -(-min(AGENT_CONTEXT_TOKENS, max_context) // page_size))
        half = left // 2 if experts and slots is None else left
        pages = max(1, min(one, half // page_bytes, (left - least_slots * record_bytes) // page_bytes))
    left -= pages * page_bytes
    if not experts:
        slots = 0
    elif slots is None:
        slots = max(0, min(experts, left // record_bytes))
    else:
        slots = min(slots, experts)
    left -= slots * record_bytes
    if left < 0 or (experts and slots < 1):
        least = max(0, -left) if slots >= 1 else record_bytes
        raise OutOfDeviceMemory(f"{pages} KV pages and {max(1, slots)} expert slots", budget_bytes + least, budget_bytes)
    if kv_tokens is None and page_bytes:
        more = min(useful - pages, left // page_bytes)
        pages, left = pages + more, left - more * page_bytes
    return DeviceSizes(slots, pages, snapshot_rows, min(max_context, pages * page_size), left)
