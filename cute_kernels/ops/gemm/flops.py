"""FLOP counts of the GEMM ops: two operations for each multiply-add.

All rows count, including those of a capacity's tail. The slots of quantized operands determine T
only to within 128 rows, so a product over rows counts up to the last end row of ``offs``. Reading
``offs`` waits for a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...layout.slots import TILE_ROWS
from ..flops import register_flops
from .base_op import GroupedGemm, MGrouped
from .fused_op import MGroupedGemmActivate, MGroupedQuantizeGemm, MGroupedQuantizeGemmActivate
from .op import KGroupedGemm, MGroupedGemm


def _flop_counter(cls: type[GroupedGemm]) -> Callable[..., int]:
    """Return the function that counts the FLOPs of a call of the op ``cls``."""

    def count(
        *args: Any, out: Any = None, out_val: Any = None, accumulate: bool = False, **kwargs: Any
    ) -> int:
        """Return the FLOPs of a call with these arguments."""
        op = cls(*args, **kwargs)
        if isinstance(op, MGrouped):
            return 2 * op.num_rows * op.depth * op.cols
        assert isinstance(op, KGroupedGemm)
        rows = op.num_rows
        if op.a_format is not None:
            rows = max(rows // TILE_ROWS * TILE_ROWS, min(rows, _last_end_row(op.offs)))
        return 2 * rows * op.width("a") * op.width("b")

    return count


def _last_end_row(offs: Tensor) -> int:
    """Return the end row of the last group, or 0 where the value of ``offs`` cannot be read."""
    if (
        type(offs) is not Tensor
        or offs.is_meta
        or (offs.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return 0
    return int(offs[-1])


for _cls in (
    MGroupedGemm,
    MGroupedGemmActivate,
    MGroupedQuantizeGemm,
    MGroupedQuantizeGemmActivate,
    KGroupedGemm,
):
    register_flops(torch.ops.cute_kernels, _flop_counter(_cls), _cls.name, f"{_cls.name}_out")
