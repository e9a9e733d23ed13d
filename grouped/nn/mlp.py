"""``GroupedMLP``: the feed-forward experts of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grouped.nn.linear import GroupedLinear
from grouped.nn.swiglu import swiglu

if TYPE_CHECKING:
    from grouped.offsets import Offsets
    from grouped.recipes import Recipe

__all__ = ["GroupedMLP"]


class GroupedMLP(nn.Module):
    """SwiGLU experts: ``y = W2_g (silu(a) * b)`` with ``[a | b] = W1_g x`` for rows of group g.

    Args:
        num_groups: G, the number of experts.
        hidden_size: width of input and output; a multiple of 16 for a quantized recipe.
        intermediate_size: width between the two layers; a multiple of 16 likewise.
        bias: whether both layers have biases.
        recipe: formats of both layers; BF16 by default.
        single_parameter: as in ``GroupedLinear``.
        fuse_wgrad_accumulation: as in ``GroupedLinear``.
        delay_wgrad: as in ``GroupedLinear``.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        As ``GroupedLinear``: input and output (..., hidden_size), ``offs`` (G,) end rows.
    """

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        recipe: Recipe | None = None,
        single_parameter: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> GroupedLinear:
            return GroupedLinear(
                num_groups,
                inputs,
                outputs,
                bias,
                recipe=recipe,
                single_parameter=single_parameter,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad=delay_wgrad,
                device=device,
                dtype=dtype,
            )

        self.gate_up = linear(hidden_size, 2 * intermediate_size)
        self.down = linear(intermediate_size, hidden_size)

    def reset_parameters(self) -> None:
        """Initialize both layers, as ``GroupedLinear`` does."""
        self.gate_up.reset_parameters()
        self.down.reset_parameters()

    def forward(
        self, x: Tensor, offs: Offsets, *, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Apply the experts; arguments as in ``GroupedLinear.forward``."""
        hidden = swiglu(self.gate_up(x, offs, is_first_microbatch=is_first_microbatch))
        y: Tensor = self.down(hidden, offs, is_first_microbatch=is_first_microbatch)
        return y

    def backward_dw(self) -> None:
        """Compute what a backward pass left, of both layers: see ``GroupedLinear.backward_dw``."""
        self.down.backward_dw()
        self.gate_up.backward_dw()
