"""Chunked gated delta rule for training: two operators with CPU (plain torch) and CUDA (Triton) forms.

The chunk-local part stays in ordinary tensor code (see model.py), which the compiler fuses; what it cannot do well is the
inverse of many small triangular matrices and the scan over chunks. Algebra: Yang et al., "Gated Delta Networks".
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32  # positions handled together; 32 steps of scan for a row of 1,024


def _inverse_plain(lower: Tensor) -> Tensor:
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)


@torch.library.custom_op("demo_model::unit_inverse", mutates_args=())
def unit_inverse(lower: Tensor) -> Tensor:
    """(I + lower)⁻¹ for strictly lower triangular matrices. lower: [..., C, C] f32."""
    if not lower.is_cuda:
        return _inverse_plain(lower).contiguous()
    from examples.demo_model import delta_triton

    return delta_triton.unit_inverse(lower.contiguous())


@unit_inverse.register_fake
def _(lower: Tensor) -> Tensor:
    return torch.empty_like(lower, memory_format=torch.contiguous_format)


def _inverse_backward(ctx, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ grad @ transposed)


unit_inverse.register_autograd(_inverse_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


def scan_plain(u: Tensor, w: Tensor, q: Tensor, k: Tensor, attn: Tensor, decay: Tensor, chunks: int) -> Tensor:
    """Reference of scan(), differentiable, chunk by chunk."""
    blocks = u.shape[0]
    u, w, q, k, attn, decay = (x.unflatten(0, (blocks // chunks, chunks)) for x in (u, w, q, k, attn, decay))
    state = u.new_zeros(u.shape[0], u.shape[2], k.shape[-1], u.shape[-1])
    out = []
    for c in range(chunks):
        fresh = u[:, c] - w[:, c] @ state
        out.append(q[:, c] @ state + attn[:, c] @ fresh)
        state = state * decay[:, c, :, None, None] + k[:, c].transpose(-1, -2) @ fresh
    return torch.stack(out, 1).flatten(0, 1)


@torch.library.custom_op("demo_model::scan", mutates_args=())
def scan(u: Tensor, w: Tensor, q: Tensor, k: Tensor, attn: Tensor, decay: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Carry the state over the chunks of each row.

    u, w, q, k: [rows·chunks, heads, C, D] f32, already decayed.  attn: [.., C, C].  decay: [.., heads] per chunk.
    Returns (outputs like u, the state before each chunk [rows·chunks, heads, D, D]).
    """
    if u.is_cuda:
        from examples.demo_model import delta_triton

        return delta_triton.scan_forward(u, w, q, k, attn, decay, chunks)
    states = []
    state = u.new_zeros(u.shape[1], k.shape[-1], u.shape[-1])
    out = torch.empty_like(u)
    for index in range(u.shape[0]):
        if index % chunks == 0:
            state = torch.zeros_like(state)
        states.append(state)
        fresh = u[index] - w[index] @ state
        out[index] = q[index] @ state + attn[index] @ fresh
        state = state * decay[index, :, None, None] + k[index].transpose(-1, -2) @ fresh
    return out, torch.stack(states)


@scan.register_fake
def _(u, w, q, k, attn, decay, chunks):
    return torch.empty_like(u), u.new_empty(*u.shape[:2], k.shape[-1], u.shape[-1])


@torch.library.custom_op("demo_model::scan_grad", mutates_args=())
def scan_grad(
    grad: Tensor,
    u: Tensor,
    w: Tensor,
    q: Tensor,
    k: Tensor,
    attn: Tensor,
    decay: Tensor,
    states: Tensor,
    chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scan() for its six tensors."""
    if u.is_cuda:
        from examples.demo_model import delta_triton

        return delta_triton.scan_backward(grad.contiguous(), u, w, q, k, attn, decay, states, chunks)
    grads = [torch.empty_like(x) for x in (u, w, q, k, attn, decay)]
    du, dw, dq, dk, dattn, ddecay = grads
    later = torch.zeros_like(states[0])  # gradient of the state after the chunk
    for i in reversed(range(u.shape[0])):
        if i % chunks == chunks - 1:
            later = torch.zeros_like(later)
        state = states[i]
        fresh = u[i] - w[i] @ state
        du[i] = attn[i].mT @ grad[i] + k[i] @ later
        dq[i], dattn[i], dk[i] = grad[i] @ state.mT, grad[i] @ fresh.mT, fresh @ later.mT
        dw[i], ddecay[i] = -(du[i] @ state.mT), (later * state).sum((-1, -2))
        later = later * decay[i, :, None, None] + q[i].mT @ grad[i] - w[i].mT @ du[i]
    return du, dw, dq, dk, dattn, ddecay


@scan_grad.register_fake
def _(grad, u, w, q, k, attn, decay, states, chunks):
    return tuple(torch.empty_like(x) for x in (u, w, q, k, attn, decay))


def _scan_setup(ctx, inputs, output):
    *tensors, ctx.chunks = inputs
    ctx.save_for_backward(*tensors, output[1])


def _scan_backward(ctx, grad: Tensor, _states: Tensor):
    *tensors, states = ctx.saved_tensors
    return (*scan_grad(grad, *tensors, states, ctx.chunks), None)


scan.register_autograd(_scan_backward, setup_context=_scan_setup)
