"""``GroupedLinear``: one linear layer per group, in one product."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grouped import debug
from grouped.autograd import multiply, rows_and_ends
from grouped.nn.kept import KeptWeight, can_keep, is_static
from grouped.passes import Copies, quantize_weight
from grouped.recipes import BF16, Recipe
from grouped.tensor import GroupedTensor

if TYPE_CHECKING:
    from grouped.offsets import Offsets

__all__ = ["GroupedLinear"]


class GroupedLinear(debug.Watched):
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
            multiple = 1 if name == "num_groups" else self.recipe.multiple
            if size % multiple:
                raise ValueError(
                    f"{name} must be a multiple of {multiple} for {self.recipe}: it is "
                    f"the blocked dimension of a product, got {size}"
                )
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.single_parameter = single_parameter
        self._kept: KeptWeight | None = None
        #: The last DTensor of each parameter: what FSDP gathers the present one from.
        self._shards: dict[str, Tensor] = {}
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
        """Initialize each group as ``nn.Linear`` does; both forms draw the same numbers.

        A stacked parameter that is sharded (DTensor) or quantized is drawn as a whole: the same
        distribution in another order.
        """
        # Those of nn.Linear: kaiming_uniform_(a=sqrt(5)), which cannot see K of a stacked weight.
        gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bounds = {"weight": math.sqrt(3) * (gain / math.sqrt(self.in_features))}
        if self.has_bias:
            bounds["bias"] = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for tensors in itertools.zip_longest(*map(self._drawn, bounds)):
                for bound, tensor in zip(bounds.values(), tensors, strict=True):
                    if tensor is not None:
                        tensor.uniform_(-bound, bound)

    def _drawn(self, name: str) -> list[Tensor]:
        """What random numbers are written to, in order: groups, or a parameter as a whole."""
        sources = self._sources(name)
        if not self.single_parameter or type(sources[0]) not in (Tensor, nn.Parameter):
            return sources  # A part of a DTensor may be a copy.
        return list(sources[0])

    def forward(
        self, x: Tensor, offs: Offsets, *, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: (..., K) rows sorted by group.
            offs: (G,) end rows: an integer tensor on the device of ``x``, or a host list.
            is_first_microbatch: for several microbatches a step: True quantizes the weight and
                keeps it, False uses what was kept. None quantizes it for this call; in ``eval()``
                mode and without gradients it keeps it until it changes, is moved or loaded, or
                until the next ``train()`` or ``eval()``.

        A weight that was kept is used only if it is the same parameter with the same storage and
        version, and the recipe did not change. PyTorch counts no version for writes through
        ``weight.data``: call ``eval()`` again after those. Compiled, exported and transformed calls
        keep nothing, nor do weights made under ``inference_mode``: each quantizes its own.

        Raises:
            TypeError: a dtype that is not taken.
            ValueError: a shape, a device or offs that break a rule.
            RuntimeError: ``is_first_microbatch=False``, and no weight was kept, or it changed.
        """
        rows, ends = rows_and_ends(x, offs, self.num_groups, self.in_features)
        sources = self._sources("weight")
        copies = self._kept_copies(sources, is_first_microbatch, rows)
        weight = self._weight(sources, copies)
        bias = self._stacked("bias") if self.has_bias else None
        y = multiply(rows, weight, bias, ends, self.recipe, copies)
        flags = debug.flags_of(self, rows.device)
        if flags is not None:
            y = debug.watch(flags, rows, sources, y, ends)
        # Not a view of itself: FSDP warns of those.
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _sources(self, name: str) -> list[Tensor]:
        """The parameters that ``name`` consists of."""
        if self.single_parameter:
            return [getattr(self, name)]
        return [getattr(self, f"{name}{group}") for group in range(self.num_groups)]

    def _stacked(self, name: str) -> Tensor:
        sources = self._sources(name)
        return sources[0] if self.single_parameter else torch.stack(sources)

    def _weight(self, sources: list[Tensor], copies: Copies | None) -> Tensor | None:
        """The weight (G, N, K), unless its quantized ``copies`` are all that this call reads."""
        if not self.single_parameter:
            return None if copies and not torch.is_grad_enabled() else torch.stack(sources)
        weight = sources[0]
        shape = (self.num_groups, self.out_features, self.in_features)
        if isinstance(weight, GroupedTensor) and tuple(weight.shape) != shape:
            raise ValueError(f"weight must be uniform of shape {shape}, got {weight!r}")
        return weight

    def _kept_copies(
        self, sources: list[Tensor], is_first_microbatch: bool | None, rows: Tensor
    ) -> Copies | None:
        """The quantized weight of an earlier call or for later ones; None if this is for itself."""
        if not self.recipe.is_quantized or not can_keep(sources):
            return None
        made_from = [*sources, *self._shards.values()]
        if is_first_microbatch is False:
            return self._copies_of_first_microbatch(made_from, rows)
        wants_gradients = torch.is_grad_enabled()
        if is_first_microbatch is None:
            if self.training or wants_gradients or not is_static(sources):
                return None
            if self._kept is not None and self._kept.change(made_from, self.recipe) is None:
                return self._kept.copies
        weight = sources[0] if self.single_parameter else torch.stack(sources)
        # Not where rows require a gradient: a later microbatch may where this one does not.
        copies = quantize_weight(weight, self.recipe, wants_gradients)
        self._kept = KeptWeight.of(made_from, self.recipe, copies)
        return copies

    def _copies_of_first_microbatch(self, made_from: list[Tensor], rows: Tensor) -> Copies:
        kept = self._kept
        if kept is None:
            raise RuntimeError(
                "is_first_microbatch=False uses the weight that a call with True kept; none was"
            )
        change = kept.change(made_from, self.recipe)
        if change is not None:
            raise RuntimeError(
                "is_first_microbatch=False uses the weight that a call with True kept, but the "
                f"weight changed since: {change}. Pass True after each step"
            )
        if rows.requires_grad and torch.is_grad_enabled() and not kept.has_columnwise:
            raise RuntimeError(
                "is_first_microbatch=False needs the columnwise weight for the gradient of x, "
                "which the call with True did not keep: it ran under no_grad"
            )
        return kept.copies

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}, "
            f"recipe={type(self.recipe).__name__}, single_parameter={self.single_parameter}"
        )

    def train(self, mode: bool = True) -> GroupedLinear:
        """Set the mode, and drop a kept weight: see ``forward``."""
        self._kept = None
        super().train(mode)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP calls this where a class defines it, and else changes what nn.Module holds.
        self._note_shard(name, value)
        super().__setattr__(name, value)

    def _note_shard(self, name: str, value: Any) -> None:
        if name.startswith("weight") and hasattr(value, "_local_tensor"):
            self._shards[name] = value

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other parameters, and a file none at all.
        return {**self.__dict__, "_kept": None, "_nonfinite": None, "_shards": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> GroupedLinear:
        self._kept = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._shards = {}
        for name, parameter in self._parameters.items():
            self._note_shard(name, parameter)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            self._convert(state_dict, prefix + name)
        self._kept = None
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
