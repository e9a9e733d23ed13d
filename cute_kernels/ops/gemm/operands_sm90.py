"""What is done to operands before the GEMM of sm_90a: it takes one of two FP4 operands as values.

Values have their elements in the order in which instructions contract them, see
``gemm.sm90.fp4.decode``, and K filled up to whole pieces.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ...kernels.gemm.common.config import GemmConfig
from ...kernels.gemm.sm90.config import Sm90GemmConfig
from ...kernels.gemm.sm90.fp4.config import ArrangeConfig, ExpandConfig
from ...kernels.quantize.config import AmaxConfig, RowsConfig, TokenValuesConfig, ValuesConfig
from ...layout.buffers import BufferSpec
from ...layout.shapes import PIECE_K, ceil_div
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..arguments import dense, readable
from ..quantize.launcher import choose_rows, quantized
from .fused_op import MGroupedQuantizeGemm
from .op import GroupedGemm
from .operand_tensors import OperandTensors, Prepare


def sm90_preparation(op: GroupedGemm, config: Sm90GemmConfig, launch: Launcher) -> Prepare | None:
    """What the operands of calls like ``op`` go through; None if they stay as they are."""
    if op.quantizes_a:
        return _quantizer(cast("MGroupedQuantizeGemm", op), launch)
    if config.activations is not None:
        return _arranger(op, config.activations, launch)
    return (
        _expander(op, config.expanded, launch)
        if config.expanded is not None
        else rows_first(op, config)
    )


def rows_first(op: GroupedGemm, config: GemmConfig) -> Prepare | None:
    """What turns the scales of squares of columnwise copies; None if there are none.

    Those of both copies lie as the rows of the tensor do, which the columnwise one contracts.
    """
    sides = {
        "a": (config.kind, config.grouping == "k_grouped"),
        "b": (config.b_kind, op.uses_columnwise),
    }
    turned = [kind.has_squares and columnwise for kind, columnwise in sides.values()]
    if not any(turned):
        return None

    def run(
        a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> tuple[OperandTensors, OperandTensors]:
        first, second = (
            (x[0], x[1].mT, x[2]) if turn and x[1] is not None else x
            for x, turn in zip((a, b), turned, strict=True)
        )
        return first, second

    return run


def values_config(op: MGroupedQuantizeGemm, launch: Launcher) -> RowsConfig | None:
    """The quantizer of A to values; None where no kernel can."""
    quantizer = op.quantizer()
    problem = quantized(quantizer)
    config = choose_rows(quantizer, problem, launch, ValuesConfig, TokenValuesConfig)
    return (
        config
        if config.can_implement(problem) and not (op.rows is not None and config.takes_amax)
        else None
    )


def _expander(op: GroupedGemm, side: str, launch: Launcher) -> Prepare:
    """What turns codes into fp16 values, of operand "a" or "b"."""
    kernel = launch.kernel(ExpandConfig(is_ragged=side == "a"))
    rows, width = op.operands()["ab".index(side)][0].shape
    workspace = Allocator([_pieces(rows, width * 2, torch.float16)], op.device)

    def run(
        a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> tuple[OperandTensors, OperandTensors]:
        (values,) = workspace.make()
        codes, scales, amax = a if side == "a" else b
        kernel(codes, scales, offs if side == "a" else None, values, launch.num_sms)
        made = (values, None, amax)
        return (made, b) if side == "a" else (a, made)

    return run


def _quantizer(op: MGroupedQuantizeGemm, launch: Launcher) -> Prepare:
    # There is one: ``quantizing`` has looked.
    config = cast("RowsConfig", values_config(op, launch))
    kernel = launch.kernel(config)
    amax_kernel = None
    if not config.computes_amax:
        amax_config = AmaxConfig(
            config.dtype,
            config.grouping,
            arch=config.arch,
            prologue=config.prologue,
            keeps_nan=config.fmt.amaxes_keep_nan,
        )
        amax_kernel = launch.kernel(amax_config)
    rows, depth = op.num_rows, op.depth
    count = rows if config.computes_amax else op.offs.shape[0]
    workspace = Allocator(
        [_pieces(rows, depth, torch.float16), BufferSpec((count,), torch.float32)], op.device
    )

    def run(
        a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> tuple[OperandTensors, OperandTensors]:
        x = readable(a[0])
        values, amax = workspace.make()
        if amax_kernel is not None:
            amax_kernel(x, offs, None, amax, launch.num_sms)
        index = dense(a[2] if config.reads_tokens else a[1])
        kernel(x, index, offs, amax, values, None, None, None, launch.num_sms)
        return (values, None, amax), b

    return run


def _arranger(op: GroupedGemm, dtype: str, launch: Launcher) -> Prepare:
    """What puts activations into the order in which instructions contract them beside codes."""
    kernel = launch.kernel(ArrangeConfig(dtype, gathered=op.index is not None))
    x = op.operands()[0][0]
    num_rows = len(x) if op.index is None else len(op.index)
    workspace = Allocator([_pieces(num_rows, x.shape[1], x.dtype)], op.device)

    def run(
        a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> tuple[OperandTensors, OperandTensors]:
        (values,) = workspace.make()
        kernel(a[0], rows, offs, values, launch.num_sms)
        return (values, None, None), b

    return run


def _pieces(rows: int, depth: int, dtype: torch.dtype) -> BufferSpec:
    return BufferSpec((rows, ceil_div(depth, PIECE_K) * PIECE_K), dtype)
