"""Where rows of a product are gathered into memory first, because no kernel reads them by an index."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..moe.op import MoeGather
from ..plan import Runner

#: Columns of the other operand from which on gathering first is as fast. Products of 256 and 2048
#: rows a group by 1536 columns take 18 and 10% less by an index, and by 4096 columns 1% more; those
#: of few rows a group wait for weights. Weight gradients of 1536 columns take 5% more of 256 rows a
#: group and 10% less of 2048, of 4096 columns 4 to 20% more (H200).
_MOST_COLS, _FEW_ROWS, _MANY_ROWS = 4096, 64, 1024
#: Rows a group above which gathering first is faster for products that activate, whose gathering
#: kernels have no warps left to activate beside the products: layers took 4% less by an index with
#: 128 rows a group, as much with 256, 6% more with 512 and 2048 (H200).
_MOST_ACTIVATED = 256
#: Bytes of a matrix, from one row to the next, that kernels address.
_MOST_BYTES = 2**35


def gathers_first(op: Any, side: str, arch: str) -> bool:
    """Whether those of operand ``side`` are.

    TMA of sm_100a reads four rows of plain operands by their numbers, where sm_90a has warps that
    do, if both operands are plain. There what is gathered first is written and read once, whatever
    it is multiplied by, and multiplied by kernels that are 1 to 20% faster: see ``_MOST_COLS``.
    Beside codes, the pass that rearranges a plain A reads it by the index.
    """
    if op.index is None:
        return False
    x: Tensor = getattr(op, side)
    if arch == "sm_100a":
        # No tensor map is of no rows.
        return op.a_record is not None or x.shape[0] == 0
    if op.a_record is not None or len(x) * x.stride(0) * x.itemsize > _MOST_BYTES:
        return True
    if op.b_record is not None:
        return (
            side == "b"
        )  # A is rearranged; or B is decoded first, and the plain product asks again.
    mean: int = op.num_rows // op.offs.shape[0]
    cols: int = op.cols if side == "a" else op.width("a")
    if side == "a" and op.has_activation:
        return mean > _MOST_ACTIVATED
    if side == "a":
        return mean > _FEW_ROWS and cols >= _MOST_COLS
    return mean < _MANY_ROWS or cols >= _MOST_COLS


def multiply_gathered(
    op: Any, side: str, launch: Launcher, multiply: Callable[[Any, Launcher], Runner]
) -> Runner:
    """How that runs, with ``multiply`` for the rows of operand ``side`` one after the other."""

    def gathering(op: Any) -> MoeGather:
        return MoeGather(getattr(op, side), op.index, op.inverse)

    def product(op: Any, rows: Tensor) -> Any:
        return dataclasses.replace(op, rows=None, inverse=None, **{side: rows})

    gather = gathering(op).build_runner(launch)
    buffer = Allocator(gathering(op).outputs(), op.device)
    run_plain = multiply(product(op, buffer.make()[0]), launch)

    def run(op: Any, outputs: Sequence[Tensor], **options: bool) -> None:
        made = buffer.make()
        gather(gathering(op), made)
        run_plain(product(op, made[0]), outputs, **options)

    return run
