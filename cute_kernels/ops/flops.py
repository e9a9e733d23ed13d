"""What products cost for ``torch.utils.flop_counter``: two operations for each multiply-add.

All rows count, those of a capacity's tail among them. Slots of quantized operands tell T only to
within 128 rows: a product over rows then counts up to where offs end, for which it waits on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..layout.slots import TILE_ROWS
from .fused_gemm import MGroupedGemmActivate, MGroupedQuantizeGemm, MGroupedQuantizeGemmActivate
from .gemm import GroupedGemm, KGroupedGemm, MGrouped, MGroupedGemm


def register_flops(namespace: Any, count: Callable[..., int], *names: str) -> None:
    """Have ops counted by ``count(*args, **kwargs)``, which takes their result as ``out_val``."""
    flop_registry.update(dict.fromkeys((getattr(namespace, name) for name in names), count))


def _counted(cls: type[GroupedGemm]) -> Callable[..., int]:
    def count(
        *args: Any, out: Any = None, out_val: Any = None, accumulate: bool = False, **kwargs: Any
    ) -> int:
        op = cls(*args, **kwargs)
        if isinstance(op, MGrouped):
            return 2 * op.num_rows * op.depth * op.cols
        assert isinstance(op, KGroupedGemm)
        rows = op.num_rows
        if op.a_format is not None:
            rows = max(rows // TILE_ROWS * TILE_ROWS, min(rows, _end(op.offs)))
        return 2 * rows * op.width("a") * op.width("b")

    return count


def _end(offs: Tensor) -> int:
    """Where the last group ends, or 0 where nobody may look."""
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
    register_flops(torch.ops.cute_kernels, _counted(_cls), _cls.name, f"{_cls.name}_out")
