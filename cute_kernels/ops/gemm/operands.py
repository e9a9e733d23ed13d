"""Facts and preparations of GEMM operands that the architectures share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...formats import Format
from ...kernels.gemm.common.config import GemmConfig
from ...kernels.gemm.common.operand_kinds import operand_of
from .base_op import GroupedGemm
from .operand_tensors import Operands, OperandTensors, Prepare


def code_fields(a_format: Format, b_format: Format) -> dict[str, Any]:
    """Return the fields of a GEMM configuration that describe two quantized operands."""
    a, b = operand_of(a_format), operand_of(b_format)
    fields: dict[str, Any] = {"operand": a.name}
    if a is not b:
        fields["b_operand"] = b.name
    if a.has_row_scales and b.has_row_scales:
        fields["pow2_scales"] = a_format.has_pow2_scales and b_format.has_pow2_scales
    return fields


def transpose_squares(op: GroupedGemm, config: GemmConfig) -> Prepare | None:
    """Return what transposes the scales of squares of columnwise copies.

    The scales of both copies are stored in the order of the tensor's rows, which the columnwise
    copy contracts. The result is None if no operand has such scales.
    """
    transposes_a = config.kind.has_squares and config.grouping == "k_grouped"
    transposes_b = config.b_kind.has_squares and op.uses_columnwise
    if not (transposes_a or transposes_b):
        return None

    def run(
        op: GroupedGemm, a: OperandTensors, b: OperandTensors, offs: Tensor, rows: Tensor | None
    ) -> Operands:
        """Transpose the scales of the operands that need it."""
        if transposes_a and a.block_scales is not None:
            a = OperandTensors(a.codes, a.block_scales.mT, a.global_scale)
        if transposes_b and b.block_scales is not None:
            b = OperandTensors(b.codes, b.block_scales.mT, b.global_scale)
        return a, b

    return run
