"""``GroupedLinear``: one linear layer per group, in one product."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.formats import NVFP4
from grouped.autograd import Parts, grouped_linear, quantize_weight
from grouped.functional import grouped_gemm
from grouped.offsets import Offsets, as_offs
from grouped.recipes import BF16, Recipe
from grouped.tensor import GroupedTensor

__all__ = ["GroupedLinear"]


class GroupedLinear(nn.Module):
    """Applies ``y = x W_g^T + b_g`` to the rows of each group g.

    Args:
        num_groups: G, the number of linear layers (experts).
        in_features: K; a multiple of 16 for a quantized recipe.
        out_features: N; a multiple of 16 for a quantized recipe.
        bias: whether there is a bias per group.
        recipe: formats of input, weight and gradient; BF16 by default.
        single_parameter: one ``weight`` (G, N, K) and ``bias`` (G, N), or ``weight0`` ...
            ``weight{G-1}`` (N, K) and ``bias0`` ... (N,). A state dict of either form loads into
            both.
        device: device of the parameters.
        dtype: dtype of the parameters. Weights are quantized from this dtype, and take gradients
            of it; the computation has the dtype of the input.

    Shape:
        Input (..., K), whose leading dimensions flatten to T rows sorted by group, and ``offs``
        (G,) end rows. Output (..., N) of the input's dtype. Rows from ``offs[-1]`` on, the tail of
        a capacity buffer, are never read; they are zeros in the output and in the input's gradient.

    A ``weight`` that is a GroupedTensor (``grouped.quantize``) is used as it is, without a
    high-precision copy; under BF16 beside bf16 or fp16 activations (W4A16).

    Raises:
        ValueError: sizes that are not positive, or that the recipe's blocks do not divide.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | None = None,
        single_parameter: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.recipe = BF16() if recipe is None else recipe
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"recipe must be a grouped.recipes.Recipe, got {recipe!r}")
        for name, size in (
            ("num_groups", num_groups),
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
            if self.recipe.is_quantized and name != "num_groups" and size % NVFP4.sf_vec_size:
                raise ValueError(
                    f"{name} must be a multiple of {NVFP4.sf_vec_size} for {self.recipe}: it is "
                    f"the blocked dimension of a product, got {size}"
                )
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.single_parameter = single_parameter
        self._cached_weight: Parts | None = None
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
        if bias:
            shapes["bias"] = (out_features,)
        for name, shape in shapes.items():
            if single_parameter:
                tensor = torch.empty(num_groups, *shape, **factory)
                self.register_parameter(name, nn.Parameter(tensor))
                continue
            for group in range(num_groups):
                tensor = torch.empty(shape, **factory)
                self.register_parameter(f"{name}{group}", nn.Parameter(tensor))
        if not bias and single_parameter:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each group as ``nn.Linear`` does; both forms draw the same numbers."""
        bound = 1 / math.sqrt(self.in_features)
        for group in range(self.num_groups):
            with torch.no_grad():
                nn.init.kaiming_uniform_(self._member("weight", group), a=math.sqrt(5))
                if self.has_bias:
                    self._member("bias", group).uniform_(-bound, bound)

    def _member(self, name: str, group: int) -> Tensor:
        if self.single_parameter:
            stacked: Tensor = getattr(self, name)
            return stacked[group]
        member: Tensor = getattr(self, f"{name}{group}")
        return member

    def _stacked(self, name: str) -> Tensor:
        if self.single_parameter:
            parameter: Tensor = getattr(self, name)
            return parameter
        return torch.stack([getattr(self, f"{name}{g}") for g in range(self.num_groups)])

    def forward(
        self, x: Tensor, offs: Offsets, *, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: (..., K) rows sorted by group.
            offs: (G,) end rows: an integer tensor on the device of ``x``, or a host list.
            is_first_microbatch: True quantizes the weight and keeps it, False uses what was kept,
                None quantizes it for this call. For several microbatches a step, and for inference.
        """
        if x.dim() < 2 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must have shape (..., {self.in_features}) and at least 2 dimensions, got "
                f"{tuple(x.shape)}"
            )
        rows = x.reshape(-1, self.in_features)
        kind = x.device.type
        # Not torch.amp.is_autocast_available: torch 2.11 does not trace it.
        if kind != "meta" and torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))
        ends = as_offs(offs, rows.shape[0], x.device)
        if ends.shape[0] != self.num_groups:
            raise ValueError(
                f"offs must have one end row for each of the {self.num_groups} groups, got "
                f"{ends.shape[0]} entries"
            )
        weight = self._stacked("weight")
        bias = self._stacked("bias") if self.has_bias else None
        needs_dx = rows.requires_grad and torch.is_grad_enabled()
        if isinstance(weight, GroupedTensor) and not self.recipe.is_quantized:
            self._check_grouped(weight, needs_dx)
            y = grouped_gemm(rows, weight, offs=ends, bias=bias, out_dtype=rows.dtype)
        else:
            parts = self._weight_parts(weight, is_first_microbatch, needs_dx)
            prepacked = getattr(getattr(weight, "format", None), "prepacked", False)
            y = grouped_linear(rows, weight, bias, ends, self.recipe, parts, prepacked)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _weight_parts(
        self, weight: Tensor, is_first_microbatch: bool | None, needs_dx: bool
    ) -> Parts | None:
        if not self.recipe.is_quantized:
            return None
        assert self.recipe.weight is not None
        if isinstance(weight, GroupedTensor):
            self._check_grouped(weight, needs_dx)
            assert weight.rowwise is not None
            return (*weight.rowwise, *(weight.columnwise or (None,) * 3))
        if is_first_microbatch is None:
            return None
        if is_first_microbatch:
            # Not needs_dx: a later microbatch may need the input's gradient where this does not.
            columnwise = torch.is_grad_enabled()
            self._cached_weight = quantize_weight(weight, self.recipe.weight, columnwise)
        if self._cached_weight is None:
            raise RuntimeError(
                "is_first_microbatch=False uses the weight that a call with True kept; none was"
            )
        columnwise_codes = self._cached_weight[3]
        if needs_dx and (columnwise_codes is None or not columnwise_codes.numel()):
            raise RuntimeError(
                "is_first_microbatch=False needs the columnwise weight for the gradient of x, "
                "which the call with True did not keep: it ran under no_grad"
            )
        return self._cached_weight

    def _check_grouped(self, weight: GroupedTensor, needs_dx: bool) -> None:
        """Whether a weight that is quantized already serves this layer."""
        shape = (self.num_groups, self.out_features, self.in_features)
        if weight.offs is not None or tuple(weight.shape) != shape:
            raise ValueError(f"weight must be uniform of shape {shape}, got {weight!r}")
        if isinstance(weight.format, NVFP4) and weight.format.row_scaled:
            raise ValueError("weight must have one second-level scale a group, got row_scaled=True")
        if weight.rowwise is None:
            raise RuntimeError(f"weight has no rowwise copy, which fprop reads: {weight!r}")
        if weight.columnwise is None and needs_dx:
            raise RuntimeError(f"weight has no columnwise copy, which dgrad reads: {weight!r}")

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}, "
            f"recipe={type(self.recipe).__name__}, single_parameter={self.single_parameter}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> GroupedLinear:
        self._cached_weight = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            self._convert(state_dict, prefix + name)
        self._cached_weight = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _convert(self, state_dict: dict[str, Any], key: str) -> None:
        """Turn the other form of a parameter into this module's, in place.

        A partial set of per-group keys is left alone, and reported as missing keys.
        """
        keys = [f"{key}{group}" for group in range(self.num_groups)]
        discrete = all(k in state_dict for k in keys)
        if self.single_parameter:
            if key not in state_dict and discrete:
                state_dict[key] = torch.stack([_plain(state_dict[k]) for k in keys])
            if key in state_dict:
                for k in keys:
                    state_dict.pop(k, None)
                if key.endswith("bias") and state_dict[key].dim() == 3:
                    state_dict[key] = state_dict[key].squeeze(1)
            return
        if key in state_dict:
            stacked = _plain(state_dict.pop(key))
            if not discrete and len(stacked) == self.num_groups:
                for k, member in zip(keys, stacked, strict=True):
                    state_dict[k] = member.reshape(-1) if key.endswith("bias") else member


def _plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, GroupedTensor) else x
