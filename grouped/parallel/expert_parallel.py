"""Experts spread over processes: ``ExpertParallel`` and ``ExpertTensorParallel``.

Styles for ``torch.distributed.tensor.parallel.parallelize_module``, as those of torchtitan.
PyTorch's collectives carry the rows, through NCCL or gloo. ``docs/distributed.md`` is the page for
users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.functional import pad

from cute_kernels import ops
from cute_kernels.records import check_kind

from ..functional.experts import ExpertsOptions, Layer, Routing, compute_routing, experts
from ..functional.rank_sums import Sum, SummedGradient
from ..nn import GroupedMLP, MoE
from ..tensor.dtensor_parts import local_part
from ..tensor.grouped_tensor import GroupedTensor
from .capacity import as_capacity, expert_capacity
from .clip_gradients import clip_grad_norm_
from .wire_format import check_wire, pack, unpack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from cute_kernels.formats import Format

__all__ = [
    "Exchange",
    "ExpertParallel",
    "ExpertTensorParallel",
    "clip_grad_norm_",
    "expert_capacity",
]

_collectives = torch.ops._c10d_functional


_MOST = torch.iinfo(torch.int32).max


class Splits(NamedTuple):
    """Rows to and from each rank."""

    send: list[int]
    receive: list[int]

    @property
    def back(self) -> Splits:
        """Of the way back."""
        return Splits(self.receive, self.send)


class Places(NamedTuple):
    """Where a rank's tokens go, and what of them comes back.

    A token travels once to each rank that has an expert of its; a pair is a token and an expert.

    Attributes:
        row: (T, k) int32 where each pair's row is among those that come back, -1 of those that
            are not sent.
        pairs: pairs to and from each rank.
        token: (U,) int32 tokens in the order in which they are sent, -1 in a free row.
        tokens: tokens to and from each rank.
        said: (T, 2 k) int32 told with a token: E minus each expert, 0 of a pair not sent, and
            its weight.
        source: (V, 1) int32 of each token that comes the rank that it is of, times E / R.
    """

    row: Tensor
    pairs: Splits
    token: Tensor
    tokens: Splits
    said: Tensor
    source: Tensor


class Exchange:
    """Sends rows to the ranks of their experts and brings results back.

    Args:
        group: the processes; rank r has experts [r E / R, (r + 1) E / R).
        num_experts: E.
        wire: the format in which tokens travel, or None for their own.
        gradient_wire: that of the gradients of outputs.
        capacity: pairs and tokens from each rank to each other, or None for as many as there
            are.
        overlap: what needs no exchange is computed while results travel.

    Attributes:
        sent: bytes that this rank sent to others, by ``"dispatch"``, ``"combine"`` and the same
            of backward passes, ``"dispatch_gradient"``, ``"combine_gradient"``; routing
            under ``"routing"``. Not counted in compiled code.
        dropped: () int64 on the device: pairs that ``capacity`` had no row for, of all calls;
            or None.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        wire: Format | None = None,
        gradient_wire: Format | None = None,
        capacity: tuple[int, int] | None = None,
        overlap: bool = True,
    ) -> None:
        self.group: str = group.group_name
        self.ranks, self.rank, self.overlap = group.size(), group.rank(), overlap
        self.num_experts, self.wire, self.gradient_wire, self.capacity = (
            num_experts,
            wire,
            gradient_wire,
            capacity,
        )
        self.sent: Counter[str] = Counter()
        self.dropped: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        p: Tensor,
        routing: Routing,
        first: Layer,
        second: Layer,
        options: ExpertsOptions,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """As ``grouped.functional.experts.experts``, of experts that are spread over the ranks.

        ``meanwhile`` is called while results travel.
        """
        places = self.places(routing, p)
        rows, weights, expert, arrived = _Dispatch.apply(x, p, places, self)
        local = compute_routing(expert, self.num_experts // self.ranks)
        h = experts(
            rows,
            weights,
            local,
            first,
            second,
            options._replace(dtype=rows.dtype, defer_routing_weights=True),
        )
        back = self._start(h.detach(), places.pairs.back, "combine")
        if self.overlap and meanwhile is not None:
            meanwhile()
        # The gradient of the weights is what ``_Dispatch`` has.
        return _Combine.apply(h, back, p.detach(), arrived, places, options.dtype, self)

    def places(self, routing: Routing, p: Tensor) -> Places:
        """Where the tokens of all ranks go; how many, the ranks tell each other."""
        each, ranks, experts_ = self.capacity, self.ranks, self.num_experts
        local, row, offs = experts_ // ranks, routing.row, routing.offs
        expert = torch.searchsorted(offs, row.masked_fill(row < 0, _MOST), right=True)
        owner = expert // local
        # Of each token and rank the rank, if the token goes there. The column behind them is for
        # none.
        goes = row.new_full((p.shape[0], ranks + 1), -1).scatter_(1, owner, owner.int())
        once = compute_routing(goes, ranks)
        base = torch.arange(0, experts_, local, dtype=torch.int32, device=p.device)
        if each is None:
            ends = torch.stack([offs[local - 1 :: local], once.offs])
            sizes = (ends - pad(ends[:, :-1], (1, 0))).T
            arriving = self._all_to_all(sizes, None, "routing")
            pairs, tokens = (
                Splits(*both) for both in torch.stack([sizes, arriving]).permute(2, 0, 1).tolist()
            )
            token = once.token[: sum(tokens.send)]
            source = base.repeat_interleave(arriving[:, 1], output_size=sum(tokens.receive))
        else:
            pairs, tokens = (Splits([n] * ranks, [n] * ranks) for n in each)
            once_starts = pad(once.offs[:-1], (1, 0))
            token = pad(once.token, (0, 1), value=-1)[
                _slots(once_starts, once.offs, each[1], goes.numel())
            ]
            source = base.repeat_interleave(each[1])
            place = once.row.gather(1, owner) - pad(once_starts, (0, 1))[owner]
            kept = compute_routing(torch.where(place < each[1], expert, -1), experts_)
            place = kept.row - pad(kept.offs[local - 1 :: local], (1, 0))[owner]
            row = torch.where(
                (kept.row >= 0) & (place < each[0]), owner * each[0] + place, -1
            ).int()
            expert = torch.where(row >= 0, expert, experts_)
            lost = (routing.row >= 0).sum() - (row >= 0).sum()
            if self.dropped is None:
                self.dropped = torch.zeros_like(lost)
            self.dropped.add_(lost)  # In place, for CUDA graphs.
        said = torch.stack([(experts_ - expert).int(), p.detach().view(torch.int32)], dim=2)
        return Places(row, pairs, token, tokens, said.flatten(1), source.unsqueeze(1))

    def arrivals(self, said: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Of each pair that came, in the order in which they go back: token, expert and weight; -1
        of a free row.
        """
        local, each = self.num_experts // self.ranks, said.view(-1, 2)
        end = self.num_experts - self.rank * local
        expert = end - said[:, ::2]
        expert = (expert + places.source).masked_fill((expert < 0) | (expert >= local), -1)
        found = compute_routing(expert, self.num_experts)
        if self.capacity is None:
            pair = found.pair[: sum(places.pairs.receive)]
            known = each[pair]
        else:
            ends = found.offs[local - 1 :: local]
            slots = _slots(pad(ends[:-1], (1, 0)), ends, self.capacity[0], expert.numel())
            pair = pad(found.pair, (0, 1), value=-1)[slots]
            known = each[pair].masked_fill(pair.unsqueeze(1) < 0, end + 1)
        return (
            pair // (said.shape[1] // 2),
            end - known[:, :1],
            known[:, 1:].contiguous().view(torch.float32),
        )

    def move(
        self,
        x: Tensor,
        token: Tensor,
        splits: Splits,
        what: str,
        wire: Format | None,
        said: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The tokens x (T, H) of all ranks that come to this one, and what is said of them."""
        # Quantized before they are gathered: each token once.
        words = x if wire is None else pack(x, wire).view(torch.float32)
        width, more = words.shape[1], 0
        if said is not None:
            parts = [words, said.view(words.dtype)]
            free = -sum(t.shape[1] for t in parts) % (
                16 // words.itemsize
            )  # Rows stay where kernels take them.
            words = torch.cat([*parts, words.new_zeros(len(x), free)], dim=1)
            more = said.shape[1] * 4 // words.itemsize
        flat = self._all_to_all(ops.moe_gather(words, token), splits, what, words.shape[1] - width)
        said = flat[:, width : width + more].contiguous().view(torch.int32)
        if wire is not None:
            return unpack(flat.view(torch.int32), x.shape[1], wire, x.dtype), said
        return flat[:, :width], said

    def _all_to_all(self, x: Tensor, splits: Splits | None, what: str, said: int = 0) -> Tensor:
        return self._finish(self._start(x, splits, what, said))

    def _start(self, x: Tensor, splits: Splits | None, what: str, said: int = 0) -> Tensor:
        """What comes from the others, to be read after ``_finish``."""
        splits = splits or Splits([1] * self.ranks, [1] * self.ranks)
        flat = x.contiguous().view(torch.uint8)
        if not torch.compiler.is_compiling():
            size = (len(x) - splits.send[self.rank]) * x.itemsize
            self.sent[what] += size * (x.shape[1] - said)
            self.sent["routing"] += size * said
        with self._named():
            out: Tensor = _collectives.all_to_all_single(
                flat, splits.receive, splits.send, self.group
            )
        return out.view(x.dtype)

    def _finish(self, x: Tensor) -> Tensor:
        with self._named():
            out: Tensor = _collectives.wait_tensor(x)
        return out

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"the exchange of rows between the {self.ranks} ranks of group {self.group!r} failed on rank {self.rank}: one "
                f"of them is gone, or did not come before the group's timeout ({error})"
            ) from error


def _slots(starts: Tensor, ends: Tensor, each: int, free: int) -> Tensor:
    """Rows [start, end) of each rank in a buffer of ``each`` for it;

    ``free`` where there is none.
    """
    rows = starts.unsqueeze(1) + torch.arange(each, device=starts.device)
    return torch.where(rows < ends.unsqueeze(1), rows, free).flatten()


class _Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts; gradients come back and are added up there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, places: Places, exchange: Exchange
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places.row)
        ctx.back, ctx.exchange, ctx.dtype = places.pairs.back, exchange, x.dtype
        tokens, said = exchange.move(
            x, places.token, places.tokens, "dispatch", exchange.wire, places.said
        )
        arrived, expert, weight = exchange.arrivals(said, places)
        ctx.mark_non_differentiable(expert, arrived)
        return ops.moe_gather(tokens, arrived), weight, expert, arrived

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dp: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (row,) = ctx.saved_tensors
        dx = ctx.exchange._all_to_all(dx, ctx.back, "dispatch_gradient")
        dp = pad(ctx.exchange._all_to_all(dp, ctx.back, "routing").flatten(), (0, 1))
        return ops.moe_combine(dx, row, None, ctx.dtype), dp[row.long()], None, None


class _Combine(torch.autograd.Function):
    """Results back to their tokens.

    The gradient that experts get is that of y, as ``ExpertsOptions.defer_routing_weights`` has it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        back: Tensor,
        p: Tensor,
        arrived: Tensor,
        places: Places,
        dtype: torch.dtype,
        exchange: Exchange,
    ) -> Tensor:
        ctx.save_for_backward(arrived, places.token)
        ctx.splits, ctx.exchange, ctx.dtype = places.tokens, exchange, h.dtype
        return ops.moe_combine(exchange._finish(back), places.row, p, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (arrived, token), exchange = ctx.saved_tensors, ctx.exchange
        tokens, _ = exchange.move(
            dy.to(ctx.dtype), token, ctx.splits, "combine_gradient", exchange.gradient_wire
        )
        return ops.moe_gather(tokens, arrived), None, None, None, None, None, None


class _Style(ParallelStyle):
    """What both styles share: on which modules, and how their parameters are sharded."""

    def __init__(self, mesh: DeviceMesh | None = None, *, replicate: bool = True) -> None:
        super().__init__()
        check_kind(bool, replicate=replicate)
        self.mesh, self.replicate = mesh, replicate

    def __call__(self, module: nn.Module) -> nn.Module:
        """Spread the experts of ``module`` over the mesh of this style; returns ``module``."""
        if self.mesh is None:
            raise ValueError(
                "mesh is missing: give it to the style, or call parallelize_module(module, mesh, style)"
            )
        return self._apply(module, self.mesh)

    def _checked(self, module: nn.Module, mesh: DeviceMesh) -> GroupedMLP:
        mlp: Any = module.experts if isinstance(module, MoE) else module
        if not isinstance(mlp, GroupedMLP):
            raise TypeError(
                f"{type(self).__name__} is for grouped.nn.MoE and GroupedMLP, got {type(module).__name__}: experts of "
                "torchtitan and transformers are spread by those"
            )
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, such as mesh['ep'], got {mesh}")
        if mlp.exchange is not None:
            raise ValueError("the experts are spread over processes already")
        for layer in (mlp.gate_up, mlp.down):
            if not layer.single_parameter:
                raise ValueError(
                    "experts that are spread over processes have one parameter: single_parameter=True"
                )
            if layer.recipe.takes_scales:
                raise ValueError(
                    f"{layer.recipe} keeps scales of all experts on each rank: use FP8Current, or FP8Block"
                )
        return mlp

    def _shard(self, layer: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
        for name, p in list(layer.named_parameters(recurse=False)):
            part = distribute_tensor(
                p.detach(), mesh, [placement], src_data_rank=getattr(self, "src_data_rank", 0)
            )
            setattr(layer, name, nn.Parameter(part, p.requires_grad))

    def _replicate(self, moe: MoE, mesh: DeviceMesh, group: str | None) -> None:
        """Make the parameters that each rank has whole DTensors, too;

        ``group``: of ranks with tokens of their own.
        """
        moe.router.token_group = group
        if not self.replicate:
            return
        layers = [] if moe.shared is None else [moe.shared.gate_up, moe.shared.down]
        for layer in layers:
            layer.token_group = group
        for module in (moe.router, *layers):
            self._shard(module, mesh, Replicate())


class ExpertParallel(_Style):
    """Each rank has E / R experts of a ``grouped.nn.MoE``, and sends tokens to those of the others.

    Or of a ``GroupedMLP``, whose rows are this rank's, with ``offs`` of all experts. Weights may be
    quantized.

    ``parallelize_module(moe, mesh["ep"], ExpertParallel())`` makes all parameters DTensors: those
    of the experts ``Shard(0)``, those of router and shared expert ``Replicate()``, with the values
    of the mesh's first rank. Gradients of all of them are sums over the mesh when ``backward()``
    returns: nothing is left to sum. So one call of ``torch.nn.utils.clip_grad_norm_`` and
    ``foreach`` optimizers take them together; beside plain parameters of other modules use
    ``grouped.distributed.clip_grad_norm_``.

    The bits of outputs and gradients are those of one process with all tokens, rank after rank
    (``docs/moe.md``), whatever R is; of the second layer's bias, router and shared expert fp32 sums
    have another order. A shared expert is the exception under recipes with one scale for all tokens
    (NVFP4, FP8Current; of gradients NVFP4RowScaled, too): each rank quantizes its own tokens, by
    their amax. With a ``wire`` they are those of a process whose experts read
    ``dequantize(quantize(x, wire))``.

    Args:
        mesh: of one dimension; or that of ``parallelize_module``.
        wire: the format in which tokens travel: FP8Block, MXFP8, or row-scaled NVFP4, whose
            codes and scales are sent instead of the tokens' dtype; None for that.
        gradient_wire: likewise, of the gradients of outputs. Outputs and gradients of tokens
            travel in the dtype of the computation.
        capacity: (pairs, tokens), the most that one rank sends to each single rank in a call,
            itself included: pairs of a token and an expert, and tokens. Neither is per
            expert nor a sum over the ranks; one number stands for both. ``expert_capacity``
            computes them: 4096 tokens of a rank, top 8 of 256 experts on 2 ranks are 4096 *
            8 / 2 = 16384 pairs if routing is even, 20480 with a quarter to spare, and 4096
            tokens. Buffers and work grow with it: a rank computes R * pairs rows. Shapes
            are static then and nothing is read on the host, for CUDA graphs and
            ``torch.compile(fullgraph=True)``; pairs beyond it are left out and counted in
            ``moe.exchange.dropped``. (T * min(k, E / R), T) drops none. None: as many as
            there are, whose numbers the host reads once a call.
        overlap: the shared expert of a ``MoE`` computes while outputs of the others travel,
            with the same bits.
        replicate: router and shared expert become DTensors, too. With False they stay plain,
            for ``fully_shard`` along a mesh that has these ranks in it; their gradients are
            then to be summed as those of any module of data parallelism.

    ``moe.exchange`` is an ``Exchange``: ``sent`` counts the bytes on the wire.

    Raises:
        TypeError: no such module, a wire that is no format, or a capacity of other kinds than
            ints.
        ValueError: ranks that do not divide E, a recipe of delayed scaling, a mesh of several
            dimensions, a wire whose rows share scales, or a capacity that is not one
            positive number or two.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        *,
        wire: Format | None = None,
        gradient_wire: Format | None = None,
        capacity: int | tuple[int, int] | None = None,
        overlap: bool = True,
        replicate: bool = True,
    ) -> None:
        super().__init__(mesh, replicate=replicate)
        check_wire("wire", wire)
        check_wire("gradient_wire", gradient_wire)
        check_kind(bool, overlap=overlap)
        self.options = (wire, gradient_wire, as_capacity(capacity), overlap)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mlp = self._checked(module, device_mesh)
        experts_, hidden = mlp.gate_up.num_groups, mlp.gate_up.in_features
        if experts_ % device_mesh.size():
            raise ValueError(
                f"num_experts, {experts_}, must be a multiple of the mesh's {device_mesh.size()} ranks"
            )
        for fmt in self.options[:2]:
            if fmt is not None and hidden % fmt.k_multiple:
                raise ValueError(
                    f"hidden_size must be a multiple of {fmt.k_multiple} for {fmt}, got {hidden}"
                )
        for layer in (mlp.gate_up, mlp.down):
            self._shard(layer, device_mesh, Shard(0))
        group = device_mesh.get_group()
        mlp.exchange = Exchange(group, experts_, *self.options)
        if isinstance(module, MoE):
            self._replicate(module, device_mesh, group.group_name)
        return module


class ExpertTensorParallel(_Style):
    """Each rank has I / R of the inner dimension of all experts of a ``grouped.nn.MoE`` or
    ``GroupedMLP``.

    All ranks get the same tokens. ``gate_up.weight`` is sharded along its rows (of each half where
    gate and up are not interleaved), ``down.weight`` along its columns. Each rank rounds its part
    of an expert's output to the dtype of the computation, as the product gives it, and weights and
    adds those of a token in fp32; the ranks' sums are added in fp32 and rounded once. Gradients of
    tokens are rounded on each rank, added in fp32 and rounded.

    Raises:
        TypeError: no such module.
        ValueError: ranks that do not divide I into multiples of what the recipe asks for,
            biases, quantized weights, or what ``ExpertParallel`` refuses.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mlp = self._checked(module, device_mesh)
        first, second = mlp.gate_up, mlp.down
        ranks, multiple = device_mesh.size(), first.recipe.multiple
        if second.in_features % (ranks * multiple):
            raise ValueError(
                f"intermediate_size, {second.in_features}, must be a multiple of {multiple} on each of the mesh's {ranks} ranks"
            )
        if first.has_bias:
            raise ValueError(
                "experts with biases have no tensor parallelism: each rank would add the second one"
            )
        if any(isinstance(local_part(layer.weight), GroupedTensor) for layer in (first, second)):
            raise ValueError(
                "quantized experts have no tensor parallelism: they are cut between groups, by ExpertParallel"
            )
        halves = first.out_features // second.in_features
        rows = Shard(1) if halves == 1 or mlp.interleaved else _StridedShard(1, split_factor=halves)
        self._shard(first, device_mesh, rows)
        self._shard(second, device_mesh, Shard(2))
        mlp.exchange = _PartialSums(device_mesh.get_group().group_name)
        if isinstance(module, MoE):
            self._replicate(module, device_mesh, None)
        return module


class _PartialSums:
    """Adds up what the ranks make of the same tokens."""

    def __init__(self, group: str) -> None:
        self.group = group

    def __call__(
        self,
        x: Tensor,
        p: Tensor,
        routing: Routing,
        first: Layer,
        second: Layer,
        options: ExpertsOptions,
        meanwhile: object = None,
    ) -> Tensor:
        x, p = SummedGradient.apply(x, self.group), SummedGradient.apply(p, self.group)
        y = experts(x, p, routing, first, second, options._replace(dtype=torch.float32))
        summed: Tensor = Sum.apply(y, self.group)
        return summed.to(options.dtype)
