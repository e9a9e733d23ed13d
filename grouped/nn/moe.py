"""``MoE``: a mixture of experts, from tokens to tokens."""

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from cute_kernels.formats.activations import Activation
from cute_kernels.ops.checks import check_dtype, same_device
from cute_kernels.records import check_kind, suggest_arguments
from cute_kernels.runtime.observers import needs_dispatcher

from ..functional.experts import ExpertsOptions, compute_routing, experts, run_inference
from ..functional.linear_autograd import flatten_rows, rows_and_end_rows
from ..recipes import Recipe, check_recipe
from ..tensor.validation import check_is_tensor
from ..tracing import eager_only
from .activation import resolve_activation, warn_if_ungated
from .linear import check_width
from .mlp import GroupedMLP, Mixture, common_recipe, is_unmodified
from .router import MoELosses, Router


@suggest_arguments
class MoE(nn.Module):
    """Sends each token to its ``top_k`` best experts and adds up their weighted outputs.

    ``y[t] = sum over k of p[t, k] * expert_(t, k)(x[t])``, plus the output of a shared expert if
    there is one. Everything runs on the device without a synchronization, forward and backward. All
    shapes depend on the number of tokens alone.

    ``docs/guide/moe.md`` says what determines the bits of a token's output. In BF16,
    NVFP4RowScaled, MXFP8 and FP8Block they depend on no other token. It also lists the tensors that
    are saved for the backward pass.

    Args:
        hidden_size: H. Width of the tokens, a multiple of ``recipe.multiple``.
        intermediate_size: I. The width inside an expert, a multiple of ``recipe.multiple``.
        num_experts: E. The number of experts.
        top_k: Number of experts per token.
        recipe: Formats of the experts' products. The default is BF16. ``recipe`` can be set later.
        activation: As in ``GroupedMLP``. gpt-oss uses ``"clamped_swiglu"``. The
            ``hidden_act="silu"`` of Hugging Face models with a ``gate_proj`` is ``"swiglu"`` here.
            A name without a gate, such as ``"silu"``, builds experts without a gate, with a
            warning. ``grouped.Activation("silu")`` builds them without the warning.
        bias: True gives the experts biases.
        interleaved: As in ``GroupedMLP``.
        score: Function of the logits. It is ``"softmax"`` or ``"sigmoid"``.
        renormalize: True divides the weights of a token by their sum.
        router_bias: True adds a bias to the logits.
        selection_bias: True chooses experts by score plus the buffer ``router.selection_bias``,
            and weights them by the score. ``router.update_selection_bias`` changes the buffer.
        expert_groups: Number of groups of experts. The experts of a token come from ``top_groups``
            of them. These groups have the largest sum of their two best corrected scores.
        top_groups: Number of groups that a token may use.
        routed_scaling_factor: Factor of the weights. It is applied last.
        shared_intermediate_size: Width of an expert that gets every token. The default 0 builds
            none.
        recompute: True does not save the result of the first product. The backward pass computes
            it again.
        single_parameter: As in ``GroupedLinear``.
        fuse_wgrad_accumulation: As in ``GroupedLinear``, for all experts.
        delay_wgrad: As in ``GroupedLinear``, for all experts. Call ``backward_dw()`` then.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        router: A ``Router`` with ``weight`` (E, H), ``bias`` and ``selection_bias``.
        experts: A ``GroupedMLP`` with ``gate_up.weight`` (E, 2 I, H) and ``down.weight`` (E, H, I).
        shared: A ``GroupedMLP`` of one group, or None.

    Arguments of some models:

        Mixtral      (the defaults)
        Qwen3-MoE    renormalize=norm_topk_prob
        DeepSeek-V3  score="sigmoid", selection_bias=True, expert_groups=8, top_groups=4,
                     routed_scaling_factor=2.5, shared_intermediate_size=2048
        gpt-oss      activation="clamped_swiglu", bias=True, interleaved=True, router_bias=True

    Raises:
        ValueError: A size or an option is invalid.
        TypeError: ``recipe`` is not a recipe, or ``activation`` is not an activation.

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
        warn_if_ungated("MoE", activation)
        experts_activation = resolve_activation(activation, interleaved)
        if shared_intermediate_size != 0:
            check_width("shared_intermediate_size", shared_intermediate_size, recipe)
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.recompute = recompute
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            score=score,
            renormalize=renormalize,
            bias=router_bias,
            selection_bias=selection_bias,
            expert_groups=expert_groups,
            top_groups=top_groups,
            scaling_factor=routed_scaling_factor,
            device=device,
            dtype=dtype,
        )

        def create_mlp(groups: int, width: int) -> GroupedMLP:
            return GroupedMLP(
                groups,
                hidden_size,
                width,
                bias,
                activation=experts_activation,
                interleaved=interleaved,
                recipe=recipe,
                single_parameter=single_parameter,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad=delay_wgrad,
                device=device,
                dtype=dtype,
            )

        self.experts = create_mlp(num_experts, intermediate_size)
        self.shared = create_mlp(1, shared_intermediate_size) if shared_intermediate_size else None
        self._check_recompute(self.experts.recipe)

    def _check_recompute(self, recipe: Recipe) -> None:
        fmt = recipe.input
        if self.recompute and fmt is not None and fmt.is_stochastic:
            raise ValueError(f"recompute=True cannot reproduce {fmt}, which rounds stochastically")

    @property
    def recipe(self) -> Recipe:
        """Recipe of all experts, the shared one included. Setting it sets theirs.

        Set ``experts.recipe``, ``shared.recipe`` or ``experts.down.recipe`` for a part.

        Raises:
            ValueError: Experts have different recipes; or as ``GroupedMLP.recipe`` when it is set.
            TypeError: The new one is not a recipe.
        """
        return common_recipe(self._mlps())

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        """Set the recipe of all experts."""
        check_recipe(recipe)
        self._check_recompute(recipe)
        for mlp in self._mlps().values():
            mlp.recipe = recipe

    def _mlps(self) -> dict[str, GroupedMLP]:
        """Return the experts and, if there is one, the shared expert, by name."""
        shared = {} if self.shared is None else {"shared": self.shared}
        return {"experts": self.experts, **shared}

    @property
    def exchange(self) -> Any:
        """The attribute ``exchange`` of ``experts``. None if one process has all experts."""
        return self.experts.exchange

    def reset_parameters(self) -> None:
        """Initialize router and experts."""
        for module in (self.router, self.experts, self.shared):
            if module is not None:
                module.reset_parameters()

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        losses: Literal[False] = ...,
        num_tokens: Tensor | None = ...,
        is_first_microbatch: bool | None = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        losses: Literal[True],
        num_tokens: Tensor | None = ...,
        is_first_microbatch: bool | None = ...,
    ) -> tuple[Tensor, MoELosses]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        losses: bool,
        num_tokens: Tensor | None = ...,
        is_first_microbatch: bool | None = ...,
    ) -> Tensor | tuple[Tensor, MoELosses]: ...

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
            x: (..., H) bf16, fp16 or fp32. The leading dimensions flatten to T tokens. Under
                autocast the experts compute in its dtype.
            losses: True also returns the losses of the routing.
            num_tokens: Number of valid tokens, counted from the first: an int32 or int64 tensor of
                one element on the device of ``x``. The remaining tokens are the tail of a capacity
                buffer, for CUDA graphs. They get no expert, count in no loss, and have outputs and
                gradients of zero. There is no padding mask: padding at the left or in the middle
                of sequences is routed, and counts in the losses and in ``tokens_per_expert``. Pack
                the batch (``x[mask]``) to leave it out. A value outside of [0, T] raises on a CPU.
                On a GPU or compiled, where the host does not read the value, it counts as 0 or T.
            is_first_microbatch: As in ``GroupedLinear.forward``.

        Returns:
            (..., H) in the dtype of ``x``; with ``losses`` also ``MoELosses``.

        Raises:
            ValueError: A shape, a device or ``num_tokens`` is invalid.
            TypeError: A dtype or a type is not supported.
            RuntimeError: As in ``GroupedLinear.forward``; or a transform of ``torch.func``.
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
            and self._runs_fused()
        ):
            y = self._infer(x, is_first_microbatch)
            return y if x.dim() == 2 else y.view(x.shape)
        if is_eager and num_tokens is None and self.shared is None:
            # The router then creates the end rows inside of its replayed function.
            rows, end_rows = flatten_rows(x, self.hidden_size), None
        else:
            token_count = self._token_count(x, num_tokens)
            rows, end_rows = rows_and_end_rows(x, token_count, 1, self.hidden_size)
        tokens, is_valid = rows if rows.dtype == x.dtype else x.reshape(rows.shape), None
        if num_tokens is not None and end_rows is not None:
            is_valid = torch.arange(tokens.shape[0], device=x.device) < end_rows
            # A NaN in the tail times 0 would be a NaN in the gradient of the router.
            tokens = tokens.masked_fill(~is_valid.unsqueeze(1), 0)
        router, mlp = self._router_and_experts
        routed = router(tokens, end_rows)
        routing = compute_routing(routed.expert_ids, self.num_experts)
        run = self._run_eager if mlp.is_eager_only else mlp

        def compute_shared() -> Tensor | None:
            if self.shared is None:
                return None
            assert end_rows is not None
            return self.shared(rows, end_rows, is_first_microbatch=is_first_microbatch)

        options = self._experts_options(x.dtype)
        mixture = Mixture(routed.weights, routing, options, compute_shared)
        y = run(rows, mixture, is_first_microbatch=is_first_microbatch)
        shared_output = mixture.shared()
        if shared_output is not None:
            y = y + shared_output.to(y.dtype)
        y = y if x.dim() == 2 else y.view(x.shape)
        return (y, self.router.losses(routed, routing.offs, is_valid)) if losses else y

    if TYPE_CHECKING:
        __call__ = forward

    def _experts_options(self, dtype: torch.dtype) -> ExpertsOptions:
        mlp = self._router_and_experts[1]
        return ExpertsOptions(mlp.activation.text, mlp.interleaved, self.recompute, dtype)

    @property
    def _router_and_experts(self) -> tuple[Router, GroupedMLP]:
        """``router`` and ``experts``, without the slow lookup of ``nn.Module.__getattr__``."""
        modules: dict[str, Any] = self._modules
        return modules["router"], modules["experts"]

    def _runs_fused(self) -> bool:
        """Return True if router and experts may run as one function, without calling modules."""
        router, mlp = self._router_and_experts
        if self.shared is not None or mlp.exchange is not None:
            return False
        return is_unmodified(router, Router) and is_unmodified(mlp, GroupedMLP) and mlp.runs_fused()

    def _infer(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        """Run ``forward`` for all tokens without gradients, and return (T, H)."""
        router, mlp = self._router_and_experts
        rows, count = flatten_rows(x, self.hidden_size), self.num_experts
        tokens = rows if rows.dtype == x.dtype else x.reshape(rows.shape)
        gate_up, down = mlp.layers(rows, None, is_first_microbatch)
        options = self._experts_options(x.dtype)

        def run() -> Tensor:
            routed = router(tokens)
            routing = compute_routing(routed.expert_ids, count)
            return experts(rows, routed.weights, routing, gate_up, down, options)

        inputs = (tokens, None if rows is tokens else rows, *router.tensors)
        return run_inference((router.options, count, options), inputs, (gate_up, down), run)

    def _token_count(self, x: Tensor, num_tokens: Tensor | None) -> Tensor:
        """Return the number of valid tokens as a tensor (1,)."""
        check_is_tensor("x", x)
        total = x.numel() // max(1, x.shape[-1]) if x.dim() else 0
        if num_tokens is None:
            return torch.full((1,), total, dtype=torch.int32, device=x.device)
        if not isinstance(num_tokens, Tensor) or num_tokens.numel() != 1:
            raise ValueError(f"num_tokens must be a tensor of one element, got {num_tokens!r}")
        check_dtype("num_tokens", num_tokens.dtype, (torch.int32, torch.int64))
        same_device("x", x.device, num_tokens=num_tokens)
        if (
            num_tokens.device.type == "cpu"
            and not needs_dispatcher((num_tokens,))
            and not 0 <= int(num_tokens) <= total
        ):
            raise ValueError(
                f"num_tokens must be in [0, {total}], the tokens of x, got {int(num_tokens)}"
            )
        return num_tokens.view(1)

    @eager_only("an inspector is active, or gradients of the experts' parameters are accumulated")
    def _run_eager(
        self, rows: Tensor, mixture: Mixture, *, is_first_microbatch: bool | None
    ) -> Tensor:
        return self.experts(rows, mixture, is_first_microbatch=is_first_microbatch)

    def backward_dw(self) -> None:
        """Compute the delayed gradients of all experts, as ``GroupedLinear.backward_dw`` does."""
        for mlp in (self.shared, self.experts):
            if mlp is not None:
                mlp.backward_dw()
