"""``MoE``: a mixture of experts, from tokens to tokens."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.formats.activations import ACTIVATIONS, Activation
from cute_kernels.ops.checks import check_dtype, same_device
from cute_kernels.records import check_kind
from cute_kernels.runtime.observers import needs_dispatcher

from ..functional.experts import ExpertsOptions, compute_routing, experts, run_inference
from ..functional.linear_autograd import flatten_rows, rows_and_end_rows
from ..recipes import Recipe
from ..tensor.validation import check_is_tensor
from ..tracing import eager_only
from .linear import check_width
from .mlp import GroupedMLP, Mixture, is_bare
from .router import MoELosses, Router

#: Names by which configurations of Hugging Face mean the curve of experts that have a gate.
_COMMON_NAMES = ("gelu", "relu", "silu")


def _warn_of_no_gate(activation: object) -> None:
    """Warn if experts get no gate by a name that other libraries give gated ones."""
    if isinstance(activation, str) and activation in _COMMON_NAMES:
        gated = next(
            act.name
            for act in map(Activation, ACTIVATIONS)
            if act.is_gated and act.curve == activation
        )
        warnings.warn(
            f"MoE(activation={activation!r}) has experts without a gate: W2 {activation}(W1 x). For gated experts of models "
            f"whose configuration says {activation!r}, pass {gated!r}; for these experts without this warning pass "
            f"grouped.Activation({activation!r})",
            stacklevel=3,
        )


class MoE(nn.Module):
    """Sends each token to its ``top_k`` best experts and adds up their weighted outputs.

    ``y[t] = sum over k of p[t, k] * expert_(t, k)(x[t])``, plus a shared expert where there is one.
    Everything runs on the device without a synchronization, forward and backward, in shapes that
    depend on the number of tokens alone.

    ``docs/moe.md`` says what the bits of a token's output depend on (in BF16, NVFP4RowScaled, MXFP8
    and FP8Block on no other token) and what is kept for the backward pass.

    Args:
      hidden_size: H, width of the tokens; a multiple of ``recipe.multiple``, as the next.
      intermediate_size: width inside an expert.
      num_experts: E.
      top_k: experts of each token.
      recipe: formats of the experts' products; BF16 by default.
      activation: as in ``GroupedMLP``; gpt-oss's is ``"clamped_swiglu"``. Hugging Face's
        ``hidden_act="silu"`` of models with a ``gate_proj`` is ``"swiglu"`` here: a name without a
        gate, such as ``"silu"``, makes experts without a gate, with a warning.
        ``grouped.Activation("silu")`` asks for them without one.
      bias: experts have biases.
      interleaved: as in ``GroupedMLP``.
      score: ``"softmax"`` or ``"sigmoid"`` of the logits.
      renormalize: a token's weights are divided by their sum.
      router_bias: logits have a bias.
      selection_bias: experts are chosen by score plus ``router.selection_bias``, a buffer, and
        weighted by the score: ``router.update_selection_bias`` moves it.
      expert_groups: groups of experts; a token's come from those ``top_groups`` whose two best
        corrected scores have the largest sum.
      top_groups: see there.
      routed_scaling_factor: what weights are multiplied by last.
      shared_intermediate_size: width of an expert that every token goes to; 0 for none.
      recompute: the backward pass makes the first product again instead of keeping its result.
      single_parameter: as in ``GroupedLinear``.
      fuse_wgrad_accumulation: as in ``GroupedLinear``, of all experts.
      delay_wgrad: likewise; then ``backward_dw()``.
      device: device of the parameters.
      dtype: dtype of the parameters.

    Attributes:
      router: ``weight`` (E, H), ``bias``, ``selection_bias``.
      experts: a ``GroupedMLP``: ``gate_up.weight`` (E, 2 I, H), ``down.weight`` (E, H, I).
      shared: a ``GroupedMLP`` of one group, or None.

    | model | arguments | |---|---| | Mixtral | | | Qwen3-MoE | ``renormalize=norm_topk_prob`` | |
    DeepSeek-V3 | ``score="sigmoid", selection_bias=True, expert_groups=8, top_groups=4,
    routed_scaling_factor=2.5, shared_intermediate_size=2048`` | | gpt-oss |
    ``activation="clamped_swiglu", bias=True, interleaved=True, router_bias=True`` |

    Raises:
      ValueError: sizes or options that break a rule.
      TypeError: ``recipe`` or ``activation`` is none.

    Warns:
      UserWarning: ``activation`` is ``"gelu"``, ``"relu"`` or ``"silu"``.

    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        recipe: Recipe | None = None,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        interleaved: bool = False,
        score: str = "softmax",
        renormalize: bool = True,
        router_bias: bool = False,
        selection_bias: bool = False,
        expert_groups: int = 1,
        top_groups: int = 1,
        routed_scaling_factor: float = 1.0,
        shared_intermediate_size: int = 0,
        recompute: bool = False,
        single_parameter: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_kind(bool, recompute=recompute, router_bias=router_bias)
        _warn_of_no_gate(activation)
        if shared_intermediate_size != 0:
            check_width("shared_intermediate_size", shared_intermediate_size, recipe)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.recompute = recompute
        self.router = Router(
            *(hidden_size, num_experts, top_k),
            score=score,
            renormalize=renormalize,
            bias=router_bias,
            selection_bias=selection_bias,
            expert_groups=expert_groups,
            top_groups=top_groups,
            scaling_factor=routed_scaling_factor,
            **factory,
        )

        def mlp(groups: int, width: int) -> GroupedMLP:
            return GroupedMLP(
                *(groups, hidden_size, width, bias),
                activation=activation,
                interleaved=interleaved,
                recipe=recipe,
                single_parameter=single_parameter,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad=delay_wgrad,
                **factory,
            )

        self.experts = mlp(num_experts, intermediate_size)
        self.shared = mlp(1, shared_intermediate_size) if shared_intermediate_size else None
        fmt = self.experts.gate_up.recipe.input
        if recompute and fmt is not None and fmt.is_stochastic:
            raise ValueError(f"recompute would not make again what {fmt} rounds stochastically")

    @property
    def exchange(self) -> Any:
        """That of ``experts``."""
        return self.experts.exchange

    def reset_parameters(self) -> None:
        """Initialize router and experts."""
        for module in (self.router, self.experts, self.shared):
            if module is not None:
                module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        losses: bool = False,
        num_tokens: Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor | tuple[Tensor, MoELosses]:
        """Apply the mixture.

        Args:
            x: (..., H) bf16, fp16 or fp32; under autocast the experts compute in its dtype.
            losses: also return the losses of the routing.
            num_tokens: how many of the T tokens that the leading dimensions flatten to are
                there: an integer tensor of one element on the device of ``x``. The others
                are the tail of a capacity buffer: they go to no expert, count in no loss,
                and their outputs and gradients are zeros. For CUDA graphs. Only tokens at
                the end can be left out: there is no padding mask. Padding at the left or in
                the middle of sequences is routed, counts in the losses and in
                ``tokens_per_expert``; pack the batch (``x[mask]``) to leave it out. Out of
                [0, T] raises on a CPU; where nobody reads it, on a GPU or compiled, it
                counts as 0 or T.
            is_first_microbatch: as in ``GroupedLinear.forward``.

        Returns:
            (..., H) of the dtype of ``x``; with ``losses`` also ``MoELosses``.

        Raises:
            ValueError, TypeError: an argument that breaks a rule.
            RuntimeError: as in ``GroupedLinear.forward``; or a transform of ``torch.func``.
        """
        if not (
            type(losses) is bool
            and (is_first_microbatch is None or type(is_first_microbatch) is bool)
        ):
            check_kind(bool, losses=losses, is_first_microbatch=is_first_microbatch or False)
        is_eager = not torch.compiler.is_compiling()
        if is_eager and torch._C._functorch.peek_interpreter_stack():
            raise RuntimeError("grouped.nn.MoE has no torch.func transforms")
        if (
            is_eager
            and num_tokens is None
            and not losses
            and not torch.is_grad_enabled()
            and self._is_one()
        ):
            y = self._infer(x, is_first_microbatch)
            return y if x.dim() == 2 else y.view(x.shape)
        if is_eager and num_tokens is None and self.shared is None:
            # The router makes what it reads of them, where that is replayed.
            rows, ends = flatten_rows(x, self.hidden_size), None
        else:
            rows, ends = rows_and_end_rows(x, self._end(x, num_tokens), 1, self.hidden_size)
        flat, live = rows if rows.dtype == x.dtype else x.reshape(rows.shape), None
        if num_tokens is not None and ends is not None:
            live = torch.arange(flat.shape[0], device=x.device) < ends
            # A NaN in the tail times 0 would be one in the gradient of the router.
            flat = flat.masked_fill(~live.unsqueeze(1), 0)
        router, mlp = self._parts
        choice = router(flat, ends)
        routing = compute_routing(choice.expert_ids, self.num_experts)
        run = self._run_eager if mlp.is_watched else mlp

        def shared() -> Tensor | None:
            beside = self.shared
            return (
                None
                if beside is None
                else beside(rows, ends, is_first_microbatch=is_first_microbatch)
            )

        mixture = Mixture(choice.weights, routing, self._experts_options(x.dtype), shared)
        y = run(rows, mixture, is_first_microbatch=is_first_microbatch)
        beside = mixture.shared()
        if beside is not None:
            y = y + beside.to(y.dtype)
        y = y if x.dim() == 2 else y.view(x.shape)
        return (y, self.router.losses(choice, routing.offs, live)) if losses else y

    def _experts_options(self, dtype: torch.dtype) -> ExpertsOptions:
        mlp = self._parts[1]
        return ExpertsOptions(mlp.activation.text, mlp.interleaved, self.recompute, dtype)

    @property
    def _parts(self) -> tuple[Router, GroupedMLP]:
        """``router`` and ``experts``, found sooner."""
        modules: dict[str, Any] = self._modules
        return modules["router"], modules["experts"]

    def _is_one(self) -> bool:
        """Whether all is one function: nothing needs its parts."""
        router, mlp = self._parts
        if self.shared is not None or mlp.exchange is not None:
            return False
        return is_bare(router, Router) and is_bare(mlp, GroupedMLP) and mlp.is_one()

    def _infer(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        """``forward`` of all tokens without gradients: (T, H)."""
        router, mlp = self._parts
        rows, count = flatten_rows(x, self.hidden_size), self.num_experts
        flat = rows if rows.dtype == x.dtype else x.reshape(rows.shape)
        layers, options = (
            mlp.layers(rows, None, is_first_microbatch),
            self._experts_options(x.dtype),
        )

        def run() -> Tensor:
            choice = router(flat)
            return experts(
                rows, choice.weights, compute_routing(choice.expert_ids, count), *layers, options
            )

        given = (flat, None if rows is flat else rows, *router.tensors)
        return run_inference((router.options, count, options), given, layers, run)

    def _end(self, x: Tensor, num_tokens: Tensor | None) -> Tensor:
        """(1,) where the tokens end."""
        check_is_tensor("x", x)
        most = x.numel() // max(1, x.shape[-1]) if x.dim() else 0
        if num_tokens is None:
            return torch.full((1,), most, dtype=torch.int32, device=x.device)
        if not isinstance(num_tokens, Tensor) or num_tokens.numel() != 1:
            raise ValueError(f"num_tokens must be a tensor of one element, got {num_tokens!r}")
        check_dtype("num_tokens", num_tokens.dtype, (torch.int32, torch.int64))
        same_device("x", x.device, num_tokens=num_tokens)
        if (
            num_tokens.device.type == "cpu"
            and not needs_dispatcher((num_tokens,))
            and not 0 <= int(num_tokens) <= most
        ):
            raise ValueError(
                f"num_tokens must be in [0, {most}], the tokens of x, got {int(num_tokens)}"
            )
        return num_tokens.view(1)

    @eager_only("something looks at the experts, or takes their gradients")
    def _run_eager(
        self, rows: Tensor, mixture: Mixture, *, is_first_microbatch: bool | None
    ) -> Tensor:
        return self.experts(rows, mixture, is_first_microbatch=is_first_microbatch)

    def backward_dw(self) -> None:
        """As ``GroupedLinear.backward_dw``, of all experts."""
        for mlp in (self.shared, self.experts):
            if mlp is not None:
                mlp.backward_dw()
