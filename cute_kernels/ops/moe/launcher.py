"""Runners of the ops of mixtures of experts on CuTe DSL kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.moe.choose import choose_routing_config
from ...kernels.moe.config import (
    ActivateConfig,
    CombineConfig,
    RouterConfig,
    RouterGradientConfig,
)
from ...kernels.quantize.config import GradientConfig
from ...layout.buffers import BufferSpec
from ...layout.shapes import ceil_div
from ...layout.slots import TILE_ROWS
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..arguments import dense, dtype_name, readable
from ..gather_rows import gatherer
from ..op import launched_by
from ..plan import Runner
from ..quantize.launcher import BUFFERS
from .op import (
    ComputeRouting,
    MoeActivate,
    MoeActivateGradient,
    MoeCombine,
    MoeGather,
    MoeQuantizeGradient,
)
from .router_op import MoeRoute, MoeRouteGradient

#: Largest number of experts of the router kernels: 32 scores per lane.
MOST_EXPERTS = 1024


@launched_by(ComputeRouting)
def compute_routing(op: ComputeRouting, launch: Launcher) -> Runner:
    """Return the runner of ``compute_routing``."""
    if not op.expert_ids.numel():
        return lambda op, outputs: outputs[0].zero_()
    config = choose_routing_config(
        dtype_name(op.expert_ids.dtype), op.expert_ids.numel(), mapped=op.expert_map is not None
    )
    kernel, top_k = launch.kernel(config), op.expert_ids.shape[1]

    def run(op: ComputeRouting, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        offs, token, pair, row = outputs
        ids, expert_map = op.expert_ids.contiguous().view(-1), dense(op.expert_map)
        kernel(ids, expert_map, offs, token, pair, row.view(-1), top_k)

    return run


def _per_lane(experts: int) -> int:
    """Return the number of scores per lane, a power of two."""
    return 1 << max(0, (experts - 1) // 32).bit_length()


@launched_by(MoeRoute)
def route(op: MoeRoute, launch: Launcher) -> Runner:
    """Return the runner of ``moe_route``."""
    (tokens, experts), groups = op.logits.shape, op.expert_groups
    if not tokens or experts > MOST_EXPERTS or groups > 32:
        # The reference backend has the same bits.
        return lambda op, outputs: op.run_reference(outputs)
    config = RouterConfig(
        op.score,
        op.renormalize,
        _per_lane(experts),
        biased=op.selection_bias is not None,
        grouped=groups > 1,
        has_end=op.end is not None,
    )
    kernel = launch.kernel(config)

    def run(op: MoeRoute, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        inputs = (readable(op.logits), dense(op.selection_bias), dense(op.end))
        kernel(*inputs, *outputs, groups, op.top_groups, op.factor, launch.num_sms)

    return run


@launched_by(MoeRouteGradient)
def route_gradient(op: MoeRouteGradient, launch: Launcher) -> Runner:
    """Return the runner of ``moe_route_gradient``."""
    tokens, experts = op.scores.shape
    if not tokens or experts > MOST_EXPERTS:
        return lambda op, outputs: op.run_reference(outputs)
    config = RouterGradientConfig(
        op.score,
        op.renormalize,
        _per_lane(experts),
        biased=op.dscores is not None,
        split_bf16=op.in_parts,
    )
    kernel = launch.kernel(config)

    def run(op: MoeRouteGradient, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        inputs = [dense(t) for t in (op.dweights, op.dscores, op.ids, op.scores)]
        kernel(*inputs, outputs[0], op.factor, launch.num_sms)

    return run


@launched_by(MoeGather)
def gather(op: MoeGather, launch: Launcher) -> Runner:
    """Return the runner of ``moe_gather``."""
    if not op.index.numel() or not op.x.shape[1]:
        return lambda op, outputs: None
    if not op.x.numel():
        return lambda op, outputs: outputs[0].zero_()
    run = gatherer(op.x, launch, op.row)
    return lambda op, outputs: run(op.x, op.index, op.row, outputs[0])


@launched_by(MoeCombine)
def combine(op: MoeCombine, launch: Launcher) -> Runner:
    """Return the runner of ``moe_combine``."""
    if not op.row.shape[0] or not op.h.shape[1]:
        return lambda op, outputs: None
    if not op.h.numel() or not op.row.numel():
        return lambda op, outputs: outputs[0].zero_()
    dtype, out = op.h.dtype, op.out_dtype or op.h.dtype
    vectorized = all(op.h.shape[1] * t.itemsize % 16 == 0 for t in (dtype, out))
    kernel = launch.kernel(
        CombineConfig(dtype_name(dtype), dtype_name(out), op.weight is not None, vectorized)
    )

    def run(op: MoeCombine, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        kernel(readable(op.h), dense(op.row), dense(op.weight), outputs[0], launch.num_sms)

    return run


def _activate_config(
    op: MoeActivate | MoeActivateGradient, launch: Launcher, columns: int, **options: bool
) -> ActivateConfig:
    """Return the configuration of the activation kernel."""
    return ActivateConfig(
        op.activation,
        launch.arch,
        dtype_name(op.x.dtype),
        interleaved=op.interleaved,
        ragged=op.offs is not None,
        vectorized=columns % 8 == 0,
        **options,
    )


@launched_by(MoeActivate)
def activate(op: MoeActivate, launch: Launcher) -> Runner:
    """Return the runner of ``moe_activate``."""
    if not op.x.numel():
        return lambda op, outputs: None
    kernel = launch.kernel(_activate_config(op, launch, op.outputs()[0].shape[1]))

    def run(op: MoeActivate, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        kernel(
            readable(op.x), None, dense(op.offs), None, None, outputs[0], None, None, launch.num_sms
        )

    return run


@launched_by(MoeActivateGradient)
def activate_gradient(op: MoeActivateGradient, launch: Launcher) -> Runner:
    """Return the runner of ``moe_activate_gradient``."""
    if not op.x.numel():
        return lambda op, outputs: None
    weighted = op.weight is not None
    kernel = launch.kernel(
        _activate_config(op, launch, op.grad.shape[1], gradient=True, weighted=weighted)
    )

    def run(op: MoeActivateGradient, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        rows = readable(op.x), readable(op.grad), dense(op.offs)
        if op.weight is None:
            kernel(*rows, None, None, outputs[0], None, None, launch.num_sms)
            return
        out, scaled, dweight = outputs
        kernel(
            *rows,
            op.weight.contiguous().view(-1),
            dense(op.pair),
            out,
            scaled,
            dweight.view(-1),
            launch.num_sms,
        )

    return run


@launched_by(MoeQuantizeGradient)
def quantize_gradient(op: MoeQuantizeGradient, launch: Launcher) -> Runner:
    """Return the runner of ``moe_quantize_gradient``."""
    cols = op.grad.shape[1]
    config = GradientConfig(
        op.format, op.scaled_format, dtype_name(op.x.dtype), op.activation, launch.arch
    )
    if not op.x.numel() or op.interleaved or not config.can_implement(cols):
        return _run_passes(op, launch)
    kernel = launch.kernel(config)
    names = [
        (i, name)
        for i, quantization in enumerate(op.passes(op.x, op.grad)[1:])
        for name in quantization.specs()
    ]
    argument_names = [(i, name) for i in range(2) for name in (*BUFFERS, "amax")]
    workspace = Allocator(
        [BufferSpec((ceil_div(cols, TILE_ROWS), op.grad.shape[0]), torch.float32)], op.device
    )

    def run(op: MoeQuantizeGradient, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        inputs = (
            readable(op.x),
            readable(op.grad),
            dense(op.offs),
            op.weight.contiguous().view(-1),
            dense(op.pair),
        )
        out, scales = (
            dict(zip(names, outputs[:-1], strict=True)),
            (dense(op.scale), dense(op.scaled_scale)),
        )
        kernel(
            *inputs,
            *scales,
            *map(out.get, argument_names),
            *workspace.make(),
            outputs[-1].view(-1),
            launch.num_sms,
            None,
        )

    return run


def _run_passes(op: MoeQuantizeGradient, launch: Launcher) -> Runner:
    """Return the runner of ``moe_quantize_gradient`` that runs its passes one after the other."""
    workspace = Allocator(op.passes(op.x, op.grad)[0].outputs()[:2], op.device)
    runners = [step.build_runner(launch) for step in op.passes(*workspace.make())]

    def run(op: MoeQuantizeGradient, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        intermediate = workspace.make()
        for step, targets, runner in zip(
            op.passes(*intermediate), op.outputs_of(outputs, *intermediate), runners, strict=True
        ):
            runner(step, targets)

    return run
