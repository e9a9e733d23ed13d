"""The op that chooses the experts of tokens, and its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.records import check_choice
from cute_kernels.reference import router as reference

from ..checks import check_tensor, same_device
from ..registration import register
from .op import PlainTensorOp

_FP32 = (torch.float32,)
SCORES = ("softmax", "sigmoid")


def _context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    """Save ids and scores for ``_backward``."""
    _, ids, scores = output
    ctx.mark_non_differentiable(ids)
    ctx.save_for_backward(ids, scores)
    ctx.options = inputs[4], inputs[5], inputs[8]


def _backward(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    dweights, _, dscores = gradients
    return torch.ops.cute_kernels.moe_route_gradient(
        dweights, dscores, *ctx.saved_tensors, *ctx.options
    ), *(None,) * 8


@register
@dataclasses.dataclass
class MoeRoute(PlainTensorOp):
    """Choose the best experts of each token by their logits.

    ``cute_kernels.reference.router`` states the bits.

    Args:
        logits: (T, E) fp32.
        selection_bias: (E,) fp32. Added to scores only to choose experts. Or None.
        end: (1,) int32: tokens from this one on have no experts. None for all T tokens.
        top_k: k, the number of experts per token.
        score: ``"softmax"`` or ``"sigmoid"`` of the logits.
        renormalize: Divide a token's weights by their sum.
        expert_groups: Number of groups of equal size that the experts form.
        top_groups: Number of groups with the largest sums of two scores that experts are chosen
            from. They must have at least k experts.
        factor: Factor of the weights, applied last.

    Returns:
        Weights (T, k) fp32; ids (T, k) int64, the best first, -1 for tokens from ``end`` on; and
        scores (T, E) fp32. Differentiable in the logits, given gradients of weights and scores.
    """

    logits: Tensor
    selection_bias: Tensor | None
    end: Tensor | None
    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    expert_groups: int = 1
    top_groups: int = 1
    factor: float = 1.0

    name: ClassVar[str] = "moe_route"
    returns_list: ClassVar[bool] = True
    setup_context = staticmethod(_context)
    backward = staticmethod(_backward)

    def check(self) -> None:
        """Check the arguments."""
        check_tensor("logits", self.logits, dtypes=_FP32, ndim=(2,))
        experts, groups = self.logits.shape[1], self.expert_groups
        check_choice("score", self.score, SCORES)
        if groups < 1 or experts % groups or not 1 <= self.top_groups <= groups:
            raise ValueError(
                f"expert_groups must divide E = {experts} and not be below top_groups, got {groups}"
            )
        most_experts = experts // groups * self.top_groups
        if not 1 <= self.top_k <= most_experts or (groups > 1 and experts // groups < 2):
            raise ValueError(
                f"top_k must be in [1, {most_experts}], and groups have two experts or more, "
                f"got {self.top_k}"
            )
        if self.selection_bias is not None:
            check_tensor("selection_bias", self.selection_bias, dtypes=_FP32, shape=(experts,))
        if self.end is not None:
            check_tensor("end", self.end, dtypes=(torch.int32,), shape=(1,))
        same_device("logits", self.device, selection_bias=self.selection_bias, end=self.end)

    def outputs(self) -> list[BufferSpec]:
        shape = (self.logits.shape[0], self.top_k)
        scores = BufferSpec(tuple(self.logits.shape), torch.float32)
        return [BufferSpec(shape, torch.float32), BufferSpec(shape, torch.int64), scores]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        options_of_router = (
            self.top_k,
            self.score,
            self.renormalize,
            self.expert_groups,
            self.top_groups,
            self.factor,
        )
        weights, ids, scores = outputs
        reference.route(
            self.logits, self.selection_bias, self.end, options_of_router, (weights, ids, scores)
        )


@register
@dataclasses.dataclass
class MoeRouteGradient(PlainTensorOp):
    """Return the gradient of the logits of ``moe_route``.

    Args:
        dweights: (T, k) fp32. Gradient of the weights.
        dscores: (T, E) fp32. Gradient of the scores, or None for zeros.
        ids: Result of ``moe_route``.
        scores: Result of ``moe_route``.
        score: As for ``moe_route``.
        renormalize: As for ``moe_route``.
        factor: As for ``moe_route``.
        in_parts: Return three bf16 numbers that add up to each fp32 number, for bf16 GEMMs.

    Returns:
        (T, E) fp32; with ``in_parts`` (T, 3 E) bf16, the largest parts first.
    """

    dweights: Tensor
    dscores: Tensor | None
    ids: Tensor
    scores: Tensor
    score: str = "softmax"
    renormalize: bool = True
    factor: float = 1.0
    in_parts: bool = False

    name: ClassVar[str] = "moe_route_gradient"

    def check(self) -> None:
        """Check the arguments."""
        check_choice("score", self.score, SCORES)
        check_tensor("scores", self.scores, dtypes=_FP32, ndim=(2,))
        check_tensor("ids", self.ids, dtypes=(torch.int64,), shape=(self.scores.shape[0], None))
        check_tensor("dweights", self.dweights, dtypes=_FP32, shape=self.ids.shape)
        if self.dscores is not None:
            check_tensor("dscores", self.dscores, dtypes=_FP32, shape=self.scores.shape)
        same_device("dweights", self.device, dscores=self.dscores, ids=self.ids, scores=self.scores)

    def outputs(self) -> list[BufferSpec]:
        tokens, experts = self.scores.shape
        return [
            BufferSpec((tokens, 3 * experts), torch.bfloat16)
            if self.in_parts
            else BufferSpec((tokens, experts), torch.float32)
        ]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        options_of_router = (self.score, self.renormalize, self.factor)
        dlogits = reference.gradient(
            self.dweights, self.dscores, self.ids, self.scores, options_of_router
        )
        outputs[0].copy_(torch.cat(reference.bf16_parts(dlogits), 1) if self.in_parts else dlogits)
