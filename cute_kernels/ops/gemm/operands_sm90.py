"""Operands before the GEMM of sm_90a, which takes one of two FP4 operands as values.

Values have their elements in the order in which instructions contract them, see
``kernels.gemm.sm90.fp4.decode``, and K is padded to whole chunks of 128.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...kernels.gemm.common.operand_kinds import operand_of
from ...kernels.gemm.sm90.config import Sm90GemmConfig
from ...kernels.gemm.sm90.fp4.config import ArrangeConfig, ExpandConfig
from ...kernels.quantize.config import RowsConfig, TokenValuesConfig, ValuesConfig
from ...kernels.quantize.pass_config import AmaxConfig
from ...layout.buffers import BufferSpec
from ...layout.shapes import DECODED_CHUNK_K, ceil_div
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..arguments import dtype_name, readable
from ..quantize.launcher import choose_rows, quantized
from .base_op import GroupedGemm
from .fused_op import MGroupedQuantizeGemm
from .operand_tensors import Operands, OperandTensors, Prepare
from .operands import code_fields, transpose_squares


def sm90_operand_fields(op: GroupedGemm) -> dict[str, Any]:
    """Return the fields of a configuration for sm_90a that describe both operands."""
    a, b = op.a_record, op.b_record
    if b is None:
        return {"operand": dtype_name(op.a.dtype)}
    kind = operand_of(b)
    if a is None:
        return {"operand": kind.name, "activations": dtype_name(op.a.dtype)}
    fields = code_fields(a, b)
    if kind.has_short_sums and not kind.has_row_scales:
        fields["split"] = op.is_split
    elif op.prepacked:
        fields["prepacked"] = True
    return fields


def sm90_preparation(op: GroupedGemm, config: Sm90GemmConfig, launch: Launcher) -> Prepare | None:
    """Return a function that prepares the operands of calls like ``op``. None if none is needed."""
    if op.quantizes_a:
        return _quantize_values(cast("MGroupedQuantizeGemm", op), launch)
    if config.activations is not None:
        return _arrange_activations(op, config.activations, launch)
    if config.expanded is not None:
        return _expand_codes(op, config.expanded, launch)
    return transpose_squares(op, config)


def values_config(op: MGroupedQuantizeGemm, launch: Launcher) -> RowsConfig | None:
    """Return the configuration of the quantizer of A to values, or None if no kernel can do it."""
    quantizer = op.quantizer()
    problem = quantized(quantizer)
    config = choose_rows(quantizer, problem, launch, ValuesConfig, TokenValuesConfig)
    if not config.can_implement(problem) or op.rows is not None and config.takes_amax:
        return None
    return config


def _expand_codes(op: GroupedGemm, side: str, launch: Launcher) -> Prepare:
    """Return what expands the codes of operand "a" or "b" to fp16 values."""
    kernel = launch.kernel(ExpandConfig(is_ragged=side == "a"))
    num_rows, width = op.operands()["ab".index(side)].codes.shape
    workspace = Allocator([_padded_values(num_rows, width * 2, torch.float16)], op.device)

    def run(
        op: GroupedGemm, a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> Operands:
        """Expand the codes of one operand."""
        (values,) = workspace.make()
        if side == "a":
            kernel(a.codes, a.block_scales, offs, values, launch.num_sms)
            return OperandTensors(values, None, a.global_scale), b
        kernel(b.codes, b.block_scales, None, values, launch.num_sms)
        return a, OperandTensors(values, None, b.global_scale)

    return run


def _quantize_values(op: MGroupedQuantizeGemm, launch: Launcher) -> Prepare:
    """Return a function that quantizes A to fp16 values."""
    # The configuration is not None: ``run_as_values`` of the launcher has checked that.
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
    num_rows, depth = op.num_rows, op.depth
    count = num_rows if config.computes_amax else op.offs.shape[0]
    workspace = Allocator(
        [_padded_values(num_rows, depth, torch.float16), BufferSpec((count,), torch.float32)],
        op.device,
    )

    def run(
        op: GroupedGemm, a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> Operands:
        """Compute the amaxes if the quantizer needs them, then the values of A."""
        x = readable(a.codes)
        values, amax = workspace.make()
        if amax_kernel is not None:
            amax_kernel(x, offs, None, amax, launch.num_sms)
        index = op.inverse if config.reads_tokens else op.rows
        index = None if index is None else readable(index)
        kernel(x, index, offs, amax, values, None, None, None, launch.num_sms)
        return OperandTensors(values, None, amax), b

    return run


def _arrange_activations(op: GroupedGemm, dtype: str, launch: Launcher) -> Prepare:
    """Return a function that reorders a plain A for a product with codes."""
    kernel = launch.kernel(ArrangeConfig(dtype, gathered=op.index is not None))
    x = op.a
    num_rows = len(x) if op.index is None else len(op.index)
    workspace = Allocator([_padded_values(num_rows, x.shape[1], x.dtype)], op.device)

    def run(
        op: GroupedGemm, a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> Operands:
        """Rearrange A."""
        (values,) = workspace.make()
        kernel(a.codes, rows, offs, values, launch.num_sms)
        return OperandTensors(values), b

    return run


def _padded_values(rows: int, depth: int, dtype: torch.dtype) -> BufferSpec:
    """Return the spec of (rows, depth) values with the depth padded to whole chunks of K."""
    return BufferSpec((rows, ceil_div(depth, DECODED_CHUNK_K) * DECODED_CHUNK_K), dtype)
