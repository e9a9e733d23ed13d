"""Experts spread over processes: ``ExpertParallel`` and ``ExpertTensorParallel``.

Styles for ``torch.distributed.tensor.parallel.parallelize_module``, as those of torchtitan. PyTorch's
collectives carry the rows, through NCCL or gloo. ``docs/distributed.md`` is the page for users.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.functional import pad

from cute_kernels import ops

from .experts import Layer, Routing, Style, compute_routing, experts
from .nn import GroupedLinear, MoE
from .wire import check_wire, pack, unpack

if TYPE_CHECKING:
	from torch.distributed import ProcessGroup
	from torch.distributed.device_mesh import DeviceMesh

	from cute_kernels.formats import Format

__all__ = ["Exchange", "ExpertParallel", "ExpertTensorParallel"]

_collectives = torch.ops._c10d_functional


class Splits(NamedTuple):
	"""Rows to and from each rank."""

	send: list[int]
	receive: list[int]

	@property
	def back(self) -> Splits:
		"""Of the way back."""
		return Splits(self.receive, self.send)


class Places(NamedTuple):
	"""Where a rank's tokens go, and what has come to it.

	A token travels once to each rank that has an expert of its; a pair is a token and an expert.

	Attributes:
	  row: (T, k) int32 where each pair's row is among those sent, -1 of those that are not.
	  pairs: pairs to and from each rank.
	  token: (U,) int32 tokens in the order in which they are sent, -1 in a free row.
	  tokens: tokens to and from each rank.
	  arrived: (N,) int32 where the token of each pair that came is among the tokens that did, or -1.
	  expert: (N,) int32 its expert's number on this rank, or -1.
	  weight: (N, 1) fp32 its weight.
	"""

	row: Tensor
	pairs: Splits
	token: Tensor
	tokens: Splits
	arrived: Tensor
	expert: Tensor
	weight: Tensor


class Exchange:
	"""Sends rows to the ranks of their experts and brings results back.

	Args:
	  group: the processes; rank r has experts [r E / R, (r + 1) E / R).
	  num_experts: E.
	  wire: the format in which tokens travel, or None for their own.
	  gradient_wire: that of the gradients of outputs.
	  capacity: pairs and tokens from each rank to each other, or None for as many as there are.

	Attributes:
	  sent: bytes that this rank sent to others, by ``"dispatch"``, ``"combine"`` and the same of
	    backward passes, ``"dispatch_gradient"``, ``"combine_gradient"``; routing under ``"routing"``.
	    Not counted in compiled code.
	  dropped: () int64 on the device: pairs that ``capacity`` had no row for, of all calls; or None.
	"""

	def __init__(
		self,
		group: ProcessGroup,
		num_experts: int,
		wire: Format | None = None,
		gradient_wire: Format | None = None,
		capacity: tuple[int, int] | None = None,
	) -> None:
		self.group: str = group.group_name
		self.ranks, self.rank = group.size(), group.rank()
		self.num_experts, self.wire, self.gradient_wire, self.capacity = num_experts, wire, gradient_wire, capacity
		self.sent: Counter[str] = Counter()
		self.dropped: Tensor | None = None

	def __call__(self, x: Tensor, p: Tensor, routing: Routing, first: Layer, second: Layer, style: Style) -> Tensor:
		"""As ``grouped.experts.experts``, of experts that are spread over the ranks."""
		places = self.places(routing, p)
		rows, weights = _Dispatch.apply(x, p, places, self)  # type: ignore[no-untyped-call]
		local = compute_routing(places.expert.unsqueeze(1), self.num_experts // self.ranks)
		h = experts(rows, weights, local, first, second, style._replace(dtype=rows.dtype, apart=True))
		# The gradient of the weights is what ``_Dispatch`` has.
		y: Tensor = _Combine.apply(h, p.detach(), places, style.dtype, self)  # type: ignore[no-untyped-call]
		return y

	def places(self, routing: Routing, p: Tensor) -> Places:
		"""Tell the other ranks what is sent to their experts, and hear it of them."""
		tokens, each = p.shape[0], self.capacity
		local = self.num_experts // self.ranks
		ends, last = routing.offs[local - 1 :: local].contiguous(), self.ranks - 1
		starts, row = pad(ends[:-1], (1, 0)), routing.row
		owner = torch.searchsorted(ends, row.clamp_min(0), right=True).clamp_max(last)
		if each is not None:
			within = row - starts[owner]
			row = torch.where((row >= 0) & (within < each[0]), owner * each[0] + within, -1).int()
		# Of each token and rank the rank, if the token goes there. The column behind them is for none.
		ranks = row.new_full((tokens, self.ranks + 1), -1)
		ranks.scatter_(1, torch.where(row >= 0, owner, self.ranks), owner.int())
		once = compute_routing(ranks[:, :-1].contiguous(), self.ranks)
		once_starts = pad(once.offs[:-1], (1, 0))
		if each is None:
			sizes = torch.stack([ends - starts, once.offs - once_starts], dim=1)
			arriving = self._all_to_all(sizes, None, "routing")
			pairs, unique = (Splits(*both) for both in torch.stack([sizes, arriving]).permute(2, 0, 1).tolist())
			of_rank = [arriving[:, 0].cumsum(0), pad(arriving[:-1, 1].cumsum(0), (1, 0))]
			rows, once_rows = (torch.arange(sum(s.send), device=p.device) for s in (pairs, unique))
		else:
			pairs, unique = (Splits([n] * self.ranks, [n] * self.ranks) for n in each)
			rank = torch.arange(self.ranks, device=p.device)
			of_rank = [(rank + 1) * each[0], rank * each[1]]
			rows, once_rows = _slots(starts, ends, each[0], p.numel()), _slots(once_starts, once.offs, each[1], ranks.numel())
			row = torch.where(once.row.gather(1, owner) - once_starts[owner] < each[1], row, -1)
			lost = (routing.row >= 0).sum() - (row >= 0).sum()
			if self.dropped is None:
				self.dropped = torch.zeros_like(lost)
			self.dropped.add_(lost)  # In place, for CUDA graphs.
		sender = torch.searchsorted(ends, rows, right=True).clamp_max(last)
		token = pad(routing.token, (0, 1), value=tokens)[rows.clamp_max(p.numel())]
		expert = torch.searchsorted(routing.offs, rows, right=True, out_int32=True) % local
		weight = pad(p.detach().flatten(), (0, 1))[pad(routing.pair, (0, 1), value=p.numel())[rows]]
		place = pad(once.row, (0, 0, 0, 1))[token, sender] - once_starts[sender]
		there = (rows < p.numel()) & (place < (tokens if each is None else each[1]))
		said = torch.stack([torch.where(there, expert, -1), weight.view(torch.int32), place], dim=1).int()
		expert, weight, place = self._all_to_all(said, pairs, "routing").T.contiguous()
		source = torch.searchsorted(of_rank[0], torch.arange(len(expert), device=p.device), right=True).clamp_max(last)
		arrived = torch.where(expert >= 0, of_rank[1][source] + place, -1).int()
		sent = pad(once.token, (0, 1), value=-1)[once_rows.clamp_max(len(once.token))]
		return Places(row, pairs, sent, unique, arrived, expert, weight.view(torch.float32).unsqueeze(1))

	def move(self, x: Tensor, places: Places, what: str, wire: Format | None) -> Tensor:
		"""(N, H) rows of the tokens x (T, H) of all ranks, for the pairs that came to this one."""
		# Quantized before they are gathered: each token once.
		flat = x if wire is None else pack(x, wire).view(torch.float32)
		flat = self._all_to_all(ops.moe_gather(flat, places.token), places.tokens, what)
		if wire is not None:
			flat = unpack(flat.view(torch.int32), x.shape[1], wire, x.dtype)
		rows: Tensor = ops.moe_gather(flat, places.arrived)
		return rows

	def _all_to_all(self, x: Tensor, splits: Splits | None, what: str) -> Tensor:
		splits = splits or Splits([1] * self.ranks, [1] * self.ranks)
		width = math.prod(x.shape[1:])
		flat = x.contiguous().view(len(x), width).view(torch.uint8)
		if not torch.compiler.is_compiling():
			self.sent[what] += (len(x) - splits.send[self.rank]) * width * x.itemsize
		try:
			out: Tensor = _collectives.all_to_all_single(flat, splits.receive, splits.send, self.group)
			out = _collectives.wait_tensor(out)
		except RuntimeError as error:
			raise RuntimeError(
				f"the exchange of rows between the {self.ranks} ranks of group {self.group!r} failed on rank {self.rank}: one "
				f"of them is gone, or did not come before the group's timeout ({error})"
			) from error
		return out.view(x.dtype).view(-1, *x.shape[1:])


def _slots(starts: Tensor, ends: Tensor, each: int, free: int) -> Tensor:
	"""Rows [start, end) of each rank in a buffer of ``each`` for it; ``free`` where there is none."""
	rows = starts.unsqueeze(1) + torch.arange(each, device=starts.device)
	return torch.where(rows < ends.unsqueeze(1), rows, free).flatten()


class _Dispatch(torch.autograd.Function):
	"""Tokens to the ranks of their experts; gradients come back and are added up there."""

	@staticmethod
	def forward(ctx: Any, x: Tensor, p: Tensor, places: Places, exchange: Exchange) -> tuple[Tensor, Tensor]:  # type: ignore[override]
		ctx.save_for_backward(places.row)
		ctx.back, ctx.exchange, ctx.dtype = places.pairs.back, exchange, x.dtype
		return exchange.move(x, places, "dispatch", exchange.wire), places.weight.clone()

	@staticmethod
	def backward(ctx: Any, dx: Tensor, dp: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
		(row,) = ctx.saved_tensors
		exchange = ctx.exchange
		dx = exchange._all_to_all(dx, ctx.back, "dispatch_gradient")
		dp = pad(exchange._all_to_all(dp, ctx.back, "routing").flatten(), (0, 1))
		return ops.moe_combine(dx, row, None, ctx.dtype), dp[row.long()], None, None


class _Combine(torch.autograd.Function):
	"""Results back to their tokens. The gradient that experts get is that of y, as ``Style.apart`` has it."""

	@staticmethod
	def forward(ctx: Any, h: Tensor, p: Tensor, places: Places, dtype: torch.dtype, exchange: Exchange) -> Tensor:  # type: ignore[override]
		ctx.save_for_backward(*(t for t in places if isinstance(t, Tensor)))
		ctx.splits, ctx.exchange, ctx.dtype = (places.pairs, places.tokens), exchange, h.dtype
		h = exchange._all_to_all(h, places.pairs.back, "combine")
		y: Tensor = ops.moe_combine(h, places.row, p, dtype)
		return y

	@staticmethod
	def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
		(row, token, *rest), (pairs, tokens), exchange = ctx.saved_tensors, ctx.splits, ctx.exchange
		places = Places(row, pairs, token, tokens, *rest)
		return exchange.move(dy.to(ctx.dtype), places, "combine_gradient", exchange.gradient_wire), None, None, None, None


class _Style(ParallelStyle):  # type: ignore[misc]
	"""What both styles share: on which modules, and how their parameters are sharded."""

	def __init__(self, mesh: DeviceMesh | None = None) -> None:
		super().__init__()
		self.mesh = mesh

	def __call__(self, module: nn.Module) -> nn.Module:
		"""Spread the experts of ``module`` over the mesh of this style; returns ``module``."""
		if self.mesh is None:
			raise ValueError("mesh is missing: give it to the style, or call parallelize_module(module, mesh, style)")
		return self._apply(module, self.mesh)

	def _checked(self, module: nn.Module, mesh: DeviceMesh) -> tuple[MoE, GroupedLinear, GroupedLinear]:
		if not isinstance(module, MoE):
			raise TypeError(f"{type(self).__name__} is for grouped.nn.MoE, got {type(module).__name__}")
		if mesh.ndim != 1:
			raise ValueError(f"mesh must have one dimension, such as mesh['ep'], got {mesh}")
		if module.exchange is not None:
			raise ValueError("the experts are spread over processes already")
		layers = module.experts.gate_up, module.experts.down
		for layer in layers:
			if not layer.single_parameter:
				raise ValueError("experts that are spread over processes have one parameter: single_parameter=True")
			if layer.recipe.takes_scales:
				raise ValueError(f"{layer.recipe} keeps scales of all experts on each rank: use FP8Current, or FP8Block")
		return module, *layers

	def _shard(self, layer: GroupedLinear, mesh: DeviceMesh, placement: Placement) -> None:
		for name, p in list(layer.named_parameters(recurse=False)):
			part = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=getattr(self, "src_data_rank", 0))
			layer.register_parameter(name, nn.Parameter(part, p.requires_grad))


class ExpertParallel(_Style):
	"""Each rank has E / R experts of a ``grouped.nn.MoE``, and sends tokens to those of the others.

	``parallelize_module(moe, mesh["ep"], ExpertParallel())`` makes the experts' parameters DTensors,
	``Shard(0)``; the router stays whole on each rank, which has tokens of its own: sum its gradients
	over the mesh as those of any module of data parallelism.

	The bits of outputs and gradients are those of one process with all tokens, rank after rank
	(``docs/moe.md``), whatever R is; of the second layer's bias fp32 sums have another order. With a
	``wire`` they are those of a process whose experts read ``dequantize(quantize(x, wire))``.

	Args:
	  mesh: of one dimension; or that of ``parallelize_module``.
	  wire: the format in which tokens travel: FP8Block, MXFP8, or row-scaled NVFP4, whose codes and
	    scales are sent instead of the tokens' dtype; None for that.
	  gradient_wire: likewise, of the gradients of outputs. Outputs and gradients of tokens travel
	    in the dtype of the computation.
	  capacity: pairs of a token and an expert that each rank sends to each other, and, as a second
	    number, tokens; as many by default. Shapes are static then and nothing is read on the host,
	    for CUDA graphs and ``torch.compile(fullgraph=True)``; pairs beyond it are left out and counted
	    in ``moe.exchange.dropped``. (T * min(k, E / R), T) drops none. None: as many as there are,
	    whose numbers the host reads once a call.

	``moe.exchange`` is an ``Exchange``: ``sent`` counts the bytes on the wire.

	Raises:
	  TypeError: not an MoE, or a wire that is no format.
	  ValueError: ranks that do not divide E, a recipe of delayed scaling, a mesh of several
	    dimensions, a wire whose rows share scales, or a capacity that is not positive.
	"""

	def __init__(
		self,
		mesh: DeviceMesh | None = None,
		*,
		wire: Format | None = None,
		gradient_wire: Format | None = None,
		capacity: int | tuple[int, int] | None = None,
	) -> None:
		super().__init__(mesh)
		check_wire("wire", wire)
		check_wire("gradient_wire", gradient_wire)
		if isinstance(capacity, int):
			capacity = capacity, capacity
		if capacity is not None and min(capacity) < 1:
			raise ValueError(f"capacity must be positive, got {capacity}")
		self.options = (wire, gradient_wire, capacity)

	def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
		moe, *layers = self._checked(module, device_mesh)
		if moe.num_experts % device_mesh.size():
			raise ValueError(f"num_experts, {moe.num_experts}, must be a multiple of the mesh's {device_mesh.size()} ranks")
		for fmt in self.options[:2]:
			if fmt is not None and moe.hidden_size % fmt.k_multiple:
				raise ValueError(f"hidden_size must be a multiple of {fmt.k_multiple} for {fmt}, got {moe.hidden_size}")
		for layer in layers:
			self._shard(layer, device_mesh, Shard(0))
		moe.exchange = Exchange(device_mesh.get_group(), moe.num_experts, *self.options)
		return moe


class ExpertTensorParallel(_Style):
	"""Each rank has I / R of the inner dimension of all experts of a ``grouped.nn.MoE``.

	All ranks get the same tokens. ``gate_up.weight`` is sharded along its rows (of each half where
	gate and up are not interleaved), ``down.weight`` along its columns. Each rank rounds its part of
	an expert's output to the dtype of the computation, as the product gives it, and weights and adds
	those of a token in fp32; the ranks' sums are added in fp32 and rounded once. Gradients of tokens
	are rounded on each rank, added in fp32 and rounded.

	Raises:
	  TypeError: not an MoE.
	  ValueError: ranks that do not divide I into multiples of what the recipe asks for, biases, or
	    what ``ExpertParallel`` refuses.
	"""

	def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
		moe, first, second = self._checked(module, device_mesh)
		ranks, multiple = device_mesh.size(), first.recipe.multiple
		if second.in_features % (ranks * multiple):
			raise ValueError(
				f"intermediate_size, {second.in_features}, must be a multiple of {multiple} on each of the mesh's {ranks} ranks"
			)
		if first.has_bias:
			raise ValueError("experts with biases have no tensor parallelism: each rank would add the second one")
		halves = first.out_features // second.in_features
		rows = Shard(1) if halves == 1 or moe.experts.interleaved else _StridedShard(1, split_factor=halves)
		self._shard(first, device_mesh, rows)
		self._shard(second, device_mesh, Shard(2))
		moe.exchange = _PartialSums(device_mesh.get_group().group_name)
		return moe


class _PartialSums:
	"""Adds up what the ranks make of the same tokens."""

	def __init__(self, group: str) -> None:
		self.group = group

	def __call__(self, x: Tensor, p: Tensor, routing: Routing, first: Layer, second: Layer, style: Style) -> Tensor:
		x, p = _Copied.apply(x, self.group), _Copied.apply(p, self.group)  # type: ignore[no-untyped-call]
		y = experts(x, p, routing, first, second, style._replace(dtype=torch.float32))
		summed: Tensor = _Summed.apply(y, self.group)  # type: ignore[no-untyped-call]
		return summed.to(style.dtype)


def _sum(x: Tensor, group: str) -> Tensor:
	out: Tensor = _collectives.wait_tensor(_collectives.all_reduce(x.float().contiguous(), "sum", group))
	return out.to(x.dtype)


class _Copied(torch.autograd.Function):
	@staticmethod
	def forward(ctx: Any, x: Tensor, group: str) -> Tensor:  # type: ignore[override]
		ctx.group = group
		return x.view_as(x)

	@staticmethod
	def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
		return _sum(dx, ctx.group), None


class _Summed(torch.autograd.Function):
	@staticmethod
	def forward(ctx: Any, x: Tensor, group: str) -> Tensor:  # type: ignore[override]
		return _sum(x, group)

	@staticmethod
	def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
		return dx, None
