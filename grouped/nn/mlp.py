"""``GroupedMLP``: the feed-forward experts of a mixture of experts."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.formats.activations import Activation

from ..functional.experts import (
    ExpertsOptions,
    Layer,
    PresortedRouting,
    Routing,
    compute_routing,
    experts,
)
from ..functional.linear_autograd import rows_and_end_rows
from ..recipes import Recipe
from ..tensor.offsets import Offsets, parse_offs
from .activation import activate, as_activation
from .linear import GroupedLinear, check_width


class Mixture:
    """What a mixture gives its experts beside rows: no tuple, for FSDP2 rounds the tensors in those
    to its dtype.

    ``shared()`` is what ``make`` gives, the shared expert's rows: made where there is time, or
    where they are needed.
    """

    def __init__(
        self,
        weights: Tensor,
        routing: Routing,
        options: ExpertsOptions,
        make: Callable[[], Tensor | None],
    ) -> None:
        self.weights, self.routing, self.options = weights, routing, options
        self._make, self._made = make, False
        self._shared: Tensor | None = None

    def shared(self) -> Tensor | None:
        """Rows of the shared expert, if there is one."""
        if not self._made:
            self._shared, self._made = self._make(), True
        return self._shared


class GroupedMLP(nn.Module):
    """Experts: ``y = W2_g act(W1_g x)`` for the rows of group g.

    By default SwiGLU: ``act(W1_g x) = silu(a) * b`` with ``[a | b] = W1_g x``.

    Args:
        num_groups: G, the number of experts.
        hidden_size: width of input and output; a multiple of 16 for a quantized recipe.
        intermediate_size: width between the two layers; a multiple of 16 likewise.
        bias: whether both layers have biases.
        activation: a name such as ``"swiglu"`` or ``"gelu"``, or a ``grouped.Activation``. W1
            has 2 * intermediate_size rows a group for gated ones. It is computed in fp32,
            rounded once to the dtype of the input; ``cute_kernels.reference.activations``
            states its bits.
        interleaved: rows a and b of W1 alternate, a first, as gpt-oss has them.
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
        self.activation = as_activation(activation, interleaved)
        self.interleaved = interleaved
        check_width("hidden_size", hidden_size, recipe)
        check_width("intermediate_size", intermediate_size, recipe)
        #: What runs the experts where they are spread over processes: ``grouped.parallel``.
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

    def reset_parameters(self) -> None:
        """Initialize both layers, as ``GroupedLinear`` does."""
        self.gate_up.reset_parameters()
        self.down.reset_parameters()

    def forward(
        self, x: Tensor, offs: Offsets | Mixture, *, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Apply the experts; arguments as in ``GroupedLinear.forward``.

        Where they are spread over processes, ``x`` are this rank's rows, and ``offs`` is of all
        experts.
        """
        if isinstance(offs, Mixture):
            if _hooks(self.gate_up) or _hooks(self.down):
                raise RuntimeError(
                    "the layers of a mixture's experts are not called: shard, or hook into, the experts"
                )
            return self.run(
                x, offs.weights, offs.routing, is_first_microbatch, offs.options, offs.shared
            )
        if self.exchange is not None:
            return self._exchanged(x, offs, is_first_microbatch)
        if self.is_one():
            rows, ends = self.gate_up.rows_and_end_rows(x, offs)
            options = ExpertsOptions(self.activation.text, self.interleaved, False, rows.dtype)
            y = self.run(rows, None, PresortedRouting(ends), is_first_microbatch, options)
            return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.down.out_features)
        z = self.gate_up(x, offs, is_first_microbatch=is_first_microbatch)
        rows = z.reshape(-1, z.shape[-1])
        ends = parse_offs(offs, rows.shape[0], rows.device)
        hidden = activate(rows, self.activation.text, ends, self.interleaved)
        hidden = hidden.view(*z.shape[:-1], hidden.shape[1])
        return self.down(hidden, ends, is_first_microbatch=is_first_microbatch)

    def _exchanged(self, x: Tensor, offs: Offsets, is_first_microbatch: bool | None) -> Tensor:
        groups = self.gate_up.num_groups
        rows, ends = rows_and_end_rows(x, offs, groups, self.gate_up.in_features)
        expert = torch.searchsorted(
            ends, torch.arange(rows.shape[0], device=x.device), right=True
        ).unsqueeze(1)
        options = ExpertsOptions(self.activation.text, self.interleaved, False, x.dtype)
        ones = torch.ones(expert.shape, device=x.device)
        return self.run(
            rows, ones, compute_routing(expert, groups), is_first_microbatch, options
        ).view(x.shape)

    def is_one(self) -> bool:
        """Whether both layers run as one function, the bits of which are theirs: nothing needs
        each.
        """
        if torch.compiler.is_compiling():
            if self.is_watched:
                return False
        elif (
            torch._C._functorch.peek_interpreter_stack() is not None
            or nn.modules.module._has_any_global_hook()
        ):
            return False
        layers: Any = self._modules
        return is_bare(layers["gate_up"]) and is_bare(layers["down"])

    @property
    def is_watched(self) -> bool:
        """Whether something looks at the layers, or takes their gradients: not to be traced as one."""
        first, second = self.gate_up, self.down
        return any(
            (
                first.is_eager_only,
                second.is_eager_only,
                first._nonfinite is not None,
                second._nonfinite is not None,
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
        """``grouped.functional.experts.experts`` with both layers, or ``exchange``, which takes what it does,
        and ``overlapped_work``.
        """
        layers = self.layers(rows, weights, is_first_microbatch)
        if self.exchange is None:
            return experts(rows, weights, routing, *layers, options)
        return self.exchange(rows, weights, routing, *layers, options, overlapped_work)

    def layers(
        self, rows: Tensor, weights: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Layer, Layer]:
        """What a call multiplies by."""
        modules: Any = self._modules
        gate_up, down, needs_dx, device = (
            modules["gate_up"],
            modules["down"],
            rows.requires_grad,
            rows.device,
        )
        first = gate_up.prepare(device, needs_dx, is_first_microbatch)
        if torch.is_grad_enabled():
            needs_dx = (
                needs_dx
                or (weights is not None and weights.requires_grad)
                or gate_up._has_trainable()
            )
        return first, down.prepare(device, needs_dx, is_first_microbatch)

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation.text!r}, interleaved={self.interleaved}"

    def backward_dw(self) -> None:
        """Compute what a backward pass left, of both layers: see ``GroupedLinear.backward_dw``."""
        self.down.backward_dw()
        self.gate_up.backward_dw()


def is_bare(layer: nn.Module, cls: type[nn.Module] = GroupedLinear) -> bool:
    """Whether calling a layer does what its class does: nobody wrapped it, shards it alone or hooks
    into it.
    """
    return type(layer) is cls and not _hooks(layer) and "forward" not in layer.__dict__


def _hooks(layer: nn.Module) -> bool:
    return bool(
        layer._forward_pre_hooks
        or layer._forward_hooks
        or layer._backward_pre_hooks
        or layer._backward_hooks
    )
