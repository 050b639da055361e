"""Plain torch statement of every kernel: what fast kernels are compared with, and what runs where there are none.

Rules that the reference backend relies on: the shapes of a function's operations depend only on its arguments' shapes and,
in attention, on the position; intermediate results are f32; outputs have the input's dtype. Called with one token at a time,
the result then depends on nothing but that token's prefix (torch's vector loops round differently in their tails, and matrix
products differ with their row count, so calls with several tokens promise closeness only).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NAME = "torch"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor | None = None) -> torch.Tensor:
    """x · weight / rms(x) over the last dimension, times silu(gate) if given.

    x, gate: [..., n]. weight: f32 [n] (models that store w − 1 add the one at load). Returns x's shape and dtype.
    """
    wide = x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    if gate is not None:
        out = out * F.silu(gate.float())
    return out.to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, k] times weight [n, k] transposed, plus bias [n]."""
    return F.linear(x, weight, bias)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2·r dimensions of each head, dimension i with i + r.

    x: [tokens, heads, head_dim]. cos, sin: f32 [tokens, r]. Returns x's dtype, rotated in f32.
    """
    r = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., :r].float(), x[..., r : 2 * r].float()
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., 2 * r :]], dim=-1)


def write_kv(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values [tokens, kv_heads, head_dim] at pool positions `slots` (int64: page · page_size + offset)."""
    k_pool.view(-1, *k_pool.shape[2:])[slots] = k
    v_pool.view(-1, *v_pool.shape[2:])[slots] = v


def paged_attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, page_table: torch.Tensor, context: int, scale: float
) -> torch.Tensor:
    """Causal attention of one sequence's new tokens over everything up to each of them.

    q: [tokens, heads, head_dim], positions context … context + tokens − 1, whose keys are in the pools already.
    k_pool, v_pool: [pages, page_size, kv_heads, head_dim]. page_table: int32 [pages of the sequence].
    Query head h reads key head h // (heads / kv_heads). Returns q's shape and dtype; scores and sums in f32.
    """
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_pool.shape[1:3]
    total = context + tokens
    pages = page_table[: -(-total // page_size)].long()
    k = k_pool[pages].reshape(-1, kv_heads, head_dim)[:total].float()
    v = v_pool[pages].reshape(-1, kv_heads, head_dim)[:total].float()
    grouped = q.float().view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped @ k.permute(1, 2, 0)[:, None]) * scale
    if tokens > 1:
        hidden = torch.ones(tokens, total, dtype=torch.bool, device=q.device).triu(context + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.softmax(scores, -1) @ v.permute(1, 0, 2)[:, None]
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim).to(q.dtype)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Depthwise causal convolution followed by silu; `state` is advanced in place.

    x: [tokens, channels]. weight: [channels, K]. state: [channels, K − 1], the last inputs, oldest first.
    Returns x's shape and dtype.
    """
    tokens, kernel = x.shape[0], weight.shape[1]
    padded = torch.cat([state.t().to(x.dtype), x])
    taps = weight.float().t()
    out = padded[:tokens].float() * taps[0]
    for j in range(1, kernel):
        out = out + padded[j : j + tokens].float() * taps[j]
    state.copy_(padded[tokens:].t())
    return F.silu(out).to(x.dtype)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g = −exp(a_log) · softplus(a + dt_bias) and write strength beta = sigmoid(b), both f32 [tokens, H_v]."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), torch.sigmoid(b.float())


def gated_delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token of the gated delta rule: S ← e^g S; S ← S + k ⊗ beta (v − Sᵀk); out = Sᵀq.

    q, k: [H_k, d_k], normalized to length one here; q is also divided by √d_k. v: [H_v, d_v]. g, beta: f32 [H_v].
    state: f32 [H_v, d_k, d_v], advanced in place. Value head h uses key head h // (H_v / H_k). Returns f32 [H_v, d_v].
    """
    repeat = v.shape[0] // q.shape[0]
    q = (_unit(q.float()) * q.shape[-1] ** -0.5).repeat_interleave(repeat, 0)
    k = _unit(k.float()).repeat_interleave(repeat, 0)
    state.mul_(g.exp()[:, None, None])
    change = (v.float() - (state * k[..., None]).sum(-2)) * beta[:, None]
    state.add_(k[..., None] * change[:, None, :])
    return (state * q[..., None]).sum(-2)


def gated_delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """`gated_delta_step` for each token in turn; all but state have a leading [tokens]. Returns f32 [tokens, H_v, d_v]."""
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for t in range(v.shape[0]):
        out[t] = gated_delta_step(q[t], k[t], v[t], g[t], beta[t], state)
    return out


def route(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax, then the top_k best experts of each token, best first.

    logits: [tokens, experts]. Returns ids int32 [tokens, top_k] and weights f32 [tokens, top_k], which sum to one if
        `normalize`.
    """
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights


WHOLE = slice(None)


def expert_outputs(
    x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, out: torch.Tensor, part: slice = WHOLE
) -> None:
    """down(silu(gate x) · up x) of each chosen expert, before weighting; entries of ids that are −1 are left alone.

    x: [tokens, hidden]. ids: int32 [tokens, top_k]. gate_up: [rows, 2·inter, hidden], gate above up. down:
        [rows, hidden, inter].
    out: f32 [tokens, top_k, hidden]. part: of the inner rows, those that are computed; the parts of a whole add up.
    """
    if x.shape[0] == 1:
        first = torch.zeros(1, dtype=torch.long)
        pairs = [(e, first, torch.tensor([j])) for j, e in enumerate(ids[0].tolist()) if e >= 0]
    else:
        pairs = [(e, *torch.where(ids == e)) for e in torch.unique(ids).tolist() if e >= 0]
    for e, token, choice in pairs:
        if part == WHOLE:
            both, last = F.linear(x[token], gate_up[e]), down[e]
        else:
            both, last = F.linear(x[token], gate_up[e].unflatten(0, (2, -1))[:, part].flatten(0, 1)), down[e][:, part]
        half = last.shape[1]
        inner = F.silu(both[:, :half].float()) * both[:, half:].float()
        out[token, choice] = F.linear(inner.to(x.dtype), last).float()


def combine(expert_out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum each token's expert outputs, weighted by the router, in the order of its choices.

    expert_out: f32 [tokens, top_k, hidden]. weights: f32 [tokens, top_k]. Returns f32 [tokens, hidden].
    """
    total = expert_out[:, 0] * weights[:, :1]
    for j in range(1, weights.shape[1]):
        total = total + expert_out[:, j] * weights[:, j : j + 1]
    return total


def experts_forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    part: slice = WHOLE,
) -> torch.Tensor:
    """The routed experts of one layer. ids of −1 count as zero. Arguments as above. Returns f32 [tokens, hidden]."""
    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    expert_outputs(x, ids, gate_up, down, out, part)
    return combine(out, weights)


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate x) · up x) of one dense MLP. gate_up: [2·inter, hidden]. Returns x's dtype."""
    both = F.linear(x, gate_up)
    inter = down.shape[1]
    return F.linear((F.silu(both[:, :inter].float()) * both[:, inter:].float()).to(x.dtype), down)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(gate), in f32, back in x's dtype. gate broadcasts over x."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
