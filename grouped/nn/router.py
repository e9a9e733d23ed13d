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
    """What a mixture of experts asks a trainer to look at; none is scaled by a coefficient.

    Attributes:
        balance: E * sum over experts of (share of the routed pairs) * (mean score), scores
            summing to 1: 1 where both are even. Shazeer's and Fedus's loss (arXiv
            2101.03961).
        z: mean over the tokens of logsumexp(logits)^2 (arXiv 2202.08906).
        tokens_per_expert: (E,) int32.
    """

    balance: Tensor
    z: Tensor
    tokens_per_expert: Tensor


class Choice(NamedTuple):
    """What a router found for each token.

    Attributes:
        expert_ids: (T, k) int64, the best first; -1 of tokens that are not there.
        weights: (T, k) fp32.
        scores: (T, E) fp32.
        logits: (T, E) fp32.
    """

    expert_ids: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """Scores the experts for each token and chooses the best.

    Logits have the precision of fp32, and scores are fp32. A token's choice depends on the token
    alone: the first of equal scores wins.

    Attributes:
        weight: (E, H).
        bias: (E,) of the logits, or None.
        selection_bias: (E,) fp32 buffer, added to scores where experts are chosen and nowhere
            else (DeepSeek-V3's ``e_score_correction_bias``), or None.

    The arguments are those of ``grouped.nn.MoE``.
    """

    bias: Tensor | None
    selection_bias: Tensor | None
    #: Name of the process group whose ranks route tokens of their own, None if there is one rank.
    #: Counts are summed over it, and gradients if the parameters are DTensors.
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
        named = {"hidden_size": hidden_size, "num_experts": num_experts, "top_k": top_k}
        for name, size in (
            named | {"expert_groups": expert_groups, "top_groups": top_groups}
        ).items():
            check_size(name, size)
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
                f"expert_groups of {size} experts must have two or more, and top_groups = {top_groups} of them top_k = {top_k}"
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
        kept = self.selection_bias
        super()._apply(fn, recurse)
        moved = self.selection_bias
        if kept is not None and moved is not None and moved.dtype != torch.float32:
            self.selection_bias = kept.to(moved.device)
        return self

    @property
    def options(self) -> tuple[Any, ...]:
        """What ``moe_route`` takes besides tensors."""
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
            found: Any = self.weight, self.bias, self.selection_bias
        else:
            found = weight, self._parameters["bias"], self._buffers["selection_bias"]
        if type(found[0]) is nn.Parameter:
            return found
        return *(t if t is None else local(t, self.token_group) for t in found[:2]), found[2]

    def forward(self, x: Tensor, end: Tensor | None = None) -> Choice:
        """Choose the experts of tokens ``x`` (T, H); those from ``end`` (1,) int32 on get none."""
        options = self.options
        weight, bias, selection_bias = self.tensors
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
            logits: Tensor = torch.ops.grouped.router_logits(x, weight, end)
            if bias is not None:
                logits = logits + bias.float()
            weights, ids, scores = torch.ops.cute_kernels.moe_route(
                logits, selection_bias, end, *options
            )
            return Choice(ids, weights, scores, logits)
        given = (x, weight, bias, selection_bias, end, options)
        is_differentiable = (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        if is_differentiable and torch.is_grad_enabled():
            weights, ids, scores, logits = _Routed.apply(*given)
        else:
            weights, ids, scores, logits, _ = _routed(*given)
        return Choice(ids, weights, scores, logits)

    def losses(self, choice: Choice, offs: Tensor, live: Tensor | None) -> MoELosses:
        """The losses of a choice, whose tokens lie in experts up to ``offs`` (E,)."""
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
        """Balance without a loss, once a step, as DeepSeek-V3 does (arXiv 2408.15664).

        Raises the bias of experts with fewer tokens than the mean by ``rate`` and lowers the
        others'.

        All processes must have the same biases, so counts are summed over them before they are
        compared. Under ``ExpertParallel`` the router knows its processes. Under other parallelism,
        or if there are more processes with tokens of their own than those of the mesh, pass their
        ``group``; each of its processes must call.

        Args:
            tokens_per_expert: (E,) counts of the step in this process, such as
                ``MoELosses.tokens_per_expert``. Counts that are summed over the processes
                already give the same biases.
            rate: step of a bias.
            group: processes to sum over instead of those that the router knows.

        Raises:
            RuntimeError: the router has no ``selection_bias``.
            TypeError, ValueError: ``tokens_per_expert`` is no tensor of E numbers.
        """
        if self.selection_bias is None:
            raise RuntimeError("the router has no selection_bias: make it with selection_bias=True")
        check_tensor("tokens_per_expert", tokens_per_expert, shape=(self.num_experts,))
        counts = tokens_per_expert.float()
        name = self.token_group if group is None else group.group_name
        if name is not None:
            counts = sum_over(counts, name)
        self.selection_bias += rate * torch.sign(counts.mean() - counts)


class _Routed(torch.autograd.Function):
    """Logits and the choice by them without PyTorch's dispatcher."""

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
        *out, ends = _routed(x, weight, bias, selection_bias, end, options)
        _, ids, scores, _ = out
        ctx.save_for_backward(x, weight, ends, ids, scores)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        _, score, renormalize, _, _, factor = options
        ctx.options, ctx.bias_dtype = (
            (score, renormalize, factor),
            None if bias is None else bias.dtype,
        )
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dweights: Tensor | None, _: None, dscores: Tensor | None, dlogits: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given = [*ctx.saved_tensors, dweights, dscores, dlogits]
        key = ("router gradients", ctx.options, ctx.bias_dtype, *ctx.needs_input_grad[:3])
        return (
            *replayed(key, given, lambda given: (_gradients(ctx, *given), None))[0],
            None,
            None,
            None,
        )


def _gradients(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    ids: Tensor,
    scores: Tensor,
    dweights: Tensor | None,
    dscores: Tensor | None,
    dlogits: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if dweights is None and dscores is not None:
        dweights = scores.new_zeros(ids.shape)
    needs_dx, needs_dweight, needs_dbias = needs = ctx.needs_input_grad[:3]
    if dweights is not None:
        given = (dweights, dscores, ids, scores, *ctx.options)
        if dlogits is None and not needs_dbias and _takes_parts(x, weight):
            return *_gradients_of_parts(
                x, weight, ops.moe_route_gradient(*given, True), ends, needs_dx, needs_dweight
            ), None
        d = ops.moe_route_gradient(*given)
        dlogits = d if dlogits is None else d + dlogits
    if dlogits is None:
        return None, None, None
    dx, dweight = _logits_gradients(x, weight, dlogits, ends, needs)
    return dx, dweight, dlogits.sum(0).to(ctx.bias_dtype) if needs_dbias else None


def _routed(*given: Any) -> Sequence[Any]:
    x, weight, bias, selection_bias, end, options = given

    def route(_: object) -> tuple[tuple[Tensor, ...], None]:
        ends = _ends(x) if end is None else end
        logits = _logits(x, weight, ends[-1:])
        if bias is not None:
            logits = logits + bias.float()
        return (*ops.moe_route(logits, selection_bias, ends[-1:], *options), logits, ends), None

    return replayed(("router", options), list(given[:5]), route)[0]


# ---- as ops
#
# So that a compiler, which adds and rounds as it likes, leaves its bits alone.

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_LIBRARY.define(
    "router_logits(Tensor x, Tensor weight, Tensor? end=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_HALVES = (torch.bfloat16, torch.float16)
#: N of a product of plain operands is a multiple of it on a GPU.
_MULTIPLE = 8
#: From so many on the gradient of the weight is two sums: 93 us instead of 158 of 32768 tokens to
#: 128 experts, 20 instead of 29 of 4096 (2048 wide, H200).
_MANY_TOKENS = 2048


def _end(x: Tensor) -> Tensor:
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


def _ends(x: Tensor) -> Tensor:
    """Where a half of the tokens ends and where all do, if there are many; else the second alone."""
    count = x.shape[0]
    if count < _MANY_TOKENS:
        return _end(x)
    return torch.arange(
        count // 2, count + 1, count - count // 2, dtype=torch.int32, device=x.device
    )


@in_own_dtypes
def _logits(x: Tensor, weight: Tensor, end: Tensor | None = None) -> Tensor:
    check_tensor("x", x, dtypes=INPUT_DTYPES, shape=(None, weight.shape[1]))
    same_device("the router's weight", weight.device, x=x)
    experts, offs = weight.shape[0], _end(x) if end is None else end
    if not (x.dtype == weight.dtype and x.dtype in _HALVES):
        # Products of parts down to 2^-24 of the largest, side by side along K.
        a = [x] if x.dtype == torch.bfloat16 else bf16_parts(x)
        b = [weight] if weight.dtype == torch.bfloat16 else bf16_parts(weight)
        pairs = [(a[i], b[j]) for i in range(len(a)) for j in range(len(b)) if i + j < 3]
        x, weight = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
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
    x, weight, end = ctx.saved_tensors
    return *_logits_gradients(
        x, weight, dlogits, _end(x) if end is None else end, ctx.needs_input_grad
    ), None


@in_own_dtypes
def _logits_gradients(
    x: Tensor, weight: Tensor, dlogits: Tensor, ends: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if _takes_parts(x, weight):
        return _gradients_of_parts(x, weight, torch.cat(bf16_parts(dlogits), 1), ends, *needs[:2])
    dx = dweight = None
    if needs[0]:
        dx = (dlogits @ weight.float()).to(x.dtype)
    if needs[1]:
        dweight = (dlogits.T @ x.float()).to(weight.dtype)
    return dx, dweight


def _takes_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether fp32 gradients are multiplied as bf16 parts: as fp32 it takes five times as long."""
    return x.dtype == weight.dtype == torch.bfloat16 and not any(
        size % _MULTIPLE for size in weight.shape
    )


@in_own_dtypes
def _gradients_of_parts(
    x: Tensor, weight: Tensor, parts: Tensor, ends: Tensor, needs_dx: bool, needs_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """``_logits_gradients`` of parts side by side, as of logits."""
    dx = dweight = None
    experts, depth = weight.shape
    if needs_dx:
        # Not repeat, whose kernel takes twice as long.
        dx = ops.m_grouped_gemm(
            parts, torch.cat([weight] * 3).unsqueeze(0), ends[-1:], None, None, True, x.dtype
        )
    if needs_dweight:
        if parts.shape[0] >= _MANY_TOKENS and ends.shape[0] == 1:
            # Few tiles, which leave most SMs idle: a half of the tokens each.
            ends = torch.cat((ends // 2, ends))
        dweight = (
            ops.k_grouped_gemm(parts, x, ends, None, torch.float32)
            .view(-1, experts, depth)
            .sum(0)
            .to(weight.dtype)
        )
    return dx, dweight


_LIBRARY.impl("router_logits", _logits, "CompositeExplicitAutograd")
torch.library.register_fake("grouped::router_logits", _logits_fake, lib=_LIBRARY)
register_autograd("router_logits", _logits_backward, _save, _LIBRARY)


register_flops(torch.ops.grouped, product_flops, "router_logits")
