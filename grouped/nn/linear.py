"""``GroupedLinear``: one linear layer per group, in one product."""

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cute_kernels.ops.checks import INPUT_DTYPES, check_dtype
from cute_kernels.records import check_kind, suggest_arguments

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
from .cached_weight import (
    CachedQuantizedWeight,
    can_cache,
    is_static,
    local,
    lookup,
    warn_if_captured,
)
from .delayed_scaling import DelayedScaling
from .forms import convert
from .weight_gradients import EAGER_ONLY, ParameterGradients, WgradAccumulator


def check_width(name: str, size: object, recipe: Recipe | None) -> None:
    """Raise unless a product of the recipe supports this width. None is BF16."""
    recipe = BF16() if recipe is None else recipe
    check_recipe(recipe)
    check_size(name, size, recipe.multiple, f"{recipe}: it is the blocked dimension of a product")


@suggest_arguments
class GroupedLinear(InspectableLayer):
    """Applies ``y = x W_g^T + b_g`` to the rows of each group g.

    Args:
        num_groups: G. The number of linear layers (experts).
        in_features: K. A multiple of 16 for a quantized recipe.
        out_features: N. A multiple of 16 for a quantized recipe.
        bias: True adds a bias per group.
        recipe: Formats of input, weight and gradient. The default is BF16.
        single_parameter: True has one ``weight`` (G, N, K) and ``bias`` (G, N). False has
            ``weight0`` ... ``weight{G-1}`` (N, K) and ``bias0`` ... (N,). A state dict of either
            form loads into both.
        fuse_wgrad_accumulation: True adds the gradient of each weight parameter to its attribute
            ``main_grad``. The product that computes the gradient adds it in fp32, before a single
            cast. It overwrites ``main_grad`` if ``is_first_microbatch=True`` or if the parameter's
            attribute ``overwrite_main_grad`` is set. ``main_grad`` is a contiguous tensor with the
            parameter's shape and device, in fp32 or the parameter's dtype. The parameter's
            ``grad_added_to_main_grad`` is set to True. Its ``.grad`` becomes zeros, because hooks
            such as Megatron-LM's expect a tensor there and drop it. The gradient of the bias goes
            to ``.grad``.
        delay_wgrad: True leaves the gradients of the parameters to ``backward_dw``. Backward passes
            then run no hooks of the parameters. A PyTorch optimizer that steps while gradients are
            pending warns.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Weights are quantized from this dtype and have gradients in
            it. The computation has the dtype of the input.

    Shape:
        * ``x``: (..., K). The leading dimensions flatten to T rows, sorted by group.
        * ``offs``: (G,) end rows.
        * Output: (..., N) in the dtype of ``x``.

        Rows from ``offs[-1]`` on are the tail of a capacity buffer. They are never read, and they
        are zero in the output and in the gradient of the input.

    A ``weight`` that is a GroupedTensor (``grouped.quantize``, ``grouped.prepare``) is used
    directly, without a high-precision copy. Under BF16 it is multiplied with bf16 or fp16
    activations (W4A16); fp32 activations are cast. NVFP4 weights under an FP8 recipe are multiplied
    with FP8 activations (W4A8). FSDP2 raises ValueError for a GroupedTensor that is assigned after
    ``fully_shard``.

    If a parameter is a DTensor, a call uses this rank's part, ``to_local()``. If it is sharded
    along its groups, ``offs`` are the end rows of this rank's groups. ``grouped.parallel`` does
    that.

    Raises:
        ValueError: A size is not positive, or no multiple of the recipe's blocks.
    """

    #: (G, N, K), or ``weight0`` ... ``weight{G-1}`` if ``single_parameter`` is False.
    weight: nn.Parameter | GroupedTensor
    #: (G, N), or None without a bias. ``bias0`` ... if ``single_parameter`` is False.
    bias: nn.Parameter | None
    #: Name of a process group whose ranks have different rows and replicated DTensor parameters.
    #: Gradients are summed over it.
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
        self._wgrads = WgradAccumulator(fuse_wgrad_accumulation, delay_wgrad)
        self._cached_weight: CachedQuantizedWeight | None = None
        #: The last DTensor of each parameter, from which FSDP gathers the current one.
        self._shards: dict[str, Tensor] = {}
        self._fsdp = FsdpWatch()
        #: State of delayed scaling. None under recipes without it.
        self.scaling: DelayedScaling | None = None
        if isinstance(self.recipe, FP8Delayed):
            self.scaling = DelayedScaling(self.recipe, num_groups, device)
        shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
        if bias:
            shapes["bias"] = (out_features,)
        for name, shape in shapes.items():
            parameter_shape = (num_groups, *shape) if single_parameter else shape
            for parameter_name in self._names(name):
                data = torch.empty(parameter_shape, device=device, dtype=dtype)
                self.register_parameter(parameter_name, nn.Parameter(data))
        if not bias and single_parameter:
            self.register_parameter("bias", None)
        for parameter in self.parameters() if delay_wgrad else ():
            # Megatron-LM then registers its post-backward hooks with this layer.
            parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each group as ``nn.Linear`` does, and reset the state of delayed scaling.

        Both forms of parameters get the same random numbers. A stacked parameter that is sharded
        (DTensor) or quantized is filled at once: with the same distribution in another order.
        """
        # The bounds of nn.Linear: kaiming_uniform_(a=sqrt(5)) would not see K of a stacked weight.
        gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bounds = {"weight": math.sqrt(3) * (gain / math.sqrt(self.in_features))}
        if self.has_bias:
            bounds["bias"] = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for tensors in itertools.zip_longest(*map(self._initialized_tensors, bounds)):
                for bound, tensor in zip(bounds.values(), tensors, strict=True):
                    if tensor is not None:
                        tensor.uniform_(-bound, bound)
        if self.scaling is not None:
            self.scaling.reset()

    def _initialized_tensors(self, name: str) -> list[Tensor]:
        """Return the tensors that are initialized one by one: groups, or whole parameters."""
        sources = self._sources(name)
        if not self.single_parameter or type(sources[0]) not in (Tensor, nn.Parameter):
            return sources  # A slice of a DTensor may be a copy.
        return list(sources[0])

    def forward(
        self, x: Tensor, offs: Offsets, *, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: (..., K). Rows sorted by group.
            offs: (G,) end rows. An integer tensor on the device of ``x``, or a host list.
            is_first_microbatch: Set it if a step has several microbatches. True quantizes the
                weight and caches it, and False uses the cached weight. None quantizes it for this
                call only. In ``eval()`` mode without gradients, None caches the weight until it
                changes, is moved or loaded, or until the next ``train()`` or ``eval()``. With
                ``fuse_wgrad_accumulation``, True also overwrites ``main_grad``.

        Returns:
            (..., N) in the dtype of ``x``.

        A cached weight is used only if it is the same parameter with the same storage and version,
        and the recipe did not change. PyTorch counts no version for writes through ``weight.data``,
        so call ``eval()`` again after them. Compiled, exported and transformed calls cache nothing,
        and neither do calls with weights created under ``inference_mode``.

        Layers with ``fuse_wgrad_accumulation`` or ``delay_wgrad`` train in eager mode:
        ``torch.compile`` breaks its graph at them, and ``fullgraph=True``, ``torch.export`` and
        ``torch.func`` raise. Without gradients of parameters they behave like other layers.

        Raises:
            TypeError: A dtype is not supported.
            ValueError: A shape, a device or ``offs`` is invalid.
            RuntimeError: ``is_first_microbatch=False`` without a cached weight, or the weight
                changed. Or a layer that trains in eager mode only is traced or transformed.
        """
        if self._inspector is not None:
            return self._inspected_call(x, offs, is_first_microbatch)
        return self._call(x, offs, is_first_microbatch)

    if TYPE_CHECKING:
        __call__ = forward

    @eager_only(INSPECTION_EAGER_ONLY)
    def _inspected_call(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        """Run ``forward`` with an active inspector."""
        check_eager()
        return self._call(x, offs, is_first_microbatch)

    def _call(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        if self._accumulates_gradients():
            return self._train_eagerly(x, offs, is_first_microbatch)
        return self._multiply(x, offs, is_first_microbatch)

    @eager_only(EAGER_ONLY)
    def _train_eagerly(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        """Run ``forward`` if gradients of parameters go to ``main_grad`` or are delayed."""
        return self._multiply(x, offs, is_first_microbatch)

    def _has_trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

    def _multiply(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        """Multiply the rows of ``x``, (..., K), with the weights of their groups."""
        rows, end_rows = self.rows_and_end_rows(x, offs)
        call = self.prepare(rows.device, rows.requires_grad, is_first_microbatch)
        y = multiply(
            rows,
            call.weights,
            call.bias,
            end_rows,
            self.recipe,
            call.quantized,
            call.accumulator,
            call.scaling,
            call.probe,
        )
        if call.flags is not None:
            y = watch(call.flags, rows, call.weights, y, end_rows)
        # A view of y itself would make FSDP warn.
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def rows_and_end_rows(self, x: Tensor, offs: Offsets) -> tuple[Tensor, Tensor]:
        """Return ``x`` as (T, K) and the end rows of this rank's groups.

        Args:
            x: (..., K). Rows sorted by group.
            offs: (G,) end rows, as in ``forward``.
        """
        groups = self.num_groups
        if self.single_parameter:
            weight = local(lookup(self, "weight"))
            self._check_shape(weight)
            groups = len(weight)
        return rows_and_end_rows(x, offs, groups, self.in_features)

    def prepare(
        self, device: torch.device, needs_dx: bool, is_first_microbatch: bool | None
    ) -> Layer:
        """Return the weights, scales and observers of a call.

        Args:
            device: Device of the call.
            needs_dx: True if the rows require a gradient.
            is_first_microbatch: As in ``forward``.
        """
        if is_first_microbatch is not None and type(is_first_microbatch) is not bool:
            check_kind(bool, is_first_microbatch=is_first_microbatch)
        accumulator = self._gradient_accumulator(is_first_microbatch)
        sources = self._sources("weight")
        weights = [local(w, self.token_group) for w in sources]
        self._check_shape(weights[0])
        check_dtype("weight", weights[0].dtype, INPUT_DTYPES)
        scaling = self._begin_scaling(is_first_microbatch)
        quantized = self._cached_or_new(sources, weights, is_first_microbatch, needs_dx, scaling)
        bias = self._stacked("bias") if self.has_bias else None
        probe = None if self._inspector is None else self._inspector()
        return Layer(
            weights,
            bias,
            self.recipe,
            quantized,
            accumulator,
            scaling,
            probe,
            flags_of(self, device),
        )

    @property
    def is_eager_only(self) -> bool:
        """True if a call must not be traced: it is inspected, or accumulates gradients."""
        return self._inspector is not None or self._accumulates_gradients()

    def _accumulates_gradients(self) -> bool:
        return self._wgrads.active and torch.is_grad_enabled() and self._has_trainable()

    def _gradient_accumulator(self, is_first_microbatch: bool | None) -> ParameterGradients | None:
        """Return the accumulator of parameter gradients. None leaves them to autograd."""
        if not self._accumulates_gradients():
            return None
        self._wgrads.check_eager(sharded=bool(self._shards))
        biases = self._named("bias") if self.has_bias else {}
        return self._wgrads.begin_call(self._named("weight"), biases, is_first_microbatch is True)

    def _begin_scaling(self, is_first_microbatch: bool | None) -> Scaling | None:
        """Return the scales of a call under delayed scaling, updated on the first call of a step.

        Return None under a recipe without scales. The state of delayed scaling then stays as it is.
        """
        if not self.recipe.takes_scales:
            return None
        if self.scaling is None:
            raise RuntimeError(
                f"the layer has no state for {self.recipe}: create the layer with this recipe"
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
        return {key: getattr(self, key) for key in self._names(name)}

    def _stacked(self, name: str) -> Tensor:
        sources = [local(t, self.token_group) for t in self._sources(name)]
        return sources[0] if self.single_parameter else torch.stack(sources)

    def _check_shape(self, weight: Tensor) -> None:
        """Raise ValueError if a GroupedTensor does not have this rank's part of the shape."""
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
        """Compute the parameter gradients that the oldest backward pass delayed.

        The gradients are added to ``.grad``, or the gradient of the weight to ``main_grad``. Then
        the hooks of the parameters run, and those of
        ``register_wgrad_accumulation_and_reduce_hooks``. Call it once per backward pass, in the
        same order. It does nothing if all parameters are frozen.

        Raises:
            RuntimeError: The layer was created without ``delay_wgrad``, no gradients are pending,
                or ``main_grad`` is missing. Pending gradients stay for another call.
            TypeError: ``main_grad`` has an unsupported dtype.
            ValueError: ``main_grad`` has another shape.
        """
        self._wgrads.run_oldest(self._has_trainable())

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Call ``hook`` after each ``backward_dw``. The name is TransformerEngine's.

        Args:
            hook: Function without arguments.
        """
        self._wgrads.hooks.append(hook)

    def _cached_or_new(
        self,
        sources: list[Tensor],
        weights: list[Tensor],
        is_first_microbatch: bool | None,
        needs_dx: bool,
        scaling: Scaling | None,
    ) -> QuantizedOperand | None:
        """Return the cached weight, or quantize and cache it. None caches nothing."""
        if not self.recipe.is_quantized or not can_cache(sources):
            return None
        cache_inputs = [*sources, *self._shards.values()]
        if scaling is not None:
            cache_inputs.append(scaling.scales[ROLES.index("weight")])
        if is_first_microbatch is False:
            return self._weight_of_first_microbatch(cache_inputs, needs_dx)
        wants_gradients = torch.is_grad_enabled()
        if is_first_microbatch is None:
            if self.training or wants_gradients:
                return None
            if not is_static(sources):
                warn_if_captured(sources[0], self.recipe)
                return None
            if (
                self._cached_weight is not None
                and self._cached_weight.change(cache_inputs, self.recipe) is None
            ):
                return self._cached_weight.quantized
        # Gradients decide, not needs_dx: a later microbatch may need dx if this one does not.
        quantized = quantize_weight(join_weights(weights), self.recipe, wants_gradients, scaling)
        self._cached_weight = CachedQuantizedWeight.create(cache_inputs, self.recipe, quantized)
        return quantized

    def _weight_of_first_microbatch(
        self, cache_inputs: list[Tensor], needs_dx: bool
    ) -> QuantizedOperand:
        """Return the weight that the first microbatch cached. Raise RuntimeError if it is stale."""
        cached = self._cached_weight
        if cached is None:
            raise RuntimeError(
                "is_first_microbatch=False uses the weight that a call with True cached; "
                "there is none"
            )
        change = cached.change(cache_inputs, self.recipe)
        if change is not None:
            raise RuntimeError(
                "is_first_microbatch=False uses the weight that a call with True cached, but the "
                f"weight changed since: {change}. Pass True after each step"
            )
        if needs_dx and torch.is_grad_enabled() and not cached.has_columnwise:
            raise RuntimeError(
                "is_first_microbatch=False needs the columnwise weight for the gradient of x, "
                "which the call with True did not cache: it ran under no_grad"
            )
        return cached.quantized

    def extra_repr(self) -> str:
        """Return sizes and recipe for ``repr``."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.has_bias}, "
            f"recipe={type(self.recipe).__name__}, single_parameter={self.single_parameter}"
        )

    def train(self, mode: bool = True) -> "GroupedLinear":
        """Set the mode and drop a cached weight: see ``forward``.

        Args:
            mode: True for training, False for evaluation.
        """
        self._cached_weight = None
        super().train(mode)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP calls __setattr__ if a class defines it, and otherwise changes nn.Module's dicts.
        if name in self.__dict__.get("_shards", ()):
            self._fsdp.check(self, name, value)
        self._note_shard(name, value)
        super().__setattr__(name, value)

    def _note_shard(self, name: str, value: Any) -> None:
        if name.startswith("weight") and hasattr(value, "_local_tensor"):
            self._shards[name] = value

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other parameters, and a file has none.
        return {
            **self.__dict__,
            "_cached_weight": None,
            "_nonfinite": None,
            "_inspector": None,
            "_shards": {},
            "_fsdp": FsdpWatch(),
        }

    def _apply(self, fn: Any, recurse: bool = True) -> "GroupedLinear":
        """Move or cast the parameters, and drop a cached weight."""
        self._cached_weight = None
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
        self._cached_weight = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
