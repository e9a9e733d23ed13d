"""The gate of ``GroupedMLP``, which keeps its input for the backward pass and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["swiglu"]


def swiglu(x: Tensor) -> Tensor:
    """``silu(a) * b`` of ``x = [a | b]`` (T, 2 I): in fp32, rounded once to the dtype of ``x``."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        # A compiler keeps what it sees fit.
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)
    y: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return y


class _SwiGLU(torch.autograd.Function):
    """The same; autograd alone would keep three fp32 tensors of the size of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate.float()).mul_(up).to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        (gate, up), (dgate, dup) = x.chunk(2, dim=-1), dx.chunk(2, dim=-1)
        gate = gate.float()
        dup.copy_(F.silu(gate).mul_(dy))
        dgate.copy_(torch.ops.aten.silu_backward(dy.float() * up, gate))
        return dx
