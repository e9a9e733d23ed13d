"""Parallel styles for experts: ``ExpertParallel`` and ``ExpertTensorParallel``.

Both are styles for ``torch.distributed.tensor.parallel.parallelize_module``.
``docs/guide/distributed.md`` is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cute_kernels.records import check_kind

from ..functional.experts import ExpertsOptions, Layer, Routing, experts
from ..functional.rank_sums import Sum, SummedGradient
from ..nn import GroupedMLP, MoE
from ..tensor.dtensor_parts import local_part
from ..tensor.grouped_tensor import GroupedTensor
from .capacity import parse_capacity
from .exchange import Exchange
from .wire_format import check_wire

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cute_kernels.formats import Format


class _ExpertStyle(ParallelStyle):
    """Base of both styles: checks modules and shards their parameters."""

    def __init__(self, mesh: DeviceMesh | None = None, *, replicate: bool = True) -> None:
        super().__init__()
        check_kind(bool, replicate=replicate)
        self.mesh, self.replicate = mesh, replicate

    def __call__(self, module: nn.Module) -> nn.Module:
        """Distribute the experts of ``module`` over this style's mesh and return ``module``."""
        if self.mesh is None:
            raise ValueError(
                "mesh is missing: pass it to the style, or call "
                "parallelize_module(module, mesh, style)"
            )
        return self._apply(module, self.mesh)

    def _check_module(self, module: nn.Module, mesh: DeviceMesh) -> GroupedMLP:
        """Return the experts of a module that this style can distribute."""
        mlp: Any = module.experts if isinstance(module, MoE) else module
        if not isinstance(mlp, GroupedMLP):
            raise TypeError(
                f"{type(self).__name__} is for grouped.nn.MoE and GroupedMLP, got "
                f"{type(module).__name__}: torchtitan and transformers distribute their own experts"
            )
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, such as mesh['ep'], got {mesh}")
        if mlp.exchange is not None:
            raise ValueError("the experts are already distributed over processes")
        for layer in (mlp.gate_up, mlp.down):
            if not layer.single_parameter:
                raise ValueError(
                    "distributed experts need one parameter per layer: single_parameter=True"
                )
            if layer.recipe.takes_scales:
                raise ValueError(
                    f"{layer.recipe} has the scales of all experts on each rank: "
                    "use FP8Current or FP8Block"
                )
        return mlp

    def _shard(self, layer: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
        """Replace the parameters of a layer by DTensors."""
        source_rank = getattr(self, "src_data_rank", 0)
        for name, p in list(layer.named_parameters(recurse=False)):
            distributed = distribute_tensor(
                p.detach(), mesh, [placement], src_data_rank=source_rank
            )
            setattr(layer, name, nn.Parameter(distributed, p.requires_grad))

    def _replicate(self, moe: MoE, mesh: DeviceMesh, group: str | None) -> None:
        """Replace the parameters of router and shared expert by replicated DTensors.

        Args:
            moe: The layer.
            mesh: The mesh of the style.
            group: Name of the group of ranks that have different tokens, or None if all ranks have
                the same tokens.
        """
        moe.router.token_group = group
        if not self.replicate:
            return
        layers = [] if moe.shared is None else [moe.shared.gate_up, moe.shared.down]
        for layer in layers:
            layer.token_group = group
        for module in (moe.router, *layers):
            self._shard(module, mesh, Replicate())


class ExpertParallel(_ExpertStyle):
    """Gives each of R ranks E / R experts of a module, and sends tokens between ranks.

    The module is a ``grouped.nn.MoE``, or a ``GroupedMLP``. A ``GroupedMLP`` then takes the rows of
    this rank, with ``offs`` of all experts. Weights may be quantized.

    ``parallelize_module(moe, mesh["ep"], ExpertParallel())`` makes all parameters DTensors: those
    of the experts with ``Shard(0)``, those of the router and the shared expert with
    ``Replicate()``, with the values of the mesh's first rank. When ``backward()`` returns, all
    gradients are summed over the mesh, not averaged: they are those of the sum of the ranks'
    losses. Divide a mean over a rank's tokens by R. ``torch.nn.utils.clip_grad_norm_`` and
    ``foreach`` optimizers take all parameters together. If other modules have plain parameters,
    use ``grouped.parallel.clip_grad_norm_``.

    Outputs and gradients have the bits of one process with all tokens, rank after rank
    (``docs/guide/moe.md``), for any R. There are two exceptions. The fp32 sums of the gradients of
    the second layer's bias, the router and the shared expert have another order. A shared expert
    under recipes with one scale for all tokens (NVFP4, FP8Current, and the gradients of
    NVFP4RowScaled) quantizes the tokens of each rank by their own amax. With a ``wire``, the bits
    are those of a process whose experts read ``dequantize(quantize(x, wire))``.

    Args:
        mesh: A mesh of one dimension; None takes that of ``parallelize_module``.
        wire: Format in which tokens travel: FP8Block, MXFP8, or row-scaled NVFP4. Codes and scales
            are sent instead of values. None sends the dtype of the tokens.
        gradient_wire: Format in which the gradients of outputs travel. Outputs, and gradients of
            tokens, travel in the dtype of the computation.
        capacity: (pairs, tokens), the largest numbers that one rank sends to each single rank in a
            call, including itself: pairs of a token and an expert, and tokens. They are neither
            per expert nor sums over the ranks. One number stands for both. ``expert_capacity``
            computes them: for 4096 tokens per rank, top 8 of 256 experts and 2 ranks, even routing
            sends 4096 * 8 / 2 = 16384 pairs, or 20480 with a quarter to spare, and 4096 tokens.
            Buffers and work grow with the capacity: a rank computes R * pairs rows. Shapes are
            static and nothing is read on the host, as CUDA graphs and
            ``torch.compile(fullgraph=True)`` require. Pairs beyond the capacity are left out and
            counted in ``moe.exchange.dropped``; (T * min(k, E / R), T) drops none. None sends as
            many as there are, and the host reads the counts once per call.
        overlap: Compute the shared expert of a ``MoE`` while outputs of the other experts travel.
            The bits are the same.
        replicate: Make the parameters of router and shared expert DTensors. False leaves them
            plain, for ``fully_shard`` along a mesh that contains these ranks. Their gradients
            must then be summed like those of any module under data parallelism.

    ``moe.exchange`` is an ``Exchange``, whose ``sent`` counts the bytes on the wire.

    Raises:
        TypeError: The module is not a MoE or GroupedMLP, a wire is not a format, or a capacity is
            not an int.
        ValueError: The ranks do not divide E, the recipe uses delayed scaling, the mesh has several
            dimensions, rows of a wire share scales, or a capacity is not one or two positive
            numbers.
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
        self.options = (wire, gradient_wire, parse_capacity(capacity), overlap)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute the experts over ``device_mesh``; ``parallelize_module`` calls this."""
        mlp = self._check_module(module, device_mesh)
        num_experts, hidden = mlp.gate_up.num_groups, mlp.gate_up.in_features
        if num_experts % device_mesh.size():
            raise ValueError(
                f"num_experts must be a multiple of the mesh's {device_mesh.size()} ranks, "
                f"got {num_experts}"
            )
        for fmt in self.options[:2]:
            if fmt is not None and hidden % fmt.k_multiple:
                raise ValueError(
                    f"hidden_size must be a multiple of {fmt.k_multiple} for {fmt}, got {hidden}"
                )
        for layer in (mlp.gate_up, mlp.down):
            self._shard(layer, device_mesh, Shard(0))
        group = device_mesh.get_group()
        mlp.exchange = Exchange(group, num_experts, *self.options)
        if isinstance(module, MoE):
            self._replicate(module, device_mesh, group.group_name)
        return module


class ExpertTensorParallel(_ExpertStyle):
    """Gives each of R ranks I / R of the inner dimension of all experts.

    The module is a ``grouped.nn.MoE`` or a ``GroupedMLP``, and all ranks get the same tokens.
    ``gate_up.weight`` is sharded along its rows (along those of each half if gate and up are not
    interleaved), ``down.weight`` along its columns. Each rank rounds its part of an expert's output
    to the dtype of the computation, then weights and adds the parts of a token in fp32. The sums of
    the ranks are added in fp32 and rounded once. Gradients of tokens are rounded on each rank,
    added in fp32 and rounded again.

    Args:
        mesh: A mesh of one dimension; None takes that of ``parallelize_module``.
        replicate: As in ``ExpertParallel``.

    Raises:
        TypeError: The module is not a MoE or GroupedMLP.
        ValueError: The ranks do not divide I into multiples that the recipe allows, the experts
            have biases or quantized weights, or ``ExpertParallel`` would raise.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute the experts over ``device_mesh``; ``parallelize_module`` calls this."""
        mlp = self._check_module(module, device_mesh)
        gate_up, down = mlp.gate_up, mlp.down
        ranks, multiple = device_mesh.size(), gate_up.recipe.multiple
        if down.in_features % (ranks * multiple):
            raise ValueError(
                f"intermediate_size must be a multiple of {multiple} on each of the mesh's {ranks} "
                f"ranks, got {down.in_features}"
            )
        if gate_up.has_bias:
            raise ValueError(
                "experts with biases have no tensor parallelism: each rank would add the bias of "
                "the second layer"
            )
        if any(isinstance(local_part(layer.weight), GroupedTensor) for layer in (gate_up, down)):
            raise ValueError(
                "quantized experts have no tensor parallelism: use ExpertParallel, which shards "
                "them between groups"
            )
        halves = gate_up.out_features // down.in_features
        rows = Shard(1) if halves == 1 or mlp.interleaved else _StridedShard(1, split_factor=halves)
        self._shard(gate_up, device_mesh, rows)
        self._shard(down, device_mesh, Shard(2))
        mlp.exchange = _PartialSums(device_mesh.get_group().group_name)
        if isinstance(module, MoE):
            self._replicate(module, device_mesh, None)
        return module


class _PartialSums:
    """Adds the partial sums of the ranks for the same tokens."""

    def __init__(self, group: str) -> None:
        self.group = group

    def __call__(
        self,
        x: Tensor,
        p: Tensor,
        routing: Routing,
        gate_up_layer: Layer,
        down_layer: Layer,
        options: ExpertsOptions,
        overlapped_work: object = None,
    ) -> Tensor:
        """Compute the experts, and return (T, H), the sum over the ranks."""
        x, p = SummedGradient.apply(x, self.group), SummedGradient.apply(p, self.group)
        y = experts(x, p, routing, gate_up_layer, down_layer, options._replace(dtype=torch.float32))
        summed: Tensor = Sum.apply(y, self.group)
        return summed.to(options.dtype)
