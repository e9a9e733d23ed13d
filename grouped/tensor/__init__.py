"""``GroupedTensor``: the quantized members of all groups in one tensor that PyTorch can hold."""

from .grouped_tensor import GroupedTensor, _rebuild
from .members import GroupedMember, QuantizedCopy

__all__ = ["GroupedMember", "GroupedTensor", "QuantizedCopy", "_rebuild"]
