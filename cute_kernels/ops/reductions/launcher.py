"""Runners of ``compute_offsets``, ``grouped_amax`` and ``grouped_dbias`` on CuTe DSL kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.quantize.choose import choose_dbias_config
from ...kernels.quantize.pass_config import AmaxConfig, OffsetsConfig
from ...runtime.launch import Launcher
from ..arguments import dense, dtype_name, readable
from ..op import launched_by
from ..plan import Runner
from ..quantize.launcher import (
    quantize_problem,
    write_zeros,
)
from .op import ComputeOffsets, GroupedAmax, GroupedDbias


@launched_by(ComputeOffsets)
def compute_offsets(op: ComputeOffsets, launch: Launcher) -> Runner:
    """Return the runner of ``compute_offsets``."""
    if not op.splits.numel():
        return lambda op, outputs: None
    kernel = launch.kernel(
        OffsetsConfig(dtype_name(op.splits.dtype), dtype_name(op.dtype or torch.int32))
    )

    def run(op: ComputeOffsets, outputs: Sequence[Tensor]) -> None:
        kernel(dense(op.splits), outputs[0], op.multiplier)

    return run


@launched_by(GroupedAmax)
def grouped_amax(op: GroupedAmax, launch: Launcher) -> Runner:
    """Return the runner of ``grouped_amax``."""
    if not op.x.numel():
        return write_zeros
    problem = quantize_problem(op.x, op.offs)
    kernel = launch.kernel(AmaxConfig(problem.dtype, problem.grouping, arch=launch.arch))

    def run(op: GroupedAmax, outputs: Sequence[Tensor]) -> None:
        kernel(readable(op.x), dense(op.offs), None, outputs[0], launch.num_sms)

    return run


@launched_by(GroupedDbias)
def grouped_dbias(op: GroupedDbias, launch: Launcher) -> Runner:
    """Return the runner of ``grouped_dbias``."""
    if not op.dy.numel():
        return write_zeros
    kernel = launch.kernel(choose_dbias_config(dtype_name(op.dy.dtype), op.dy.shape[-1]))

    def run(op: GroupedDbias, outputs: Sequence[Tensor]) -> None:
        kernel(readable(op.dy), dense(op.offs), outputs[0], launch.num_sms)

    def run_uniform(op: GroupedDbias, outputs: Sequence[Tensor]) -> None:
        """Sum uniform groups, which are ragged groups of equal size."""
        flat, rows = readable(op.dy).flatten(0, 1), op.dy.shape[1]
        count = op.dy.shape[0] * rows
        offs = torch.arange(rows, count + 1, rows, dtype=torch.int32, device=op.device)
        kernel(flat, offs, outputs[0], launch.num_sms)

    return run_uniform if op.offs is None else run
