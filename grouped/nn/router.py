"""The router of a mixture of experts: which experts a token goes to, and with what weights."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cute_kernels import ops
from cute_kernels.ops.checks import INPUT_DTYPES, check_dtype, check_tensor, same_device
from cute_kernels.ops.derivatives import register_autograd
from cute_kernels.ops.flops import register_flops
from cute_kernels.ops.moe.router_op import SCORES
from cute_kernels.records import check_choice, check_kind
from cute_kernels.reference.router import TINY, bf16_parts
from cute_kernels.runtime.replay import replayed
from grouped.functional.flops import product_flops

from ..functional.autocast import in_own_dtypes
from ..functional.rank_sums import sum_over
from ..tensor.validation import check_size
from .cached_weight import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MoELosses(NamedTuple):
    """Losses and statistics of the routing. No coefficient is applied.

    Attributes:
        balance: () fp32. E * sum over experts of (share of the routed pairs) * (mean score), with
            the scores of a token normalized to a sum of 1. It is 1 if both are even. This is the
            loss of Shazeer and Fedus (arXiv 2101.03961).
        z: () fp32. The mean over the tokens of logsumexp(logits)^2 (arXiv 2202.08906).
        tokens_per_expert: (E,) int32. The number of tokens that each expert gets.
    """

    balance: Tensor
    z: Tensor
    tokens_per_expert: Tensor


class RouterOutput(NamedTuple):
    """Experts and weights of each token.

    Attributes:
        expert_ids: (T, k) int64. The best expert comes first. Tokens in the tail have -1.
        weights: (T, k) fp32. The routing weights.
        scores: (T, E) fp32. Softmax or sigmoid of the logits.
        logits: (T, E) fp32.
    """

    expert_ids: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """Scores the experts for each token and chooses the best.

    Logits have the precision of fp32, and scores are fp32. The choice for a token depends on that
    token alone. Among equal scores the first wins.

    Args:
        hidden_size: H. The width of the tokens.
        num_experts: E. The number of experts.
        top_k: Number of experts per token.
        score: Function of the logits. It is ``"softmax"`` or ``"sigmoid"``.
        renormalize: True divides the weights of a token by their sum.
        bias: True adds a bias to the logits.
        selection_bias: True creates the buffer ``selection_bias``. The selection adds it to the
            scores.
        expert_groups: Number of groups of experts. See ``grouped.nn.MoE``.
        top_groups: Number of groups that a token may use.
        scaling_factor: Factor of the weights. It is applied last.
        device: Device of the parameters.
        dtype: Dtype of the parameters. It is bf16, fp16 or fp32.

    Attributes:
        weight: (E, H).
        bias: (E,) of the logits, or None.
        selection_bias: (E,) fp32 buffer, or None. It is added to the scores when experts are
            chosen and nowhere else, like DeepSeek-V3's ``e_score_correction_bias``.

    Raises:
        ValueError: A size or an option is invalid.
        TypeError: An argument has the wrong type.
    """

    bias: Tensor | None
    selection_bias: Tensor | None
    #: Name of the process group whose ranks route different tokens. None for one rank. Counts are
    #: summed over it, and gradients too if the parameters are DTensors.
    token_group: str | None = None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool = True,
        bias: bool = False,
        selection_bias: bool = False,
        expert_groups: int = 1,
        top_groups: int = 1,
        scaling_factor: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("score", score, SCORES)
        check_size("hidden_size", hidden_size)
        check_size("num_experts", num_experts)
        check_size("top_k", top_k)
        check_size("expert_groups", expert_groups)
        check_size("top_groups", top_groups)
        check_kind(bool, renormalize=renormalize, bias=bias, selection_bias=selection_bias)
        check_kind(float, routed_scaling_factor=scaling_factor)
        check_dtype("dtype", dtype or torch.get_default_dtype(), INPUT_DTYPES)
        if top_k > num_experts:
            raise ValueError(f"top_k must be in [1, num_experts = {num_experts}], got {top_k}")
        if num_experts % expert_groups:
            raise ValueError(
                f"expert_groups must divide num_experts = {num_experts}, got {expert_groups}"
            )
        if top_groups > expert_groups:
            raise ValueError(
                f"top_groups must be in [1, expert_groups = {expert_groups}], got {top_groups}"
            )
        size = num_experts // expert_groups
        if expert_groups > 1 and (size < 2 or top_k > top_groups * size):
            raise ValueError(
                f"expert_groups of {size} experts must have two or more, and top_groups = "
                f"{top_groups} of them top_k = {top_k}"
            )
        if not (math.isfinite(scaling_factor) and scaling_factor > 0):
            raise ValueError(f"routed_scaling_factor must be positive, got {scaling_factor}")
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.renormalize = score, renormalize
        self.expert_groups, self.top_groups = expert_groups, top_groups
        self.scaling_factor = scaling_factor
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **factory))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(num_experts, **factory)) if bias else None
        )
        buffer = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("selection_bias", buffer if selection_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as ``nn.Linear`` does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        with torch.no_grad():
            for p in (self.weight, self.bias):
                if p is not None:
                    p.uniform_(-bound, bound)
            if self.selection_bias is not None:
                self.selection_bias.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """Move or cast the parameters. ``selection_bias`` moves, but stays fp32."""
        selection_bias = self.selection_bias
        super()._apply(fn, recurse)
        moved = self.selection_bias
        if selection_bias is not None and moved is not None and moved.dtype != torch.float32:
            self.selection_bias = selection_bias.to(moved.device)
        return self

    @property
    def options(self) -> tuple[Any, ...]:
        """Arguments of ``moe_route`` that are not tensors, in its order."""
        return (
            self.top_k,
            self.score,
            self.renormalize,
            self.expert_groups,
            self.top_groups,
            self.scaling_factor,
        )

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """Weight, bias and selection bias as plain tensors."""
        weight: Any = self._parameters.get("weight")
        if (
            weight is None
            or "bias" not in self._parameters
            or "selection_bias" not in self._buffers
        ):
            weight, bias, selection_bias = self.weight, self.bias, self.selection_bias
        else:
            bias, selection_bias = self._parameters["bias"], self._buffers["selection_bias"]
        if type(weight) is nn.Parameter:
            return weight, bias, selection_bias
        weight = local(weight, self.token_group)
        return weight, None if bias is None else local(bias, self.token_group), selection_bias

    def forward(self, x: Tensor, end: Tensor | None = None) -> RouterOutput:
        """Choose the experts of tokens.

        Args:
            x: (T, H) bf16, fp16 or fp32. The tokens.
            end: (1,) int32. The number of valid tokens: later ones get no expert. None routes all.

        Returns:
            Ids, weights, scores and logits of the tokens.
        """
        options = self.options
        weight, bias, selection_bias = self.tensors
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
            logits: Tensor = torch.ops.grouped.router_logits(x, weight, end)
            if bias is not None:
                logits = logits + bias.float()
            weights, ids, scores = torch.ops.cute_kernels.moe_route(
                logits, selection_bias, end, *options
            )
            return RouterOutput(ids, weights, scores, logits)
        is_differentiable = (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        if is_differentiable and torch.is_grad_enabled():
            weights, ids, scores, logits = _RouterFunction.apply(
                x, weight, bias, selection_bias, end, options
            )
        else:
            weights, ids, scores, logits, _ = _route(x, weight, bias, selection_bias, end, options)
        return RouterOutput(ids, weights, scores, logits)

    if TYPE_CHECKING:
        __call__ = forward

    def losses(self, choice: RouterOutput, offs: Tensor, live: Tensor | None = None) -> MoELosses:
        """Return the losses of a routing.

        Args:
            choice: Output of ``forward``.
            offs: (E,) integers. The end rows of the routed pairs, sorted by expert.
            live: (T,) bool. False for tokens in the tail. None if all tokens are valid.
        """
        counts = torch.diff(offs, prepend=offs.new_zeros(1))
        scores, z = choice.scores, choice.logits.logsumexp(-1).square()
        if self.score == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        count: Any = max(1, z.shape[0])
        if live is not None:
            scores, z, count = scores * live.unsqueeze(1), z * live, live.sum().clamp_min(1)
        share = counts / counts.sum().clamp_min(1)
        return MoELosses(
            self.num_experts * (share * scores.sum(0) / count).sum(), z.sum() / count, counts
        )

    @torch.no_grad()
    def update_selection_bias(
        self, tokens_per_expert: Tensor, rate: float = 1e-3, *, group: "ProcessGroup | None" = None
    ) -> None:
        """Balance the experts without a loss, once per step, as DeepSeek-V3 does.

        See arXiv 2408.15664. The bias of experts with fewer tokens than the mean rises by ``rate``,
        and the bias of the others falls by ``rate``.

        All processes must have the same biases, so the counts are summed over them first. Under
        ``ExpertParallel`` the router knows the processes. Pass their ``group`` under other
        parallelism, or if processes outside of the mesh have tokens, too. Each process of the group
        must call.

        Args:
            tokens_per_expert: (E,) counts of the step in this process, such as
                ``MoELosses.tokens_per_expert``. Counts that are summed over the processes already
                give the same biases.
            rate: Step of a bias.
            group: Processes to sum over, instead of the processes that the router knows.

        Raises:
            RuntimeError: The router has no ``selection_bias``.
            TypeError: ``tokens_per_expert`` is not a tensor of numbers.
            ValueError: ``tokens_per_expert`` does not have E elements.
        """
        if self.selection_bias is None:
            raise RuntimeError(
                "the router has no selection_bias: create it with selection_bias=True"
            )
        check_tensor("tokens_per_expert", tokens_per_expert, shape=(self.num_experts,))
        counts = tokens_per_expert.float()
        name = self.token_group if group is None else group.group_name
        if name is not None:
            counts = sum_over(counts, name)
        self.selection_bias += rate * torch.sign(counts.mean() - counts)


class _RouterFunction(torch.autograd.Function):
    """The logits, and the choice of experts, without PyTorch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        selection_bias: Tensor | None,
        end: Tensor | None,
        options: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        """Route ``x`` (T, H), and save the tensors of the backward pass."""
        *outputs, token_ends = _route(x, weight, bias, selection_bias, end, options)
        _, ids, scores, _ = outputs
        ctx.save_for_backward(x, weight, token_ends, ids, scores)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        _, score, renormalize, _, _, scaling_factor = options
        ctx.options = (score, renormalize, scaling_factor)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dweights: Tensor | None, _: None, dscores: Tensor | None, dlogits: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x``, the weight and the bias."""
        tensors = [*ctx.saved_tensors, dweights, dscores, dlogits]
        key = ("router gradients", ctx.options, ctx.bias_dtype, *ctx.needs_input_grad[:3])
        (dx, dweight, dbias), _ = replayed(
            key, tensors, lambda tensors: (_router_gradients(ctx, *tensors), None)
        )
        return dx, dweight, dbias, None, None, None


def _router_gradients(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    token_ends: Tensor,
    ids: Tensor,
    scores: Tensor,
    dweights: Tensor | None,
    dscores: Tensor | None,
    dlogits: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of ``x`` (T, H), ``weight`` (E, H) and the bias (E,).

    Args:
        ctx: Context of ``_RouterFunction``, with its options and ``needs_input_grad``.
        x: (T, H). The tokens.
        weight: (E, H).
        token_ends: Result of ``_split_token_ends``, or the number of valid tokens.
        ids: (T, k) int64. Experts of each token.
        scores: (T, E) fp32. Scores of the experts.
        dweights: (T, k) fp32, or None. Gradient of the routing weights.
        dscores: (T, E) fp32, or None. Gradient of the scores.
        dlogits: (T, E) fp32, or None. Gradient of the logits as an output.
    """
    if dweights is None and dscores is not None:
        dweights = scores.new_zeros(ids.shape)
    needs_dx, needs_dweight, needs_dbias = needs = ctx.needs_input_grad[:3]
    if dweights is not None:
        score, renormalize, scaling_factor = ctx.options
        if dlogits is None and not needs_dbias and _can_split_to_bf16(x, weight):
            bf16_terms = ops.moe_route_gradient(
                dweights, dscores, ids, scores, score, renormalize, scaling_factor, True
            )
            dx, dweight = _gradients_of_bf16_terms(
                x, weight, bf16_terms, token_ends, needs_dx, needs_dweight
            )
            return dx, dweight, None
        d = ops.moe_route_gradient(
            dweights, dscores, ids, scores, score, renormalize, scaling_factor
        )
        dlogits = d if dlogits is None else d + dlogits
    if dlogits is None:
        return None, None, None
    dx, dweight = _logits_gradients(x, weight, dlogits, token_ends, needs)
    return dx, dweight, dlogits.sum(0).to(ctx.bias_dtype) if needs_dbias else None


def _route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    selection_bias: Tensor | None,
    end: Tensor | None,
    options: tuple[Any, ...],
) -> Sequence[Any]:
    """Return routing weights, ids, scores, logits, and the token ends of ``_split_token_ends``."""

    def route(_: object) -> tuple[tuple[Tensor, ...], None]:
        """Compute the result, for ``replayed``."""
        token_ends = _split_token_ends(x) if end is None else end
        logits = _logits(x, weight, token_ends[-1:])
        if bias is not None:
            logits = logits + bias.float()
        routed = ops.moe_route(logits, selection_bias, token_ends[-1:], *options)
        return (*routed, logits, token_ends), None

    return replayed(("router", options), [x, weight, bias, selection_bias, end], route)[0]


# ---- Operators.
#
# A compiler may reorder and round sums differently. An opaque operator keeps the bits.

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_LIBRARY.define(
    "router_logits(Tensor x, Tensor weight, Tensor? end=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_HALF_DTYPES = (torch.bfloat16, torch.float16)
#: N of a GEMM with plain operands must be a multiple of this number on a GPU.
_MULTIPLE = 8
#: From this number of tokens on, the gradient of the weight is computed as two sums. It takes 93 us
#: instead of 158 us for 32768 tokens to 128 experts, and 20 us instead of 29 us for 4096 tokens
#: (2048 wide, H200).
_MANY_TOKENS = 2048


def _token_end(x: Tensor) -> Tensor:
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


def _split_token_ends(x: Tensor) -> Tensor:
    """Return the ends of two halves of the tokens, (2,); or (1,) if there are few tokens."""
    count = x.shape[0]
    if count < _MANY_TOKENS:
        return _token_end(x)
    return torch.arange(
        count // 2, count + 1, count - count // 2, dtype=torch.int32, device=x.device
    )


@in_own_dtypes
def _logits(x: Tensor, weight: Tensor, end: Tensor | None = None) -> Tensor:
    """Return the logits (T, E), fp32, of ``x`` (T, H) and ``weight`` (E, H)."""
    check_tensor("x", x, dtypes=INPUT_DTYPES, shape=(None, weight.shape[1]))
    same_device("the router's weight", weight.device, x=x)
    experts, offs = weight.shape[0], _token_end(x) if end is None else end
    if not (x.dtype == weight.dtype and x.dtype in _HALF_DTYPES):
        # Multiply the bf16 terms of fp32 operands, concatenated along K. Products below 2^-24 of
        # the largest are left out.
        a = [x] if x.dtype == torch.bfloat16 else bf16_parts(x)
        b = [weight] if weight.dtype == torch.bfloat16 else bf16_parts(weight)
        pairs = [(a[i], b[j]) for i in range(len(a)) for j in range(len(b)) if i + j < 3]
        x, weight = (torch.cat(terms, 1) for terms in zip(*pairs, strict=True))
    if experts % _MULTIPLE:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -experts % _MULTIPLE))
    logits: Tensor = ops.m_grouped_gemm(
        x, weight.unsqueeze(0), offs, None, None, False, torch.float32
    )
    return logits[:, :experts].contiguous() if experts % _MULTIPLE else logits


def _logits_fake(x: Tensor, weight: Tensor, end: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _logits_backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Return the gradients of the operator's ``x`` and ``weight``."""
    x, weight, end = ctx.saved_tensors
    token_ends = _token_end(x) if end is None else end
    dx, dweight = _logits_gradients(x, weight, dlogits, token_ends, ctx.needs_input_grad)
    return dx, dweight, None


@in_own_dtypes
def _logits_gradients(
    x: Tensor, weight: Tensor, dlogits: Tensor, token_ends: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``x`` (T, H) and ``weight`` (E, H) for ``dlogits`` (T, E), fp32."""
    if _can_split_to_bf16(x, weight):
        bf16_terms = torch.cat(bf16_parts(dlogits), 1)
        return _gradients_of_bf16_terms(x, weight, bf16_terms, token_ends, needs[0], needs[1])
    dx = dweight = None
    if needs[0]:
        dx = (dlogits @ weight.float()).to(x.dtype)
    if needs[1]:
        dweight = (dlogits.T @ x.float()).to(weight.dtype)
    return dx, dweight


def _can_split_to_bf16(x: Tensor, weight: Tensor) -> bool:
    """Return True if fp32 gradients are multiplied as three bf16 terms.

    As fp32 the products take five times as long.
    """
    return x.dtype == weight.dtype == torch.bfloat16 and not any(
        size % _MULTIPLE for size in weight.shape
    )


@in_own_dtypes
def _gradients_of_bf16_terms(
    x: Tensor,
    weight: Tensor,
    bf16_terms: Tensor,
    token_ends: Tensor,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``x`` (T, H) and ``weight`` (E, H).

    ``bf16_terms``, (T, 3 E), are the three bf16 terms of the logits' gradient, side by side.
    """
    dx = dweight = None
    experts, depth = weight.shape
    if needs_dx:
        # The kernel of Tensor.repeat takes twice as long as cat.
        repeated = torch.cat([weight] * 3).unsqueeze(0)
        dx = ops.m_grouped_gemm(bf16_terms, repeated, token_ends[-1:], None, None, True, x.dtype)
    if needs_dweight:
        if bf16_terms.shape[0] >= _MANY_TOKENS and token_ends.shape[0] == 1:
            # One sum has few tiles, which leave most SMs idle. Two sums take half of the tokens
            # each.
            token_ends = torch.cat((token_ends // 2, token_ends))
        dweight = (
            ops.k_grouped_gemm(bf16_terms, x, token_ends, None, torch.float32)
            .view(-1, experts, depth)
            .sum(0)
            .to(weight.dtype)
        )
    return dx, dweight


_LIBRARY.impl("router_logits", _logits, "CompositeExplicitAutograd")
torch.library.register_fake("grouped::router_logits", _logits_fake, lib=_LIBRARY)
register_autograd("router_logits", _logits_backward, _save, _LIBRARY)


register_flops(torch.ops.grouped, product_flops, "router_logits")
