"""``GroupedLinear``: one linear layer per group, in one product."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.ops.checks import INPUT_DTYPES, check_dtype
from cute_kernels.records import check_kind

from ..functional.expert_layer import Layer
from ..functional.linear_autograd import multiply, rows_and_end_rows
from ..functional.linear_call import join_weights
from ..functional.linear_passes import quantize_weight
from ..functional.nonfinite_flags import watch
from ..functional.operands import QuantizedOperand, Scaling
from ..inspect.inspector import EAGER_ONLY as INSPECTION_EAGER_ONLY
from ..inspect.inspector import check_eager
from ..inspect.nonfinite import InspectableLayer, flags_of
from ..ownership import FsdpWatch
from ..recipes import BF16, ROLES, FP8Delayed, Recipe, check_recipe
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.offsets import Offsets
from ..tensor.validation import check_size
from ..tracing import eager_only
from .cached_weight import KeptWeight, can_keep, is_static, local, lookup, warn_if_captured
from .delayed_scaling import DelayedScaling
from .forms import convert
from .weight_gradients import EAGER_ONLY, ParameterGradients, Wgrads


def check_width(name: str, size: object, recipe: Recipe | None) -> None:
    """Raise unless a product of the recipe can have this width; BF16 is the default."""
    recipe = BF16() if recipe is None else recipe
    check_recipe(recipe)
    check_size(name, size, recipe.multiple, f"{recipe}: it is the blocked dimension of a product")


class GroupedLinear(InspectableLayer):
    """Applies ``y = x W_g^T + b_g`` to the rows of each group g.

    Args:
        num_groups: G, the number of linear layers (experts).
        in_features: K; a multiple of 16 for a quantized recipe.
        out_features: N; a multiple of 16 for a quantized recipe.
        bias: whether there is a bias per group.
        recipe: formats of input, weight and gradient; BF16 by default.
        single_parameter: one ``weight`` (G, N, K) and ``bias`` (G, N), or ``weight0`` ...
            ``weight{G-1}`` (N, K) and ``bias0`` ... (N,). A state dict of either form loads
            into both.
        fuse_wgrad_accumulation: the gradient of each parameter of the weight is added to its
            attribute ``main_grad``, in fp32 before the one cast, by the product that makes
            it; it is put there instead where ``is_first_microbatch=True`` or the
            parameter's attribute ``overwrite_main_grad`` is set. ``main_grad`` is a
            contiguous tensor of the parameter's shape and device, of fp32 or its dtype. The
            parameter's ``grad_added_to_main_grad`` is set to True, and its ``.grad`` gets
            zeros, for hooks such as Megatron-LM's want a tensor there, which they drop. The
            bias has its gradient in ``.grad``.
        delay_wgrad: backward passes leave the gradients of the parameters to ``backward_dw``,
            and run no hook of theirs. A PyTorch optimizer that steps while gradients wait
            warns.
        device: device of the parameters.
        dtype: dtype of the parameters. Weights are quantized from this dtype, and take
            gradients of it; the computation has the dtype of the input.

    Shape:
        Input (..., K), whose leading dimensions flatten to T rows sorted by group, and ``offs``
        (G,) end rows. Output (..., N) of the input's dtype. Rows from ``offs[-1]`` on, the tail
        of a capacity buffer, are never read; they are zeros in the output and in the input's
        gradient.

    A ``weight`` that is a GroupedTensor (``grouped.quantize``, ``grouped.prepare``) is used as it
    is, without a high-precision copy; under BF16 beside bf16 or fp16 activations (W4A16), to which
    fp32 is cast; of NVFP4 under a recipe of FP8 beside its activations (W4A8). FSDP2 does not take
    one that is assigned after ``fully_shard``, which raises ValueError.

    Of a parameter that is a DTensor a call uses this rank's part, as ``to_local()`` gives it:
    sharded along its groups, ``offs`` are those of the rank's groups. ``grouped.parallel`` does
    that.

    Raises:
        ValueError: sizes that are not positive, or that the recipe's blocks do not divide.
    """

    #: Name of the process group whose ranks have rows of their own and replicas of the parameters,
    #: which are DTensors: gradients are summed over it.
    token_group: str | None = None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | None = None,
        single_parameter: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.recipe = BF16() if recipe is None else recipe
        check_size("num_groups", num_groups)
        check_width("in_features", in_features, self.recipe)
        check_width("out_features", out_features, self.recipe)
        check_kind(bool, bias=bias, single_parameter=single_parameter)
        check_kind(bool, fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad=delay_wgrad)
        check_dtype("dtype", dtype or torch.get_default_dtype(), INPUT_DTYPES)
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.single_parameter = single_parameter
        self._wgrads = Wgrads(fuse_wgrad_accumulation, delay_wgrad)
        self._kept: KeptWeight | None = None
        #: The last DTensor of each parameter: what FSDP gathers the present one from.
        self._shards: dict[str, Tensor] = {}
        self._fsdp = FsdpWatch()
        #: The state of delayed scaling; None under recipes that have none.
        self.scaling: DelayedScaling | None = None
        if isinstance(self.recipe, FP8Delayed):
            self.scaling = DelayedScaling(self.recipe, num_groups, device)
        shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
        if bias:
            shapes["bias"] = (out_features,)
        for name, shape in shapes.items():
            held = (num_groups, *shape) if single_parameter else shape
            for each in self._names(name):
                self.register_parameter(
                    each, nn.Parameter(torch.empty(held, device=device, dtype=dtype))
                )
        if not bias and single_parameter:
            self.register_parameter("bias", None)
        for parameter in self.parameters() if delay_wgrad else ():
            # Megatron-LM then registers with this layer what it would do after a backward pass.
            parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each group as ``nn.Linear`` does; both forms draw the same numbers.

        The state of delayed scaling is reset.

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
        if self.scaling is not None:
            self.scaling.reset()

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
                keeps it, False uses what was kept. None quantizes it for this call; in
                ``eval()`` mode and without gradients it keeps it until it changes, is moved
                or loaded, or until the next ``train()`` or ``eval()``. With
                ``fuse_wgrad_accumulation``, True also drops what ``main_grad`` held.

        A weight that was kept is used only if it is the same parameter with the same storage and
        version, and the recipe did not change. PyTorch counts no version for writes through
        ``weight.data``: call ``eval()`` again after those. Compiled, exported and transformed calls
        keep nothing, nor do weights made under ``inference_mode``: each quantizes its own.

        Layers with ``fuse_wgrad_accumulation`` or ``delay_wgrad`` train in eager mode:
        ``torch.compile`` breaks its graph at them, and ``fullgraph=True``, ``torch.export`` and
        ``torch.func`` raise. Where no gradients of parameters are wanted they are as any other.

        Raises:
            TypeError: a dtype that is not taken.
            ValueError: a shape, a device or offs that break a rule.
            RuntimeError: ``is_first_microbatch=False``, and no weight was kept, or it changed;
                or something traces or transforms a layer that trains in eager mode only.
        """
        if self._inspector is not None:
            return self._inspected(x, offs, is_first_microbatch)
        return self._call(x, offs, is_first_microbatch)

    @eager_only(INSPECTION_EAGER_ONLY)
    def _inspected(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        check_eager()
        return self._call(x, offs, is_first_microbatch)

    def _call(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        if self._takes_gradients():
            return self._train_apart(x, offs, is_first_microbatch)
        return self._apply_to(x, offs, is_first_microbatch)

    @eager_only(EAGER_ONLY)
    def _train_apart(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        """``forward`` where gradients of parameters do not go to autograd, or not at once."""
        return self._apply_to(x, offs, is_first_microbatch)

    def _has_trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

    def _apply_to(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        rows, ends = self.rows_and_end_rows(x, offs)
        call = self.prepare(rows.device, rows.requires_grad, is_first_microbatch)
        y = multiply(
            rows,
            call.weights,
            call.bias,
            ends,
            self.recipe,
            call.quantized,
            call.accumulator,
            call.scaling,
            call.probe,
        )
        if call.flags is not None:
            y = watch(call.flags, rows, call.weights, y, ends)
        # Not a view of itself: FSDP warns of those.
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def rows_and_end_rows(self, x: Tensor, offs: Offsets) -> tuple[Tensor, Tensor]:
        """``grouped.functional.linear_autograd.rows_and_end_rows`` for the groups that are here."""
        groups = self.num_groups
        if self.single_parameter:
            weight = local(lookup(self, "weight"))
            self._check_shape(weight)
            groups = len(weight)
        return rows_and_end_rows(x, offs, groups, self.in_features)

    def prepare(
        self, device: torch.device, needs_dx: bool, is_first_microbatch: bool | None
    ) -> Layer:
        """What a call on ``device`` multiplies by, and what takes notes of it;

        ``needs_dx``: rows require a gradient.
        """
        if is_first_microbatch is not None and type(is_first_microbatch) is not bool:
            check_kind(bool, is_first_microbatch=is_first_microbatch)
        sink = self._sink(is_first_microbatch)
        sources = self._sources("weight")
        weights = [local(w, self.token_group) for w in sources]
        self._check_shape(weights[0])
        check_dtype("weight", weights[0].dtype, INPUT_DTYPES)
        scaling = self._scaling_of_call(is_first_microbatch)
        copies = self._kept_copies(sources, weights, is_first_microbatch, needs_dx, scaling)
        bias = self._stacked("bias") if self.has_bias else None
        probe = None if self._inspector is None else self._inspector()
        return Layer(
            weights, bias, self.recipe, copies, sink, scaling, probe, flags_of(self, device)
        )

    @property
    def is_eager_only(self) -> bool:
        """Whether a call now must not be traced: something looks at it, or takes gradients."""
        return self._inspector is not None or self._takes_gradients()

    def _takes_gradients(self) -> bool:
        return self._wgrads.active and torch.is_grad_enabled() and self._has_trainable()

    def _sink(self, is_first_microbatch: bool | None) -> ParameterGradients | None:
        if not self._takes_gradients():
            return None
        self._wgrads.check_eager(sharded=bool(self._shards))
        biases = self._named("bias") if self.has_bias else {}
        return self._wgrads.sink(self._named("weight"), biases, is_first_microbatch is True)

    def _scaling_of_call(self, is_first_microbatch: bool | None) -> Scaling | None:
        """The scales of a call under delayed scaling, updated if it is the first of a step.

        None under a recipe that takes none; the state of a layer that was made with one rests then.
        """
        if not self.recipe.takes_scales:
            return None
        if self.scaling is None:
            raise RuntimeError(
                f"the layer has no state for {self.recipe}: make it with this recipe"
            )
        self.scaling.begin(is_first_microbatch)
        return self.scaling.call_scaling(self.recipe, self.num_groups)

    def _sources(self, name: str) -> list[Tensor]:
        return [lookup(self, name)] if self.single_parameter else list(self._named(name).values())

    def _names(self, name: str) -> list[str]:
        return (
            [name]
            if self.single_parameter
            else [f"{name}{group}" for group in range(self.num_groups)]
        )

    def _named(self, name: str) -> dict[str, Tensor]:
        return {each: getattr(self, each) for each in self._names(name)}

    def _stacked(self, name: str) -> Tensor:
        sources = [local(t, self.token_group) for t in self._sources(name)]
        return sources[0] if self.single_parameter else torch.stack(sources)

    def _check_shape(self, weight: Tensor) -> None:
        """Whether a weight that is quantized already has the layer's shape, or that of a rank's
        groups.
        """
        if not isinstance(weight, GroupedTensor):
            return
        shape = (
            len(weight) if self._shards else self.num_groups,
            self.out_features,
            self.in_features,
        )
        if tuple(weight.shape) != shape:
            raise ValueError(f"weight must be uniform of shape {shape}, got {weight!r}")

    def backward_dw(self) -> None:
        """Compute the gradients of the parameters that the oldest backward pass left.

        Adds them to ``.grad``, or the weight's to ``main_grad``, and runs the hooks of the
        parameters and those of ``register_wgrad_accumulation_and_reduce_hooks``. One call for each
        backward pass, in their order. Does nothing if all parameters are frozen.

        Raises:
            RuntimeError: the layer was made without ``delay_wgrad``, no backward pass left any,
                or ``main_grad`` is missing. What was left is there for another call.
            TypeError: ``main_grad`` has a dtype that is not taken.
            ValueError: ``main_grad`` has another shape.
        """
        self._wgrads.run_oldest(self._has_trainable())

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Have ``hook`` called after each ``backward_dw``; the name is TransformerEngine's."""
        self._wgrads.hooks.append(hook)

    def _kept_copies(
        self,
        sources: list[Tensor],
        weights: list[Tensor],
        is_first_microbatch: bool | None,
        needs_dx: bool,
        scaling: Scaling | None,
    ) -> QuantizedOperand | None:
        """The quantized weight of an earlier call or for later ones; None if this is for itself."""
        if not self.recipe.is_quantized or not can_keep(sources):
            return None
        made_from = [*sources, *self._shards.values()]
        if scaling is not None:
            made_from.append(scaling.scales[ROLES.index("weight")])
        if is_first_microbatch is False:
            return self._copies_of_first_microbatch(made_from, needs_dx)
        wants_gradients = torch.is_grad_enabled()
        if is_first_microbatch is None:
            if self.training or wants_gradients:
                return None
            if not is_static(sources):
                warn_if_captured(sources[0], self.recipe)
                return None
            if self._kept is not None and self._kept.change(made_from, self.recipe) is None:
                return self._kept.quantized
        # Not where rows require a gradient: a later microbatch may where this one does not.
        copies = quantize_weight(join_weights(weights), self.recipe, wants_gradients, scaling)
        self._kept = KeptWeight.of(made_from, self.recipe, copies)
        return copies

    def _copies_of_first_microbatch(
        self, made_from: list[Tensor], needs_dx: bool
    ) -> QuantizedOperand:
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
        if needs_dx and torch.is_grad_enabled() and not kept.has_columnwise:
            raise RuntimeError(
                "is_first_microbatch=False needs the columnwise weight for the gradient of x, "
                "which the call with True did not keep: it ran under no_grad"
            )
        return kept.quantized

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}, "
            f"recipe={type(self.recipe).__name__}, single_parameter={self.single_parameter}"
        )

    def train(self, mode: bool = True) -> "GroupedLinear":
        """Set the mode, and drop a kept weight: see ``forward``."""
        self._kept = None
        super().train(mode)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP calls this where a class defines it, and else changes what nn.Module holds.
        if name in self.__dict__.get("_shards", ()):
            self._fsdp.check(self, name, value)
        self._note_shard(name, value)
        super().__setattr__(name, value)

    def _note_shard(self, name: str, value: Any) -> None:
        if name.startswith("weight") and hasattr(value, "_local_tensor"):
            self._shards[name] = value

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other parameters, and a file none at all.
        return {
            **self.__dict__,
            "_kept": None,
            "_nonfinite": None,
            "_inspector": None,
            "_shards": {},
            "_fsdp": FsdpWatch(),
        }

    def _apply(self, fn: Any, recurse: bool = True) -> "GroupedLinear":
        self._kept = None
        super()._apply(fn, recurse)
        self._shards = {}
        for name, parameter in self._parameters.items():
            self._note_shard(name, parameter)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            convert(state_dict, prefix + name, self.num_groups, self.single_parameter)
        self._kept = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
