"""``GroupedMLP``: the feed-forward experts of a mixture of experts."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cute_kernels.formats.activations import Activation
from cute_kernels.records import suggest_arguments

from ..functional.experts import (
    ExpertsOptions,
    Layer,
    PresortedRouting,
    Routing,
    compute_routing,
    experts,
)
from ..functional.linear_autograd import rows_and_end_rows
from ..recipes import Recipe, check_recipe
from ..tensor.offsets import Offsets, parse_offs
from .activation import activate, resolve_activation, warn_if_ungated
from .linear import GroupedLinear, check_width


class Mixture:
    """Inputs that a mixture passes to its experts in addition to the rows.

    This is not a tuple, because FSDP2 casts the tensors of tuples to its dtype.

    Args:
        weights: (T, k) fp32. The routing weights.
        routing: Routing of the T tokens.
        options: Options of the experts.
        compute_shared: Computes the rows of the shared expert, (T, H). None if there is no shared
            expert. It is called once, when the rows are needed or when the device has time.
    """

    def __init__(
        self,
        weights: Tensor,
        routing: Routing,
        options: ExpertsOptions,
        compute_shared: Callable[[], Tensor | None],
    ) -> None:
        self.weights, self.routing, self.options = weights, routing, options
        self._compute_shared, self._is_computed = compute_shared, False
        self._shared: Tensor | None = None

    def shared(self) -> Tensor | None:
        """Return the rows of the shared expert, or None if there is none."""
        if not self._is_computed:
            self._shared, self._is_computed = self._compute_shared(), True
        return self._shared


@suggest_arguments
class GroupedMLP(nn.Module):
    """Experts: ``y = W2_g act(W1_g x)`` for the rows of group g.

    The default is SwiGLU: ``act(W1_g x) = silu(a) * b`` with ``[a | b] = W1_g x``.

    Args:
        num_groups: G. The number of experts.
        hidden_size: H. The width of input and output, a multiple of 16 for a quantized recipe.
        intermediate_size: I. The width between the two layers, a multiple of 16 for a quantized
            recipe.
        bias: True gives both layers biases.
        activation: A name such as ``"swiglu"`` or ``"gelu"``, or a ``grouped.Activation``. W1 has
            2 I rows per group for gated activations. The activation is computed in fp32 and
            rounded once to the dtype of the input. ``cute_kernels.reference.activations`` defines
            its bits.
        interleaved: True alternates the rows a and b of W1, starting with a, as gpt-oss does.
        recipe: Formats of both layers. The default is BF16. ``recipe`` can be set later; set
            ``down.recipe`` for one product.
        single_parameter: As in ``GroupedLinear``.
        fuse_wgrad_accumulation: As in ``GroupedLinear``.
        delay_wgrad: As in ``GroupedLinear``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        gate_up: A ``GroupedLinear`` with ``weight`` (G, 2 I, H), or (G, I, H) without a gate.
        down: A ``GroupedLinear`` with ``weight`` (G, H, I).

    Shape:
        * ``x``: (..., H). The leading dimensions flatten to T rows, sorted by group.
        * ``offs``: (G,) end rows.
        * Output: (..., H) in the dtype of ``x``.

    Raises:
        ValueError: A size is not positive, or no multiple of the recipe's blocks. Or there is no
            activation of this name, or ``interleaved`` is True for one without a gate.
        TypeError: ``activation`` is not an activation.

    Warns:
        UserWarning: ``activation`` is ``"gelu"``, ``"relu"`` or ``"silu"``.
    """

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        activation: str | Activation = "swiglu",
        interleaved: bool = False,
        recipe: Recipe | None = None,
        single_parameter: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        warn_if_ungated("GroupedMLP", activation)
        self.activation = resolve_activation(activation, interleaved)
        self.interleaved = interleaved
        check_width("hidden_size", hidden_size, recipe)
        check_width("intermediate_size", intermediate_size, recipe)
        #: Runs experts that are distributed over processes: see ``grouped.parallel``. Else None.
        self.exchange: Any = None
        linear = functools.partial(
            GroupedLinear,
            num_groups,
            bias=bias,
            recipe=recipe,
            single_parameter=single_parameter,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad=delay_wgrad,
            device=device,
            dtype=dtype,
        )
        self.gate_up = linear(hidden_size, intermediate_size * (1 + self.activation.is_gated))
        self.down = linear(intermediate_size, hidden_size)

    @property
    def recipe(self) -> Recipe:
        """Recipe of both layers. Setting it sets both.

        Raises:
            ValueError: The layers have different recipes. Or the new one does not fit their widths,
                or has delayed scaling, whose state only the constructor makes.
            TypeError: The new one is not a recipe.
        """
        return common_recipe({"gate_up": self.gate_up, "down": self.down})

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        """Set the recipe of both layers."""
        check_recipe(recipe)
        layers = (self.gate_up, self.down)
        for layer in layers:
            _check_new_recipe(layer, recipe)
        for layer in layers:
            layer.recipe = recipe

    def reset_parameters(self) -> None:
        """Initialize both layers, as ``GroupedLinear`` does."""
        self.gate_up.reset_parameters()
        self.down.reset_parameters()

    def forward(
        self, x: Tensor, offs: Offsets | Mixture, *, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Apply the experts.

        Args:
            x: (..., H). Rows sorted by group. If the experts are distributed over processes, they
                are the rows of this rank.
            offs: (G,) end rows, of all experts even if these are distributed. A ``MoE`` passes a
                ``Mixture`` instead.
            is_first_microbatch: As in ``GroupedLinear.forward``.

        Returns:
            (..., H) in the dtype of ``x``.

        Raises:
            TypeError: As in ``GroupedLinear.forward``.
            ValueError: As in ``GroupedLinear.forward``.
            RuntimeError: As in ``GroupedLinear.forward``; or a layer of a mixture's experts is
                sharded by itself or has hooks.
        """
        if isinstance(offs, Mixture):
            if _has_hooks(self.gate_up) or _has_hooks(self.down):
                raise RuntimeError(
                    "the layers of a mixture's experts are not called: shard, or hook into, the "
                    "experts"
                )
            return self.run(
                x, offs.weights, offs.routing, is_first_microbatch, offs.options, offs.shared
            )
        if self.exchange is not None:
            return self._run_exchange(x, offs, is_first_microbatch)
        if self.runs_fused():
            rows, end_rows = self.gate_up.rows_and_end_rows(x, offs)
            options = ExpertsOptions(self.activation.text, self.interleaved, False, rows.dtype)
            y = self.run(rows, None, PresortedRouting(end_rows), is_first_microbatch, options)
            return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.down.out_features)
        z = self.gate_up(x, offs, is_first_microbatch=is_first_microbatch)
        rows = z.reshape(-1, z.shape[-1])
        end_rows = parse_offs(offs, rows.shape[0], rows.device)
        hidden = activate(rows, self.activation.text, end_rows, self.interleaved)
        hidden = hidden.view(*z.shape[:-1], hidden.shape[1])
        return self.down(hidden, end_rows, is_first_microbatch=is_first_microbatch)

    if TYPE_CHECKING:
        __call__ = forward

    def _run_exchange(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        """Send sorted rows to the ranks of their experts, as tokens with one expert each."""
        groups = self.gate_up.num_groups
        rows, end_rows = rows_and_end_rows(x, offs, groups, self.gate_up.in_features)
        row_index = torch.arange(rows.shape[0], device=x.device)
        expert_ids = torch.searchsorted(end_rows, row_index, right=True).unsqueeze(1)
        options = ExpertsOptions(self.activation.text, self.interleaved, False, x.dtype)
        weights = torch.ones(expert_ids.shape, device=x.device)
        routing = compute_routing(expert_ids, groups)
        return self.run(rows, weights, routing, is_first_microbatch, options).view(x.shape)

    def runs_fused(self) -> bool:
        """Return True if both layers may run as one function, without calling the modules.

        The bits are the same. Hooks, subclasses and transforms need separate calls.
        """
        if torch.compiler.is_compiling():
            if self.is_eager_only:
                return False
        elif (
            torch._C._functorch.peek_interpreter_stack() is not None
            or nn.modules.module._has_any_global_hook()
        ):
            return False
        layers: Any = self._modules
        return is_unmodified(layers["gate_up"]) and is_unmodified(layers["down"])

    @property
    def is_eager_only(self) -> bool:
        """True if the layers must not be traced: inspected, watched, or accumulating gradients."""
        gate_up, down = self.gate_up, self.down
        return any(
            (
                gate_up.is_eager_only,
                down.is_eager_only,
                gate_up._nonfinite is not None,
                down._nonfinite is not None,
            )
        )

    def run(
        self,
        rows: Tensor,
        weights: Tensor | None,
        routing: Routing | PresortedRouting,
        is_first_microbatch: bool | None,
        options: ExpertsOptions,
        overlapped_work: Callable[[], object] | None = None,
    ) -> Tensor:
        """Run both layers by ``grouped.functional.experts.experts``, or by ``exchange``.

        Args:
            rows: (T, H). The tokens; or rows sorted by expert, with a ``PresortedRouting``.
            weights: (T, k) fp32. The routing weights, or None for sorted rows.
            routing: Routing of the tokens.
            is_first_microbatch: As in ``GroupedLinear.forward``.
            options: Options of the experts.
            overlapped_work: Called by ``exchange`` while rows are on their way.

        Returns:
            (T, H) in ``options.dtype``.
        """
        gate_up, down = self.layers(rows, weights, is_first_microbatch)
        if self.exchange is None:
            return experts(rows, weights, routing, gate_up, down, options)
        return self.exchange(rows, weights, routing, gate_up, down, options, overlapped_work)

    def layers(
        self, rows: Tensor, weights: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Layer, Layer]:
        """Return the weights, scales and observers of both layers for a call.

        Args:
            rows: (T, H). Only its device and ``requires_grad`` matter.
            weights: (T, k) routing weights. Only ``requires_grad`` matters.
            is_first_microbatch: As in ``GroupedLinear.forward``.
        """
        modules: Any = self._modules
        gate_up, down = modules["gate_up"], modules["down"]
        needs_dx, device = rows.requires_grad, rows.device
        gate_up_layer = gate_up.prepare(device, needs_dx, is_first_microbatch)
        if torch.is_grad_enabled():
            needs_dx = (
                needs_dx
                or (weights is not None and weights.requires_grad)
                or gate_up._has_trainable()
            )
        return gate_up_layer, down.prepare(device, needs_dx, is_first_microbatch)

    def extra_repr(self) -> str:
        """Return the activation for ``repr``."""
        return f"activation={self.activation.text!r}, interleaved={self.interleaved}"

    def backward_dw(self) -> None:
        """Compute the delayed gradients of both layers: see ``GroupedLinear.backward_dw``."""
        self.down.backward_dw()
        self.gate_up.backward_dw()


def common_recipe(modules: Mapping[str, GroupedLinear | GroupedMLP]) -> Recipe:
    """Return the recipe that all ``modules`` have, or raise ValueError with the recipe of each."""
    recipes = {name: module.recipe for name, module in modules.items()}
    common = next(iter(recipes.values()))
    if any(recipe != common for recipe in recipes.values()):
        listed = ", ".join(f"{name}.recipe is {recipe}" for name, recipe in recipes.items())
        raise ValueError(f"recipe has no single value: {listed}")
    return common


def _check_new_recipe(layer: GroupedLinear, recipe: Recipe) -> None:
    """Raise ValueError unless ``layer`` can take ``recipe`` instead of its own."""
    check_width("in_features", layer.in_features, recipe)
    check_width("out_features", layer.out_features, recipe)
    if recipe.takes_scales and layer.scaling is None:
        raise ValueError(
            f"recipe cannot become {recipe}, since the layer has no state for it: create the layer "
            "with this recipe"
        )


def is_unmodified(layer: nn.Module, cls: type[nn.Module] = GroupedLinear) -> bool:
    """Return True if a call of ``layer`` does exactly what ``cls.forward`` does.

    Subclasses (FSDP2 creates one per sharded module), hooks and a replaced ``forward`` prevent it.
    """
    return type(layer) is cls and not _has_hooks(layer) and "forward" not in layer.__dict__


def _has_hooks(layer: nn.Module) -> bool:
    return bool(
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_pre_hooks
        or layer._backward_hooks
    )
