"""The quantization ops on CuTe DSL kernels: the choice of kernels, and buffers as their arguments.

Each function takes an op for its metadata alone and returns what runs every call like it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.layout.shapes import PITCH_ALIGNMENT, code_pitch
from cute_kernels.ops.arguments import ALIGNMENT, dense, dtype_name, readable
from cute_kernels.quantize.config import (
    AmaxConfig,
    DbiasConfig,
    DequantizeConfig,
    OffsetsConfig,
    QuantizeProblem,
    RowScaledConfig,
    TileConfig,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.ops.quantize import (
        ComputeOffsets,
        GroupedAmax,
        GroupedDbias,
        GroupedDequantizeNVFP4,
        GroupedQuantizeNVFP4,
    )
    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.launch import Launcher

__all__ = [
    "compute_offsets",
    "dequantize_nvfp4",
    "grouped_amax",
    "grouped_dbias",
    "quantize_nvfp4",
]


def _problem(x: Tensor, offs: Tensor | None) -> QuantizeProblem:
    return QuantizeProblem(
        dtype_name(x.dtype), x.shape[-1], "uniform" if offs is None else "ragged"
    )


def _zero(op: object, outputs: Sequence[Tensor | None]) -> None:
    """All groups are empty: their amaxes are 0, and there is nothing else to write."""
    for out in outputs:
        if out is not None and out.dtype == torch.float32:
            out.zero_()


def _no_elements(op: GroupedQuantizeNVFP4, outputs: Sequence[Tensor | None]) -> None:
    """All groups are empty: their amaxes are 0, or as given, and there is nothing else to write."""
    if op.amax is None:
        return _zero(op, outputs)
    _, _, amax, _, _, amax_t = outputs
    if not op.row_scaled:
        _give(op.amax, amax)
    _give(op.amax, amax_t)


def _give(given: Tensor, amax: Tensor | None) -> None:
    """Write the amaxes of groups that the caller gave: magnitudes, whatever their sign."""
    if amax is not None:
        torch.abs(given, out=amax)


def compute_offsets(op: ComputeOffsets, launch: Launcher) -> Runner:
    """How ``compute_offsets`` runs."""
    if not op.splits.numel():
        return lambda op, outputs: None
    out_dtype = op.dtype or torch.int32
    kernel = launch.kernel(OffsetsConfig(dtype_name(op.splits.dtype), dtype_name(out_dtype)))

    def run(op: ComputeOffsets, outputs: Sequence[Tensor | None]) -> None:
        kernel(dense(op.splits), outputs[0], op.multiplier)

    return run


def grouped_amax(op: GroupedAmax, launch: Launcher) -> Runner:
    """How ``grouped_amax`` runs."""
    if not op.x.numel():
        return _zero
    problem = _problem(op.x, op.offs)
    kernel = launch.kernel(AmaxConfig(problem.dtype, problem.grouping, arch=launch.arch))

    def run(op: GroupedAmax, outputs: Sequence[Tensor | None]) -> None:
        kernel(readable(op.x), dense(op.offs), None, outputs[0], launch.num_sms)

    return run


def quantize_nvfp4(op: GroupedQuantizeNVFP4, launch: Launcher) -> Runner:
    """How ``grouped_quantize_nvfp4`` runs."""
    if not op.x.numel():
        return _no_elements
    problem = _problem(op.x, op.offs)
    if op.row_scaled and op.rowwise and not op.columnwise:
        rows = RowScaledConfig.choose(problem, launch.arch)
        if rows.can_implement(problem):
            return _rows(rows, launch, given=False)
    if launch.arch == "sm_90a" and op.rowwise and not (op.columnwise or op.block_2d):
        # Faster there than tile by tile: 94 instead of 83 % of a copy's rate on an H200.
        rows = RowScaledConfig.choose(problem, launch.arch, group_amax=True)
        if rows.can_implement(problem):
            return _rows(rows, launch, given=op.amax is not None)
    return _tiles(op, problem, launch)


def _rows(config: RowScaledConfig, launch: Launcher, given: bool) -> Runner:
    """Rows to codes in one read; amaxes of rows too, those of groups before if not given."""
    kernel = launch.kernel(config)
    amax_kernel = None
    if config.group_amax and not given:
        amax_kernel = launch.kernel(AmaxConfig(config.dtype, config.grouping, arch=config.arch))

    def run(op: GroupedQuantizeNVFP4, outputs: Sequence[Tensor | None]) -> None:
        codes, scales, amax = outputs[:3]
        x, offs = readable(op.x), dense(op.offs)
        if amax_kernel is not None:
            amax_kernel(x, offs, None, amax, launch.num_sms)
        elif config.group_amax and op.amax is not None:
            _give(op.amax, amax)
        kernel(x, offs, _flat(amax), codes, scales, launch.num_sms)

    return run


def _tiles(op: GroupedQuantizeNVFP4, problem: QuantizeProblem, launch: Launcher) -> Runner:
    """Amaxes first where they are not given, then all copies from one read."""
    row_scaled = op.row_scaled and op.rowwise
    config = TileConfig(
        problem.dtype,
        problem.grouping,
        rowwise=op.rowwise,
        columnwise=op.columnwise,
        row_scaled=row_scaled,
        square_blocks=op.block_2d,
        compute_amax=op.amax is None,
        arch=launch.arch,
    )
    kernel = launch.kernel(config)
    row_kernel = None
    if row_scaled and op.amax is not None:
        rows_only = AmaxConfig(problem.dtype, problem.grouping, True, False, launch.arch)
        row_kernel = launch.kernel(rows_only)

    def run(op: GroupedQuantizeNVFP4, outputs: Sequence[Tensor | None]) -> None:
        codes, scales, amax, codes_t, scales_t, amax_t = outputs
        x, offs = readable(op.x), dense(op.offs)
        row_amax = _flat(amax) if row_scaled else None
        group_amax = amax_t if row_scaled or amax is None else amax
        if op.amax is not None:
            _give(op.amax, group_amax)
        if row_kernel is not None:
            row_kernel(x, offs, row_amax, None, launch.num_sms)
        buffers = (codes, scales, codes_t, scales_t)
        kernel(x, offs, row_amax, group_amax, *buffers, launch.num_sms)
        if amax_t is not None and group_amax is not None and amax_t is not group_amax:
            amax_t.copy_(group_amax)

    return run


def _flat(amax: Tensor | None) -> Tensor | None:
    """One amax a row, (T,) or (G, N), as the vector that kernels take."""
    return amax if amax is None or amax.dim() == 1 else amax.view(-1)


def grouped_dbias(op: GroupedDbias, launch: Launcher) -> Runner:
    """How ``grouped_dbias`` runs."""
    if not op.dy.numel():
        return _zero
    kernel = launch.kernel(DbiasConfig.choose(dtype_name(op.dy.dtype), op.dy.shape[1]))

    def run(op: GroupedDbias, outputs: Sequence[Tensor | None]) -> None:
        kernel(readable(op.dy), dense(op.offs), outputs[0], launch.num_sms)

    return run


def dequantize_nvfp4(op: GroupedDequantizeNVFP4, launch: Launcher) -> Runner:
    """How ``grouped_dequantize_nvfp4`` runs."""
    if not op.rows:
        return lambda op, outputs, fresh=False: None
    config = DequantizeConfig(
        dtype_name(op.dtype),
        "uniform" if op.offs is None else "ragged",
        row_scaled=op.row_scaled,
        columnwise=op.columnwise,
    )
    kernel = launch.kernel(config)

    def run(
        op: GroupedDequantizeNVFP4, outputs: Sequence[Tensor | None], fresh: bool = False
    ) -> None:
        codes = readable(op.codes) if op.columnwise else _readable_rows(op.codes)
        scales, amax, offs = readable(op.scales), _flat(dense(op.amax)), dense(op.offs)
        kernel(codes, scales, amax, offs, outputs[0], int(fresh), launch.num_sms)

    return run


def _readable_rows(codes: Tensor) -> Tensor:
    """Rowwise codes, copied unless all rows are equally far apart, and as far as kernels ask."""
    pitch, aligned = codes.stride(-2), codes.data_ptr() % ALIGNMENT == 0
    even = codes.dim() == 2 or codes.stride(0) == codes.shape[1] * pitch
    if aligned and even and codes.stride(-1) == 1 and pitch % PITCH_ALIGNMENT == 0:
        return codes
    padded = codes.new_empty(*codes.shape[:-1], code_pitch(codes.shape[-1]))
    return padded[..., : codes.shape[-1]].copy_(codes)
