"""One call of the grouped linear product: its metadata, and interfaces of what layers attach to it.

``grouped.nn`` implements the interfaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cute_kernels import ops

from ..recipes import ROLES, Recipe
from ..tensor.grouped_tensor import GroupedTensor
from .operands import (
    LazyRows,
    OperandProbe,
    OperandScale,
    QuantizedRows,
    Scaling,
    WgradOperands,
)


class DelayedScales(Protocol):
    """State of delayed scaling, as ``grouped.nn.DelayedScaling`` implements it."""

    def call_scaling(self, recipe: Recipe, num_groups: int) -> Scaling:
        """Return the scales of a call, and the amaxes that it updates."""


class WeightGradientAccumulator(Protocol):
    """Receiver of the parameter gradients of one call, instead of autograd.

    ``grouped.nn.weight_gradients.ParameterGradients`` implements it.
    """

    @property
    def anchor(self) -> Tensor | None:
        """Tensor that makes the output require a gradient if the parameters are detached."""

    @property
    def wanted(self) -> tuple[bool, bool]:
        """True for each of weight and bias if its gradient is needed."""

    def check(self) -> None:
        """Raise if a gradient cannot be accumulated."""

    def take(
        self, call: LinearCall, wgrad: WgradOperands | None, dbias: Tensor | None
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Accumulate the gradients of one backward pass and return what autograd gets instead."""


class LinearCall(NamedTuple):
    """Metadata of a call of the linear product that its gradients need.

    Attributes:
        recipe: Formats of the operands.
        prepacked: True if the codes of the weight are prepacked.
        weight_format: Text of the format of the weight. None if it is plain.
        dtype: Data type of the input and of the output.
        weight_dtype: Data type of the weight's gradient.
        bias_dtype: Data type of the bias. None if there is none.
        discrete: True if the weight has one parameter per group.
        probe: Observes the operands of the call, if an inspector is active.
        may_be_zero: For each role, True if some of its given scales may be 0.
    """

    recipe: Recipe
    prepacked: bool
    weight_format: str | None
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    discrete: bool
    probe: OperandProbe | None = None
    may_be_zero: tuple[bool, ...] = ()

    @classmethod
    def from_operands(
        cls,
        x: Tensor | LazyRows | QuantizedRows,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        probe: OperandProbe | None = None,
        scaling: Scaling | None = None,
    ) -> LinearCall:
        """Return the metadata of a call, given its only or first ``weight`` parameter."""
        prepacked, weight_format = False, recipe.texts[1]
        if isinstance(weight, GroupedTensor):
            prepacked, weight_format = weight.prepacked, weight.format.text
        bias_dtype = None if bias is None else bias.dtype
        may_be_zero = () if scaling is None else tuple(scaling.may_be_zero)
        dtypes = (x.dtype, weight.dtype, bias_dtype)
        discrete = weight.dim() == 2
        return cls(recipe, prepacked, weight_format, *dtypes, discrete, probe, may_be_zero)

    def operand_scale(self, role: str, scale: Tensor | None) -> OperandScale | None:
        """Return the scales of a role's operand, or None if ``scale`` is None."""
        return None if scale is None else OperandScale(scale, self.may_be_zero[ROLES.index(role)])

    def weight_gradient(
        self, operands: WgradOperands, out: Tensor | None = None, *, accumulate: bool = False
    ) -> Tensor:
        """Compute the gradient of the weight.

        Args:
            operands: The operands of the product.
            out: (G, N, K) tensor to write the gradient into.
            accumulate: Add to the values of ``out``.

        Returns:
            ``out``, or a new tensor (G, N, K) of the weight's dtype.
        """
        dy, x, offs = operands.dy, operands.x, operands.offs
        assert x is not None
        options: dict[str, Any] = {}
        if self.recipe.is_quantized:
            options = {
                "a_scales": dy.scales,
                "b_scales": x.scales,
                "a_format": self.recipe.texts[2],
                "b_format": self.recipe.texts[0],
            }
        elif operands.row_index is not None:
            options = {"rows": operands.row_index, "inverse": operands.inverse}
        if out is None:
            return ops.k_grouped_gemm(
                dy.codes, x.codes, offs, out_dtype=self.weight_dtype, **options
            )
        torch.ops.cute_kernels.k_grouped_gemm_out(
            dy.codes,
            x.codes,
            offs,
            out_dtype=out.dtype,
            **options,
            out=out,
            accumulate=accumulate,
        )
        return out

    def split(self, dweight: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradient of each weight parameter that needs one, as views of ``dweight``."""
        gradients = dweight.unbind() if self.discrete else (dweight,)
        return [t if need else None for t, need in zip(gradients, needs, strict=True)]


def join_weights(parameters: Sequence[Tensor]) -> Tensor:
    """Return the weight (G, N, K) of one parameter, or of one parameter per group."""
    return parameters[0] if parameters[0].dim() == 3 else torch.stack(tuple(parameters))
