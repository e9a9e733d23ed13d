"""The tensors of one GEMM operand, as kernels take them."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

#: Codes or plain values, block scales and global scale of one operand; None where it has none.
OperandTensors: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
#: Turns the tensors of A and B into what a kernel takes: ``(a, b, offs, rows) -> (a, b)``, with
#: ``rows`` the row index of A or None.
Prepare: TypeAlias = Callable[
    [OperandTensors, OperandTensors, Tensor, Tensor | None],
    tuple[OperandTensors, OperandTensors],
]
