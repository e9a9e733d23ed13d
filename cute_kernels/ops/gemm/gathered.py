"""Products that gather rows into memory first.

No kernel reads these rows by an index, or gathering first is faster.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...arch import get_arch
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..moe.op import MoeGather
from ..plan import Runner

#: Number of columns of the other operand from which gathering first is as fast. Times by an index
#: (H200): products with 256 and 2048 rows per group take 18 and 10% less with 1536 columns, and 1%
#: more with 4096 columns. Products with few rows per group wait for weights. Weight gradients with
#: 1536 columns take 5% more with 256 rows per group and 10% less with 2048. With 4096 columns they
#: take 4 to 20% more.
_MOST_COLS, _FEW_ROWS, _MANY_ROWS = 4096, 64, 1024
#: Rows per group above which gathering first is faster for products that activate: their gathering
#: kernels have no warps left that could activate during the products. Layers took 4% less by an
#: index with 128 rows per group, as much with 256, and 6% more with 512 and 2048 (H200).
_MOST_ACTIVATED = 256
#: Extent of a matrix in bytes that the gathering kernels can address.
_MOST_BYTES = 2**35


def gathers_first(op: Any, side: str, arch: str) -> bool:
    """Return True if the rows of operand ``side`` ("a" or "b") are gathered into memory first.

    TMA of sm_100a reads four rows of plain operands by their numbers. On sm_90a warps copy the
    rows, if both operands are plain. There, rows that are gathered first are written and read once,
    however often they are multiplied, and the kernels that multiply them are 1 to 20% faster: see
    ``_MOST_COLS``. If B is codes, the pass that rearranges a plain A reads it by the index.
    """
    if op.index is None:
        return False
    has_tma_gather = get_arch(arch).has_tma_gather
    if _must_gather(op, side, has_tma_gather):
        return True
    return not has_tma_gather and op.b_record is None and _prefers_gathering(op, side)


def _must_gather(op: Any, side: str, has_tma_gather: bool) -> bool:
    """Return True if no kernel reads rows of ``side`` by the index, False if one does."""
    x: Tensor = getattr(op, side)
    if has_tma_gather:
        # A tensor map cannot have no rows.
        return op.a_record is not None or x.shape[0] == 0
    if op.a_record is not None or len(x) * x.stride(0) * x.itemsize > _MOST_BYTES:
        return True
    # With a quantized B, either A is rearranged by the index, or B is decoded first, and then this
    # is asked again for the plain product.
    return op.b_record is not None and side == "b"


def _prefers_gathering(op: Any, side: str) -> bool:
    """Return True if gathering first is faster on sm_90a, by the measurements at the constants."""
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
    """Build the runner of a product that gathers the rows of operand ``side`` first.

    Args:
        op: The product with its row index.
        side: Operand whose rows are gathered, "a" or "b".
        launch: Launcher of kernels.
        multiply: Builds the runner of the product of the gathered rows.
    """

    def gather_op(op: Any) -> MoeGather:
        return MoeGather(getattr(op, side), op.index, op.inverse)

    def product(op: Any, rows: Tensor) -> Any:
        return dataclasses.replace(op, rows=None, inverse=None, **{side: rows})

    gather = gather_op(op).build_runner(launch)
    buffer = Allocator(gather_op(op).outputs(), op.device)
    run_plain = multiply(product(op, buffer.make()[0]), launch)

    def run(op: Any, outputs: Sequence[Tensor], **options: bool) -> None:
        gathered = buffer.make()
        gather(gather_op(op), gathered)
        run_plain(product(op, gathered[0]), outputs, **options)

    return run
