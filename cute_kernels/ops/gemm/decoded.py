"""Codes beside a plain A where no kernel decodes them on the way: into memory first.

The dequantizer without a second level gives the values of ``reference.dots``. What is multiplied
then is plain, and the second level, one number a group, is part of alpha.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ...layout.buffers import BufferSpec
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..dequantize.op import GroupedDequantize
from ..plan import Runner
from .op import MGrouped, MGroupedGemm


def decodes_first(op: MGrouped, arch: str) -> bool:
    """Whether B is decoded into memory: codes of a byte on sm_90a, and those contiguous along N."""
    if op.a_record is not None or op.b_record is None:
        return False
    return op.is_b_mn_major or (arch == "sm_90a" and op.b_record.element.per_byte == 1)


def multiply_decoded(
    op: MGrouped, launch: Launcher, multiply: Callable[[MGrouped, Launcher], Runner]
) -> Runner:
    """How it runs, with ``multiply`` for plain operands."""
    fmt, groups = op.b_record, op.offs.shape[0]
    assert fmt is not None
    level = fmt.global_scale
    ones = torch.ones(groups, device=op.device)
    rows, cols = (op.depth, op.cols) if op.transpose_b else (op.cols, op.depth)
    values = Allocator([BufferSpec((groups, rows, cols), op.a.dtype)], op.device)

    def dequantizing(op: MGrouped) -> GroupedDequantize:
        scales = list(op.b_scales or ())
        if level is not None:
            scales[-1] = ones
        return GroupedDequantize(
            op.b, scales, fmt.text, rows, op.a.dtype, columnwise=op.transpose_b
        )

    def product(op: MGrouped, b: Tensor) -> MGrouped:
        alpha = op.alpha
        if level is not None and op.b_scales is not None:
            alpha = op.b_scales[-1] * level.factor
            alpha = alpha if op.alpha is None else alpha * op.alpha
        # With a plain A it is that op, a dataclass.
        op = cast("MGroupedGemm", op)
        return dataclasses.replace(op, b=b, b_scales=None, b_format=None, alpha=alpha)

    dequantize = dequantizing(op).build_runner(launch)
    plain = multiply(product(op, values.make()[0]), launch)

    def run(op: MGrouped, outputs: Sequence[Tensor], **options: bool) -> None:
        made = values.make()
        dequantize(dequantizing(op), made)
        plain(product(op, made[0]), outputs, **options)

    return run
