"""The device's operations in plain torch: what the offloaded engine asks of a set of kernels, and what it runs on where there
is no other set.

Everything is written into tensors that the caller gives; nothing is returned, so a captured graph can replay the calls. `live`
and `contexts` of −1 mark rows that pad a batch to a graph's size: they change no state. A set of kernels must agree with this
one up to float rounding, and to the integer where there are only integers. Shapes: T tokens, B rows of a decode step, S
sequences.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from engine.kernels import reference
from engine.kernels.reference import route as choose_experts
from engine.moe.device_state import FREE, SlotState

Tensor = torch.Tensor
NONE = -1


# ── dense ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def gather(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """Rows of table [V, H] in f32. ids: int32 [T]."""
    out.copy_(table[ids.long()])


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual f32 [T, H] += delta; out = rms norm of it."""
    if delta is not None:
        residual += delta.float()
    out.copy_(residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps) * weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [T, K] · weight [N, K]ᵀ + bias; out [T, N] may be f32."""
    out.copy_(F.linear(x, weight, bias))


def silu_mul(both: Tensor, out: Tensor) -> None:
    """both: [T, 2 I], gate beside up."""
    half = both.shape[1] // 2
    out.copy_(F.silu(both[:, :half].float()) * both[:, half:].float())


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """rms norm over the last dimension, times silu(gate). All [T, heads, n]."""
    out.copy_(reference.rms_norm(x.float(), weight, eps, gate))


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


def attend_prepare(
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_out: Tensor,
    gated: bool,
) -> None:
    """Norm and rotate queries and keys; keys and values go to their pages.

    projected: [T, n]: per head its query (and gate, if gated), then key heads, then value heads. positions, slots: int32 [T];
    slot = page · page_size + offset, −1 = stored nowhere. pools: [pages, page_size, kv_heads, d], any stride between pages.
    """
    tokens, heads, d = q_out.shape
    kv_heads = k_pool.shape[2]
    q, k, v = projected.split([heads * d * (1 + gated), kv_heads * d, kv_heads * d], dim=1)
    at = positions.long().clamp(min=0)
    q = q.reshape(tokens, heads, -1)[..., :d]
    q_out.copy_(reference.rope(reference.rms_norm(q, q_weight, eps), cos[at], sin[at]))
    k = reference.rope(reference.rms_norm(k.reshape(tokens, kv_heads, d), k_weight, eps), cos[at], sin[at])
    stored = slots >= 0
    page, offset = slots[stored].long() // k_pool.shape[1], slots[stored].long() % k_pool.shape[1]
    k_pool[page, offset] = k[stored].to(k_pool.dtype)
    v_pool[page, offset] = v.reshape(tokens, kv_heads, d)[stored].to(v_pool.dtype)


def decode_scratch(rows: int, heads: int, d: int) -> int:
    """Floats that decode_attention wants."""
    return 1


def decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Tensor,
    contexts: Tensor,
    scale: float,
    gate: Tensor | None,
    out: Tensor,
    scratch: Tensor,
) -> None:
    """One new token a row, at position contexts[b], whose key is stored. q: [B, heads, d]. pages: int32 [B, P]."""
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    prefill_attention(q, k_pool, v_pool, pages, starts, contexts, 1, scale, gate, out)


def prefill_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Tensor,
    starts: Tensor,
    contexts: Tensor,
    longest: int,
    scale: float,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    """Causal attention of each sequence's rows starts[s] … starts[s + 1], the first at position contexts[s]; times
    sigmoid(gate) [T, heads, d] if given. out: [T, heads · d]; rows of a sequence with context −1 become zeros."""
    edges = starts.tolist()
    for s, context in enumerate(contexts.tolist()):
        rows = slice(edges[s], edges[s + 1])
        if rows.start == rows.stop:
            continue
        if context < 0:
            out[rows] = 0
            continue
        mixed = reference.paged_attention(q[rows], k_pool, v_pool, pages[s], context, scale)
        if gate is not None:
            mixed = reference.sigmoid_gate(mixed, gate[rows])
        out[rows] = mixed.reshape(mixed.shape[0], -1)


# ── gated delta net ─────────────────────────────────────────────────────────────────────────────────────────────────


def conv(
    mixed: Tensor, weight: Tensor, tails: Tensor, starts: Tensor, contexts: Tensor, rows: Tensor, longest: int, out: Tensor
) -> None:
    """Depthwise causal convolution and silu; tails[rows[s]] is read (zeros where contexts[s] is 0) and advanced.

    mixed, out: [T, C]. weight: [C, K]. tails: [pool rows, C, K − 1]. A row of −1: the sequence is skipped.
    """
    edges = starts.tolist()
    for s, (context, row) in enumerate(zip(contexts.tolist(), rows.tolist(), strict=True)):
        part = slice(edges[s], edges[s + 1])
        if row < 0 or context < 0 or part.start == part.stop:
            continue
        if context == 0:
            tails[row] = 0
        out[part] = reference.causal_conv(mixed[part], weight, tails[row])


def delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    starts: Tensor,
    contexts: Tensor,
    rows: Tensor,
    longest: int,
    k_heads: int,
    out: Tensor,
) -> None:
    """The gated delta rule over each sequence. mixed: [T, q | k | v] after the convolution. states: f32
    [pool rows, H_v, d_k, d_v], as tails in `conv`. out: [T, H_v, d_v]."""
    _, v_heads, d_v = out.shape
    d_k = states.shape[2]
    q, k, v = mixed.split([k_heads * d_k, k_heads * d_k, v_heads * d_v], dim=1)
    g, beta = reference.delta_gates(a, b, a_log, dt_bias)
    edges = starts.tolist()
    for s, (context, row) in enumerate(zip(contexts.tolist(), rows.tolist(), strict=True)):
        part = slice(edges[s], edges[s + 1])
        if row < 0 or context < 0 or part.start == part.stop:
            continue
        if context == 0:
            states[row] = 0
        out[part] = reference.gated_delta_chunk(
            q[part].reshape(-1, k_heads, d_k),
            k[part].reshape(-1, k_heads, d_k),
            v[part].reshape(-1, v_heads, d_v),
            g[part],
            beta[part],
            states[row],
        )


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def route(scores: Tensor, experts: int, normalize: bool, live: Tensor | None, ids: Tensor, weights: Tensor) -> None:
    """The best experts of each token. scores: f32 [T, experts (+ 1)]. live: int32 [T] or None; where negative, ids := −1."""
    chosen, w = choose_experts(scores[:, :experts], ids.shape[1], normalize)
    ids.copy_(chosen)
    weights.copy_(w)
    if live is not None:
        ids[live < 0] = NONE
        weights[live < 0] = 0


def slot_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: Tensor,
    out: Tensor,
    accumulate: bool,
) -> None:
    """Σ weight · expert(x) over each token's experts in slots; −1 is skipped. ids: int32 [T, k], rows of gate_up and down (any
    stride between rows). inner: scratch [T · k, I]. out: f32 [T, H], added to if `accumulate`."""
    total = reference.experts_forward(x, ids, weights, gate_up, down)
    if accumulate:
        out += total
    else:
        out.copy_(total)


def merge(
    residual: Tensor,
    out: Tensor,
    box_out: Tensor | None,
    counts: Tensor | None,
    status: Tensor | None,
    shared: Tensor | None,
    gate: Tensor | None,
) -> None:
    """residual f32 [T, H] += out (+ box_out where the CPU had work: counts[1] > 0, and status[0] is 0) (+ sigmoid(gate) ·
    shared).

    gate: f32 [T, 1]."""
    residual += out
    if box_out is not None and counts is not None and status is not None and int(counts[1]) and not int(status[0]):
        residual += box_out
    if shared is not None and gate is not None:
        residual += torch.sigmoid(gate) * shared.float()


def fetch(bank: Tensor, pool: Tensor, work: Tensor, counts: Tensor) -> None:
    """Copy counts[0] records: bank[work[i, 0]] → pool[work[i, 1]]. Both uint8 [rows, record bytes]; the bank is host memory."""
    for flat_id, slot in work[: int(counts[0])].tolist():
        pool[slot] = bank[flat_id].to(pool.device)


def stamp(clock: Tensor, counts: Tensor, begin: bool) -> None:
    """Measure the fetch between two stamps. clock: int64 [4]: nanoseconds of fetches, records fetched, when the last one
    began."""
    now = time.monotonic_ns()
    if begin:
        clock[2] = now
    elif int(counts[0]):
        clock[0] += now - clock[2]
        clock[1] += int(counts[0])


def admit(
    state: SlotState,
    layer: int,
    ids: Tensor,
    table: Tensor,
    resident: Tensor,
    fetched: Tensor,
    cpu: Tensor,
    work: Tensor,
    counts: Tensor,
) -> None:
    """Decide where each active expert of a decode step runs, as dispatch.plan_decode does, and take the slots for the fetches.

    ids: int32 [T, k], experts of the layer or −1. table: int32 [n], how many of m misses to fetch. Out: resident, fetched
    (slots) and cpu (experts), each int32 [T, k] with −1 elsewhere; work int32 [W, 2] (flat id, slot); counts int32 [4]:
    fetches, CPU experts, hits, misses. Owners change in both maps here; the copies follow before anything else reads them.
    """
    _tick(state)
    flat = ids.flatten().tolist()
    active = [e for e in dict.fromkeys(flat) if e >= 0]
    base = layer * state.experts
    where = {e: int(state.slot_for_id[base + e]) for e in active}
    hits = [e for e in active if where[e] >= 0]
    for e in hits:
        _touch(state, where[e])
    misses = [e for e in active if where[e] < 0]
    quota = min(int(table[min(len(misses), len(table) - 1)]), len(work))
    taken: dict[int, int] = {}
    fetchable = [e for e in misses if base + e < state.pinned_ids]
    for e in fetchable[:quota]:
        slot = _victim(state, {base + a for a in active}, layer, set(taken.values()))
        if slot == NONE:
            break
        _assign(state, slot, base + e)
        work[len(taken)] = torch.tensor([base + e, slot], dtype=torch.int32)
        taken[e] = slot
    left = [e for e in misses if e not in taken]
    _count(state, counts, (len(taken), len(left), len(hits), len(misses)))
    _rewrite(resident, ids, {e: where[e] for e in hits})
    _rewrite(fetched, ids, taken)
    _rewrite(cpu, ids, {e: e for e in left})


def union(
    state: SlotState,
    layer: int,
    ids: Tensor,
    limit: int,
    table: Tensor | None,
    first: bool,
    slot_of: Tensor,
    cpu: Tensor,
    work: Tensor,
    counts: Tensor,
) -> None:
    """One round of fetching what a prefill batch routes to: slot_of int32 [E] says which experts can be computed after it.

    Misses with the most tokens first, then the lowest id; at most min(limit, W) and as many as there are victims, never one
    that ids uses. first: the step is counted; of m misses the first table[m] of that order are fetched over all rounds, and
    the others are the CPU's (cpu int32 [T, k]), as are those that are not pinned; without a table all are fetched. In later
    rounds slot_of has only what that round fetched. counts as in `admit`.
    """
    flat = ids.flatten().tolist()
    tokens: dict[int, int] = {}
    for e in flat:
        if e >= 0:
            tokens[e] = tokens.get(e, 0) + 1
    base = layer * state.experts
    where = {e: int(state.slot_for_id[base + e]) for e in tokens}
    slot_of.fill_(NONE)
    hits = [e for e in tokens if where[e] >= 0] if first else []
    if first:
        _tick(state)
        cpu.fill_(NONE)
        for e in hits:
            _touch(state, where[e])
            slot_of[e] = where[e]
        misses = sorted((e for e in tokens if where[e] < 0), key=lambda e: (-tokens[e], e))
        fetchable = [e for e in misses if base + e < state.pinned_ids]
        quota = len(misses) if table is None else int(table[min(len(misses), len(table) - 1)])
        waiting = fetchable[:quota]
        on_cpu = set(misses) - set(waiting)
        state.round_ids.fill_(NONE)
        state.round_ids[: len(waiting)] = torch.tensor(waiting, dtype=torch.int32)
        state.round_left.fill_(len(waiting))
        _rewrite(cpu, ids, {e: e for e in on_cpu})
        _count(state, counts, (0, len(on_cpu), len(hits), len(misses)))
        active = {base + e for e in tokens}
    else:
        # What earlier rounds fetched has been computed; its slots may go.
        waiting = [e for e in state.round_ids.tolist() if e >= 0]
        active = set()
    taken: dict[int, int] = {}
    for e in waiting[: min(limit, len(work))]:
        slot = _victim(state, active, layer, set(taken.values()))
        if slot == NONE:
            break
        _assign(state, slot, base + e)
        work[len(taken)] = torch.tensor([base + e, slot], dtype=torch.int32)
        taken[e] = slot
        slot_of[e] = slot
    rest = waiting[len(taken) :]
    state.round_ids.fill_(NONE)
    state.round_ids[: len(rest)] = torch.tensor(rest, dtype=torch.int32)
    state.round_left.fill_(len(rest))
    counts[0] = len(taken)
    state.totals[0] += len(taken)


def group(ids: Tensor, experts: int, order: Tensor, offsets: Tensor) -> None:
    """Pairs t · k + j sorted by expert: those of e are order[offsets[e] : offsets[e + 1]]. −1 is left out."""
    flat = ids.flatten().long()
    key = torch.where(flat < 0, experts, flat)
    order.copy_(torch.argsort(key, stable=True))
    torch.cumsum(torch.bincount(key, minlength=experts + 1)[:experts], 0, out=offsets[1:])
    offsets[0] = 0


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    order: Tensor,
    offsets: Tensor,
    slot_of: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: Tensor,
    out: Tensor,
) -> None:
    """out f32 [T, H] += Σ weight · expert(x) over the experts that have a slot in slot_of; others are skipped.

    order, offsets: from `group` of ids. weights: f32 [T, k]. inner: scratch [T · k, I]."""
    k = ids.shape[1]
    edges, slots = offsets.tolist(), slot_of.tolist()
    half = down.shape[2]
    for e, slot in enumerate(slots):
        pairs = order[edges[e] : edges[e + 1]].long()
        if slot < 0 or not len(pairs):
            continue
        token = pairs // k
        both = F.linear(x[token], gate_up[slot])
        hidden = (F.silu(both[:, :half].float()) * both[:, half:].float()).to(x.dtype)
        out.index_add_(0, token, F.linear(hidden, down[slot]).float() * weights.flatten()[pairs][:, None])


def _rewrite(out: Tensor, ids: Tensor, rows: dict[int, int]) -> None:
    out.copy_(torch.tensor([rows.get(e, NONE) for e in ids.flatten().tolist()], dtype=torch.int32).view(ids.shape))


def _count(state: SlotState, counts: Tensor, figures: tuple[int, int, int, int]) -> None:
    new = torch.tensor(figures, dtype=torch.int32)
    counts.copy_(new)
    state.totals.add_(new.to(state.totals.device))


def _tick(state: SlotState) -> None:
    state.step += 1


def _touch(state: SlotState, slot: int) -> None:
    idle = int(state.step) - int(state.last_use[slot])
    state.heat[slot] = (int(state.heat[slot]) >> min(idle // 64, 31)) + 1
    state.last_use[slot] = int(state.step)


def _victim(state: SlotState, active: set[int], layer: int, taken: set[int]) -> int:
    """As SlotMap.victim: a free slot, else the policy's choice among slots whose owner is not active; NONE if there is none."""
    owners = state.id_of_slot.tolist()
    usable = [s for s, owner in enumerate(owners) if owner >= FREE and s not in taken and owner not in active]
    free = next((s for s in usable if owners[s] == FREE), NONE)
    if free != NONE or not usable:
        return free
    last, step = state.last_use.tolist(), int(state.step)
    if state.policy == "frequency":
        heat = state.heat.tolist()
        return min(usable, key=lambda s: (heat[s] >> min((step - last[s]) // 64, 31), last[s], s))
    if state.policy == "lru_floor":
        residents = state.residents.tolist()
        usable = [
            s for s in usable if owners[s] // state.experts == layer or residents[owners[s] // state.experts] > state.floor
        ]
    return min(usable, key=lambda s: (last[s], s)) if usable else NONE


def _assign(state: SlotState, slot: int, flat_id: int) -> None:
    owner = int(state.id_of_slot[slot])
    if owner >= 0:
        state.slot_for_id[owner] = NONE
        state.residents[owner // state.experts] -= 1
    state.id_of_slot[slot] = flat_id
    state.slot_for_id[flat_id] = slot
    state.residents[flat_id // state.experts] += 1
    state.heat[slot] = 0
    _touch(state, slot)


# ── hand-off (engine/moe/handoff.py) ────────────────────────────────────────────────────────────────────────────────


def publish(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    epoch: Tensor,
    layer: int,
    request: Tensor,
    box_x: Tensor,
    box_ids: Tensor,
    box_weights: Tensor,
) -> None:
    """Ask the executor for the experts in ids (−1 = not its), if counts[1] says that there are any. The epoch comes last."""
    if not int(counts[1]):
        return
    tokens = len(x)
    box_x[:tokens] = x
    box_ids[:tokens] = ids
    box_weights[:tokens] = weights
    epoch += 1
    request[1], request[2] = layer, tokens
    request[0] = int(epoch)


def wait_reply(counts: Tensor, epoch: Tensor, reply: Tensor, limit_us: int, status: Tensor) -> None:
    """Wait for the reply to this request, limit_us at most. status: 0, or 1 = no reply, 2 = it says that it failed; [1] epoch.

    With a status from an earlier layer nothing is waited for: the step is lost, and ends soon."""
    if not int(counts[1]) or int(status[0]):
        return
    seen, wanted, until = reply.numpy(), int(epoch), time.monotonic_ns() + 1000 * limit_us
    while int(seen[0]) != wanted:
        if time.monotonic_ns() > until:
            status[0], status[1] = 1, wanted
            return
        time.sleep(0)
    if seen[1]:
        status[0], status[1] = 2, wanted
