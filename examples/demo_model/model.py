"""The training forward of the demo model, with parameters stacked over layers.

Tokens are flat, [rows·length], so that compiled code does not depend on the row length: only attention and the scan
over chunks see rows. Numerically this is transformers' Qwen3_5MoeForCausalLM; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.demo_model.config import Shape
from examples.demo_model.delta import CHUNK, scan, unit_inverse

Params = dict[str, Tensor]


def parameter_shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """Stacked shapes by name; the first dimension of all but embed and final_norm is the layer (of its type)."""
    n, a = s.layers, s.layers // s.attention_every
    d = n - a
    key, value, h = s.key_heads * s.delta_dim, s.value_heads * s.delta_dim, s.hidden
    return {
        "embed": (s.vocabulary, h), "final_norm": (h,), "norm_in": (n, h), "norm_post": (n, h),
        "qkv": (d, 2 * key + value, h), "z": (d, value, h), "b": (d, s.value_heads, h), "a": (d, s.value_heads, h),
        "conv": (d, 2 * key + value, s.conv), "dt_bias": (d, s.value_heads), "A_log": (d, s.value_heads),
        "delta_norm": (d, s.delta_dim), "delta_out": (d, h, value),
        "q": (a, 2 * s.heads * s.head_dim, h), "k": (a, s.kv_heads * s.head_dim, h), "v": (a, s.kv_heads * s.head_dim, h),
        "o": (a, h, s.heads * s.head_dim), "q_norm": (a, s.head_dim), "k_norm": (a, s.head_dim),
        "router": (n, s.experts, h), "gate_up": (n, s.experts, 2 * s.expert_width, h), "down": (n, s.experts, h, s.expert_width),
        "shared_gate": (n, s.shared_width, h), "shared_up": (n, s.shared_width, h), "shared_down": (n, h, s.shared_width),
        "shared_scale": (n, 1, h),
    }  # fmt: skip


OUTPUTS = ("delta_out", "o", "down", "shared_down")  # written into the residual stream: smaller at the start
MATRICES = (
    "qkv",
    "z",
    "delta_out",
    "q",
    "k",
    "v",
    "o",
    "gate_up",
    "down",
    "shared_gate",
    "shared_up",
    "shared_down",
)


def initial(s: Shape, seed: int, device: str) -> Params:
    """Fresh f32 parameters: std 0.6/√hidden, output projections ÷ √(2·layers)."""
    generator = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in parameter_shapes(s).items():
        if name in ("final_norm", "norm_in", "norm_post", "q_norm", "k_norm"):
            value = torch.zeros(shape)
        elif name == "delta_norm":
            value = torch.ones(shape)
        elif name == "dt_bias":
            # softplus(dt_bias) log-uniform in [0.001, 0.1]: memory from ten to a thousand tokens at the start
            low, high = math.log(1e-3), math.log(1e-1)
            dt = torch.exp(torch.rand(shape, generator=generator) * (high - low) + low)
            value = dt + torch.log(-torch.expm1(-dt))
        elif name == "A_log":
            value = torch.log(torch.rand(shape, generator=generator) * 15 + 1)
        elif name == "conv":
            value = torch.randn(shape, generator=generator) * 0.3
            value[..., -1] += 0.5
        else:
            std = 0.6 / math.sqrt(s.hidden)
            if name == "embed":
                std = 0.05
            if name in OUTPUTS:
                std = 0.6 / math.sqrt(shape[-1]) / math.sqrt(2 * s.layers)
            value = torch.randn(shape, generator=generator) * std
        params[name] = value.to(device).requires_grad_()
    return params


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm: x·rsqrt(mean x²)·(1 + weight), computed in f32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


class Forward:
    """The forward pass. compile: wraps each piece, torch.compile on CUDA or identity."""

    def __init__(self, shape: Shape, compile: Callable[[Callable], Callable] = lambda f: f) -> None:
        self.shape = shape
        self._delta_pre = compile(self.delta_pre)
        self._delta_post = compile(self.delta_post)
        self._attention_pre = compile(self.attention_pre)
        self._attention_post = compile(self.attention_post)
        self._moe = compile(self.moe)
        self._head = compile(self.head)

    # -- gated delta net -----------------------------------------------------------------------------------------

    def delta_pre(self, x, norm, qkv, z_w, b_w, a_w, conv, dt_bias, a_log, pos):
        """x: [N, hidden] → chunk tensors u, w, q, k [N/C, heads, C, D], attn, decay, and the gate z [N, value]."""
        s = self.shape
        n = x.shape[0]
        h = rms(x, norm, s.eps)
        mixed = F.linear(h, qkv)
        taps = conv.float()
        total = mixed.float() * taps[:, -1]
        for back in range(1, s.conv):
            earlier = F.pad(mixed, (0, 0, back, 0))[:n].float()
            total = total + torch.where((pos >= back)[:, None], earlier, 0.0) * taps[:, -1 - back]
        mixed = F.silu(total)
        key = s.key_heads * s.delta_dim
        q, k, v = mixed.split([key, key, s.value_heads * s.delta_dim], dim=-1)
        q = q.reshape(n, s.key_heads, s.delta_dim)
        k = k.reshape(n, s.key_heads, s.delta_dim)
        v = v.reshape(n, s.value_heads, s.delta_dim)
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * s.delta_dim**-0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        repeat = s.value_heads // s.key_heads
        q = q.repeat_interleave(repeat, dim=1)
        k = k.repeat_interleave(repeat, dim=1)
        beta = torch.sigmoid(F.linear(h, b_w).float())
        g = -a_log.float().exp() * F.softplus(F.linear(h, a_w).float() + dt_bias.float())

        def chunked(t):
            return t.reshape(n // CHUNK, CHUNK, *t.shape[1:]).transpose(1, 2)

        q, k, v, beta, g = chunked(q), chunked(k), chunked(v), chunked(beta), chunked(g)
        cum = g.cumsum(-1)
        gap = cum.unsqueeze(-1) - cum.unsqueeze(-2)
        index = torch.arange(CHUNK, device=x.device)
        causal = index[:, None] >= index[None, :]
        decay = torch.where(causal, torch.where(causal, gap, 0.0).exp(), 0.0)
        k_beta = k * beta.unsqueeze(-1)
        turned = k.transpose(-1, -2)
        lower = torch.where(index[:, None] > index[None, :], (k_beta @ turned) * decay, 0.0)
        inverse = unit_inverse(lower)
        grown = cum.exp().unsqueeze(-1)
        u = inverse @ (v * beta.unsqueeze(-1))
        w = inverse @ (k_beta * grown)
        attn = (q @ turned) * decay
        last = cum[..., -1:]
        return (
            u,
            w,
            q * grown,
            k * (last - cum).exp().unsqueeze(-1),
            attn,
            last.squeeze(-1).exp(),
            F.linear(h, z_w),
        )

    def delta_post(self, x, out, z, norm, out_w):
        s = self.shape
        n = x.shape[0]
        flat = out.transpose(1, 2).reshape(n, s.value_heads, s.delta_dim)
        flat = flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + s.eps) * norm.float()
        flat = flat * F.silu(z.float().reshape(n, s.value_heads, s.delta_dim))
        return x + F.linear(flat.reshape(n, -1).to(x.dtype), out_w)

    # -- gated attention -----------------------------------------------------------------------------------------

    def attention_pre(self, x, norm, q_w, k_w, v_w, q_norm, k_norm, pos):
        s = self.shape
        n = x.shape[0]
        h = rms(x, norm, s.eps)
        q, gate = F.linear(h, q_w).reshape(n, s.heads, 2 * s.head_dim).chunk(2, dim=-1)
        q = rms(q, q_norm, s.eps)
        k = rms(F.linear(h, k_w).reshape(n, s.kv_heads, s.head_dim), k_norm, s.eps)
        v = F.linear(h, v_w).reshape(n, s.kv_heads, s.head_dim)
        rotary = int(s.head_dim * s.rotary_share)
        power = torch.arange(0, rotary, 2, device=x.device, dtype=torch.float32) / rotary
        angle = pos.float()[:, None] * (1.0 / s.theta**power)
        cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]

        def rotate(t):
            wide = t[..., :rotary].float()
            left, right = wide.chunk(2, dim=-1)
            turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
            return torch.cat([turned.to(t.dtype), t[..., rotary:]], dim=-1)

        return rotate(q), rotate(k), v, gate.reshape(n, -1)

    def attention_post(self, x, out, gate, out_w):
        return x + F.linear(out * torch.sigmoid(gate), out_w)

    # -- experts -------------------------------------------------------------------------------------------------

    def moe(self, x, norm, router, gate_up, down, shared_gate, shared_up, shared_down, shared_scale, pos):
        """Returns (x, balance loss, locality loss, share of repeated experts). Experts are computed densely and masked."""
        s = self.shape
        n = x.shape[0]
        h = rms(x, norm, s.eps)
        probs = torch.softmax(F.linear(h.float(), router.float()), dim=-1)
        ids = torch.arange(s.experts, device=x.device)
        left = probs
        chosen = torch.zeros_like(probs, dtype=torch.bool)
        for _ in range(s.top_k):
            best = left.argmax(-1, keepdim=True)
            hit = ids == best
            chosen = chosen | hit
            left = torch.where(hit, -1.0, left)
        weights = torch.where(chosen, probs, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        both = F.linear(h, gate_up.reshape(-1, s.hidden)).reshape(n, s.experts, 2, s.expert_width)
        act = F.silu(both[:, :, 0]) * both[:, :, 1] * weights.to(x.dtype).unsqueeze(-1)
        out = act.reshape(n, -1) @ down.transpose(1, 2).reshape(-1, s.hidden)
        shared = F.linear(F.silu(F.linear(h, shared_gate)) * F.linear(h, shared_up), shared_down)
        out = out + torch.sigmoid(F.linear(h, shared_scale)) * shared
        used = chosen.float()
        balance = s.experts * (used.mean(0) * probs.mean(0)).sum()
        before = F.pad(probs, (0, 0, 1, 0))[:n]
        later = (pos > 0).float()
        locality = ((probs - before).pow(2).sum(-1) * later).sum() / later.sum()
        repeated = ((F.pad(used, (0, 0, 1, 0))[:n] * used).sum(-1) * later).sum() / later.sum() / s.top_k
        return x + out, balance, locality, repeated.detach()

    def head(self, x, norm, embed, targets, weights):
        """Weighted mean cross-entropy over tokens, in f32. targets: [N] int64. weights: [N] f32."""
        logits = F.linear(rms(x, norm, self.shape.eps), embed).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1.0), logits

    # -- the whole -----------------------------------------------------------------------------------------------

    def trunk(self, params: Params, ids: Tensor, length: int, dtype: torch.dtype):
        """ids: [rows·length] → (hidden [N, H], balance, locality and repeated summed over layers, ÷ layers)."""
        s = self.shape
        layer = {
            name: value.to(dtype).unbind(0)
            for name, value in params.items()
            if name not in ("embed", "final_norm", "dt_bias", "A_log")
        }
        layer["dt_bias"], layer["A_log"] = params["dt_bias"].unbind(0), params["A_log"].unbind(0)
        pos = torch.arange(ids.shape[0], device=ids.device) % length
        x = F.embedding(ids, params["embed"].to(dtype))
        rows = ids.shape[0] // length
        sums = [torch.zeros((), device=ids.device) for _ in range(3)]
        attention = delta = 0
        for i in range(s.layers):
            norm = layer["norm_in"][i]
            if s.is_attention(i):
                j = attention
                attention += 1
                q, k, v, gate = self._attention_pre(x, norm, *(layer[n][j] for n in ("q", "k", "v", "q_norm", "k_norm")), pos)
                q, k, v = (t.reshape(rows, length, -1, s.head_dim).transpose(1, 2) for t in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = self._attention_post(x, out.transpose(1, 2).reshape(ids.shape[0], -1), gate, layer["o"][j])
            else:
                j = delta
                delta += 1
                names = ("qkv", "z", "b", "a", "conv", "dt_bias", "A_log")
                *chunks, z = self._delta_pre(x, norm, *(layer[n][j] for n in names), pos)
                out, _ = scan(*chunks, length // CHUNK)
                x = self._delta_post(x, out, z, layer["delta_norm"][j], layer["delta_out"][j])
            names = ("router", "gate_up", "down", "shared_gate", "shared_up", "shared_down", "shared_scale")
            x, *extra = self._moe(x, layer["norm_post"][i], *(layer[n][i] for n in names), pos)
            sums = [a + b / s.layers for a, b in zip(sums, extra, strict=True)]
        return x, sums

    def loss(self, params: Params, ids: Tensor, weights: Tensor, length: int, dtype: torch.dtype = torch.bfloat16):
        """Next-token loss. ids: [rows·length] int64.  weights: [N] f32, of each token as a target.

        Returns (cross-entropy, [balance, locality, repeated]).
        """
        x, extra = self.trunk(params, ids, length, dtype)
        pos = torch.arange(ids.shape[0], device=ids.device) % length
        targets = F.pad(ids[1:], (0, 1))
        shifted = torch.where(pos < length - 1, F.pad(weights[1:], (0, 1)), 0.0)
        value, _ = self._head(x, params["final_norm"].to(dtype), params["embed"].to(dtype), targets, shifted)
        return value, extra
