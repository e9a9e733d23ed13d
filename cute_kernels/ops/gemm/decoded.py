"""Products of a plain A and codes that no kernel decodes: B is decoded into memory first.

The dequantizer without the global scale gives the values of ``reference.dots``. The kernel then
multiplies plain operands, and the global scale, one number per group, becomes part of alpha.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ...arch import get_arch
from ...layout.buffers import BufferSpec
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..dequantize.op import GroupedDequantize
from ..plan import Runner
from .base_op import MGrouped
from .op import MGroupedGemm


def decodes_first(op: MGrouped, arch: str) -> bool:
    """Return True if B must be decoded into memory.

    That is so for 8-bit codes on tensor cores that multiply them as codes only (sm_90a), and for
    codes that are contiguous along N.
    """
    if op.a_record is not None or op.b_record is None:
        return False
    has_decoder = get_arch(arch).has_block_scaled_mma or op.b_record.element.per_byte > 1
    return op.is_b_mn_major or not has_decoder


def multiply_decoded(
    op: MGrouped, launch: Launcher, multiply: Callable[[MGrouped, Launcher], Runner]
) -> Runner:
    """Build the runner of such a product.

    Args:
        op: The product.
        launch: Launcher of kernels.
        multiply: Builds the runner of a product of plain operands.
    """
    fmt, groups = op.b_record, op.offs.shape[0]
    assert fmt is not None
    global_scale = fmt.global_scale
    ones = torch.ones(groups, device=op.device)
    rows, cols = (op.depth, op.cols) if op.transpose_b else (op.cols, op.depth)
    values = Allocator([BufferSpec((groups, rows, cols), op.a.dtype)], op.device)

    def dequantizer(op: MGrouped) -> GroupedDequantize:
        scales = list(op.b_scales or ())
        if global_scale is not None:
            scales[-1] = ones
        return GroupedDequantize(
            op.b, scales, fmt.text, rows, op.a.dtype, columnwise=op.transpose_b
        )

    def product(op: MGrouped, b: Tensor) -> MGrouped:
        """Return the product of plain operands, with the global scale in alpha."""
        alpha = op.alpha
        if global_scale is not None and op.b_scales is not None:
            alpha = op.b_scales[-1] * global_scale.factor
            alpha = alpha if op.alpha is None else alpha * op.alpha
        # With a plain A the op is a MGroupedGemm, which is a dataclass.
        op = cast("MGroupedGemm", op)
        return dataclasses.replace(op, b=b, b_scales=None, b_format=None, alpha=alpha)

    dequantize = dequantizer(op).build_runner(launch)
    plain = multiply(product(op, values.make()[0]), launch)

    def run(op: MGrouped, outputs: Sequence[Tensor], **options: bool) -> None:
        decoded = values.make()
        dequantize(dequantizer(op), decoded)
        plain(product(op, decoded[0]), outputs, **options)

    return run
