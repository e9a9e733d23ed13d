"""quack 0.6: grouped bf16 products, and experts with the gather in the loader and SwiGLU in the
epilogue.
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
from .pytorch import by_expert, combine


class Quack(Peer):
    """Tuned by its own autotuner on the first call of a shape, which takes half a minute."""

    name = "quack"
    module = "quack"
    distribution = "quack-kernels"
    capabilities = (9, 10)

    def products(self, work: Operands) -> Iterator[Contender]:
        def prepare() -> Any:
            groups = {"cu_seqlens_k" if work.is_wgrad else "cu_seqlens_m": _starts(work.offs)}
            return functools.partial(_interface().gemm, *work.factors, **groups)

        yield self.product(work, "bfloat16", prepare)

    def layers(self, work: LayerWork) -> Iterator[Contender]:
        """The MLP; without a backward pass what that would need is not stored."""
        if work.layer == "mlp":
            yield self._step(work, None, None)

    def experts(self, work: ExpertsWork) -> Iterator[Contender]:
        """Its loader gathers rows; those that the gradient of the first weight reads are given to
        it.
        """
        yield self._step(work, work.tokens, work.index)

    def _step(self, work: LayerWork, *gather: Tensor | None) -> Contender:
        make = functools.partial(_alone, work, *gather)
        return work.contender("quack", "BF16", make, 4 * NOISE["bfloat16"])

    def mixtures(self, work: MoEWork) -> Iterator[Contender]:
        """With PyTorch's router, sort, sums and shared expert; it has no SwiGLU that clamps."""
        if "activation" not in work.options:
            yield work.contender("quack", "BF16", lambda: _mixture(work), PEER_BOUND)


def _interface() -> Any:
    return importlib.import_module("quack.gemm_interface")


def _starts(offs: Tensor) -> Tensor:
    return F.pad(offs, (1, 0))


class _Experts(torch.autograd.Function):
    """Rows of experts, of rows x in place, which ``tokens`` have by ``index`` if they are given.

    With ``order``, in which pairs of a token and an expert lie, x are the tokens themselves.
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
        gemm, rows = _interface(), {"cu_seqlens_m": starts}
        source, keeps = x if tokens is None else tokens, any(ctx.needs_input_grad)
        of_up = {"activation": "swiglu", "store_preact": keeps, "A_idx": index, **rows}
        before, hidden = gemm.gemm_gated(source, up.transpose(1, 2), **of_up)
        ctx.save_for_backward(x, up, down, starts, index, order, before)
        return gemm.gemm(hidden, down.transpose(1, 2), **rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, starts, index, order, before = ctx.saved_tensors
        gemm, groups, depth = _interface(), {"cu_seqlens_m": starts}, {"cu_seqlens_k": starts}
        d_before, again = gemm.gemm_dgated(dy, down, before, activation="swiglu", **groups)
        dx = gemm.gemm(d_before, up, **groups)
        d_down = gemm.gemm(dy.T, again, **depth)
        rows = x if order is None else x.index_select(0, index)
        d_up = gemm.gemm(d_before.T, rows, **depth)
        if order is not None:
            dx = torch.empty_like(dx).index_copy(0, order, dx).view(len(x), -1, dx.shape[1]).sum(1)
        return dx, d_up, d_down, None, None, None, None


@dataclasses.dataclass
class _Step(Step):
    """Rows of gate and value alternate in the parameter at ``place``."""

    place: int = 0

    def results(self) -> list[Tensor]:
        up = 2 + self.place
        return [
            torch.cat((t[:, ::2], t[:, 1::2]), 1) if i == up else t
            for i, t in enumerate(super().results())
        ]


def _leaves(work: LayerWork, place: int) -> list[nn.Parameter]:
    leaves = work.leaves()
    both = torch.stack(work.weights[place].chunk(2, 1), 2).flatten(1, 2)
    leaves[place] = nn.Parameter(both, work.backward)
    return leaves


def _alone(work: LayerWork, *gather: Tensor | None) -> Step:
    leaves, starts = _leaves(work, 0), _starts(work.offs)

    def forward(x: Tensor) -> Tensor:
        return _Experts.apply(x, *leaves, starts, *gather)

    return _Step(**vars(LayerWork.step(work, forward, [[w] for w in leaves])))


def _mixture(work: MoEWork) -> Step:
    add = compiled(combine, work.device)

    def experts(x: Tensor, p: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
        order, offs = by_expert(ids, len(up))
        index = (order // work.shape.top_k).int()
        return add(_Experts.apply(x, up, down, _starts(offs), None, index, order), order, p)

    return _Step(**vars(work.plain(experts, _leaves(work, 1))), place=1)


PEER = Quack
