"""The quantization ops on CuTe DSL kernels: buffers to arguments, and the choice of a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.quantize.config import (
    AmaxConfig,
    OffsetsConfig,
    QuantizeProblem,
    RowScaledConfig,
    TileConfig,
)
from cute_kernels.shapes import code_pitch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from cute_kernels.ops.quantize import ComputeOffsets, GroupedAmax, GroupedQuantizeNVFP4
    from cute_kernels.runtime.launch import Launcher

__all__ = ["compute_offsets", "grouped_amax", "quantize_nvfp4"]

#: Alignment that the kernels' vector accesses need.
_ALIGNMENT = 32


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _readable(x: Tensor) -> Tensor:
    """``x``, copied if it is not contiguous or not aligned."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _problem(x: Tensor, offs: Tensor | None) -> QuantizeProblem:
    grouping = "uniform" if offs is None else "ragged"
    return QuantizeProblem(_dtype_name(x.dtype), x.shape[-1], grouping)  # type: ignore[arg-type]


def compute_offsets(op: ComputeOffsets, outputs: Sequence[Tensor | None], launch: Launcher) -> None:
    """Run ``compute_offsets``."""
    (offs,) = outputs
    assert offs is not None
    if offs.numel():
        config = OffsetsConfig(_dtype_name(op.splits.dtype), _dtype_name(offs.dtype))
        launch(config, op.splits.contiguous(), offs, op.multiplier)


def grouped_amax(op: GroupedAmax, outputs: Sequence[Tensor | None], launch: Launcher) -> None:
    """Run ``grouped_amax``."""
    (amax,) = outputs
    assert amax is not None
    if op.x.numel() == 0:
        amax.zero_()
        return
    problem = _problem(op.x, op.offs)
    config = AmaxConfig(problem.dtype, problem.grouping)
    launch(config, _readable(op.x), op.offs, None, amax, launch.num_sms)


def quantize_nvfp4(
    op: GroupedQuantizeNVFP4, outputs: Sequence[Tensor | None], launch: Launcher
) -> None:
    """Run ``grouped_quantize_nvfp4``: one launch, or two where amaxes come first."""
    codes, scales, amax, codes_t, scales_t, amax_t = outputs
    if op.x.numel() == 0:
        for empty in (amax, amax_t):
            if empty is not None:
                empty.zero_()
        return
    x = _readable(op.x)
    problem = _problem(x, op.offs)
    padded = _padded(codes)
    if op.row_scaled and codes_t is None:
        rows = RowScaledConfig.choose(problem)
        if rows.can_implement(problem):
            assert amax is not None
            launch(rows, x, op.offs, amax.view(-1), padded, scales, launch.num_sms)
            _copy_back(codes, padded)
            return
    config = TileConfig(
        problem.dtype,
        problem.grouping,
        rowwise=codes is not None,
        columnwise=codes_t is not None,
        row_scaled=op.row_scaled and codes is not None,
        square_blocks=op.block_2d,
        compute_amax=op.amax is None,
    )
    row_amax = amax.view(-1) if amax is not None and config.row_scaled else None
    group_amax = amax_t if config.row_scaled or amax is None else amax
    if op.amax is not None and group_amax is not None:
        group_amax.copy_(op.amax)
    if op.amax is not None and row_amax is not None:
        rows_only = AmaxConfig(problem.dtype, problem.grouping, per_row=True, per_group=False)
        launch(rows_only, x, op.offs, row_amax, None, launch.num_sms)
    launch(
        config, x, op.offs, row_amax, group_amax, padded, scales, codes_t, scales_t, launch.num_sms
    )
    if amax_t is not None and group_amax is not None and amax_t is not group_amax:
        amax_t.copy_(group_amax)
    _copy_back(codes, padded)


def _padded(codes: Tensor | None) -> Tensor | None:
    """``codes``, or a buffer of the same shape if its pitch is not one that the kernels take."""
    if codes is None or codes.stride(-2) % code_pitch(1) == 0:
        return codes
    pitch = code_pitch(codes.shape[-1])
    return codes.new_empty(*codes.shape[:-1], pitch)[..., : codes.shape[-1]]


def _copy_back(codes: Tensor | None, written: Tensor | None) -> None:
    if codes is not None and written is not None and codes is not written:
        codes.copy_(written)
