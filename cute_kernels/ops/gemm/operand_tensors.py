"""The tensors of one GEMM operand, as kernels take them."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor


class OperandTensors(NamedTuple):
    """The tensors of one GEMM operand, in the order in which kernels take them.

    Attributes:
        codes: Codes of a quantized operand, or the values of a plain one.
        block_scales: Block scales. None if absent.
        global_scale: Global scale, or the amax that stands for it, (G,) or (T,) fp32. None if
            absent.
    """

    codes: Tensor
    block_scales: Tensor | None = None
    global_scale: Tensor | None = None


#: The fields of ``OperandTensors`` as a plain tuple, for calls that pass operands to the kernel as
#: they are. Creating a named tuple takes about 0.3 us.
OperandFields: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
#: Both operands of a product, A and B.
Operands: TypeAlias = tuple[OperandTensors, OperandTensors]
#: Turns both operands of a call into what a kernel takes: ``(op, a, b, offs, rows) -> (a, b)``,
#: with ``rows`` the row index of an operand or None.
Prepare: TypeAlias = Callable[
    [Any, OperandTensors, OperandTensors, Tensor, Tensor | None], Operands
]
