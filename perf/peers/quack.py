"""quack 0.6: grouped bf16 products and experts.

Its experts gather rows in the loader and compute SwiGLU in the epilogue.
"""

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..contender import Contender
from ..operands import Operands
from ..suites.layer import LayerWork, Step
from ..suites.moe import PEER_BOUND, ExpertsWork, MoEWork, compiled
from .base import NOISE, Peer
from .pytorch import combine, sort_by_expert


class Quack(Peer):
    """quack. Its autotuner takes half a minute in the first call of a shape."""

    name = "quack"
    module = "quack"
    distribution = "quack-kernels"
    capabilities = (9, 10)

    def products(self, work: Operands) -> Iterator[Contender]:
        """Yield the bf16 product."""

        def prepare() -> Any:
            groups = {"cu_seqlens_k" if work.is_wgrad else "cu_seqlens_m": _starts(work.offs)}
            return functools.partial(_interface().gemm, *work.factors, **groups)

        yield self.product(work, "bfloat16", prepare)

    def layers(self, work: LayerWork) -> Iterator[Contender]:
        """Yield the MLP. A forward pass alone stores nothing for a backward pass."""
        if work.layer == "mlp":
            yield self._step(work, None, None)

    def experts(self, work: ExpertsWork) -> Iterator[Contender]:
        """Yield the experts of a mixture.

        The loader gathers rows. The gradient of the first weight gets gathered rows.
        """
        yield self._step(work, work.tokens, work.index)

    def _step(self, work: LayerWork, *gather: Tensor | None) -> Contender:
        make = functools.partial(_mlp, work, *gather)
        return work.contender("quack", "BF16", make, 4 * NOISE["bfloat16"])

    def mixtures(self, work: MoEWork) -> Iterator[Contender]:
        """Yield the layer with PyTorch's router, sort, sums and shared expert.

        quack has no clamped SwiGLU.
        """
        if "activation" not in work.options:
            yield work.contender("quack", "BF16", lambda: _mixture(work), PEER_BOUND)


def _interface() -> Any:
    return importlib.import_module("quack.gemm_interface")


def _starts(offs: Tensor) -> Tensor:
    return F.pad(offs, (1, 0))


class _Experts(torch.autograd.Function):
    """MLP of experts, with rows sorted by expert.

    The rows come in three forms: ``x`` alone; ``x`` with the ``tokens`` and ``index`` from which
    the loader gathers the same rows; or tokens ``x`` with ``index`` and the ``order`` of their
    pairs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        starts: Tensor,
        tokens: Tensor | None = None,
        index: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of the rows."""
        gemm = _interface()
        preactivation, activation = gemm.gemm_gated(
            x if tokens is None else tokens,
            up.transpose(1, 2),
            activation="swiglu",
            store_preact=any(ctx.needs_input_grad),
            A_idx=index,
            cu_seqlens_m=starts,
        )
        ctx.save_for_backward(x, up, down, starts, index, order, preactivation)
        return gemm.gemm(activation, down.transpose(1, 2), cu_seqlens_m=starts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and of both weights."""
        x, up, down, starts, index, order, preactivation = ctx.saved_tensors
        gemm = _interface()
        grad_preactivation, activation = gemm.gemm_dgated(
            dy, down, preactivation, activation="swiglu", cu_seqlens_m=starts
        )
        dx = gemm.gemm(grad_preactivation, up, cu_seqlens_m=starts)
        d_down = gemm.gemm(dy.T, activation, cu_seqlens_k=starts)
        rows = x if order is None else x.index_select(0, index)
        d_up = gemm.gemm(grad_preactivation.T, rows, cu_seqlens_k=starts)
        if order is not None:
            dx = torch.empty_like(dx).index_copy(0, order, dx).view(len(x), -1, dx.shape[1]).sum(1)
        return dx, d_up, d_down, None, None, None, None


@dataclasses.dataclass
class _Step(Step):
    """A pass in which rows of gate and value alternate in one parameter.

    Attributes:
        interleaved: Index of the parameter.
    """

    interleaved: int = 0

    def results(self) -> list[Tensor]:
        """Return the results with the gradient in this package's order."""
        up = 2 + self.interleaved
        return [
            torch.cat((t[:, ::2], t[:, 1::2]), 1) if i == up else t
            for i, t in enumerate(super().results())
        ]


def _leaves(work: LayerWork, index: int) -> list[nn.Parameter]:
    """Return the weights of a layer; in the one at ``index`` gate and value alternate."""
    leaves = work.leaves()
    interleaved = torch.stack(work.weights[index].chunk(2, 1), 2).flatten(1, 2)
    leaves[index] = nn.Parameter(interleaved, work.backward)
    return leaves


def _mlp(work: LayerWork, *gather: Tensor | None) -> Step:
    """Return the pass of an MLP, which may gather rows."""
    leaves, starts = _leaves(work, 0), _starts(work.offs)

    def forward(x: Tensor) -> Tensor:
        return _Experts.apply(x, *leaves, starts, *gather)

    return _Step(**vars(LayerWork.step(work, forward, [[w] for w in leaves])))


def _mixture(work: MoEWork) -> Step:
    """Return the pass of a mixture of experts."""
    add = compiled(combine, work.device)

    def experts(x: Tensor, p: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
        order, offs = sort_by_expert(ids, len(up))
        index = (order // work.shape.top_k).int()
        return add(_Experts.apply(x, up, down, _starts(offs), None, index, order), order, p)

    return _Step(**vars(work.plain(experts, _leaves(work, 1))), interleaved=1)


PEER = Quack
