"""The op that decodes one direction of a quantized tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from cute_kernels import reference
from cute_kernels.formats import Format, parse
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.ops.checks import (
    INPUT_DTYPES,
    check_copy,
    check_dtype,
    check_multiple,
    check_offs,
    check_tensor,
    same_device,
)
from cute_kernels.ops.launch import quantize as launch_quantize
from cute_kernels.ops.registry import Op, register
from cute_kernels.reference.groups import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.launch import Launcher

__all__ = ["GroupedDequantize"]


@register
@dataclasses.dataclass
class GroupedDequantize(Op):
    """Decode one direction of a quantized tensor.

    Args:
        codes: as ``grouped_quantize`` returns them, rowwise or columnwise.
        scales: what else that direction needs to be read (``Format.operand_names``): block scales,
            and the vector of the second level that decodes.
        format: the text of the format.
        rows: T, or N when uniform.
        dtype: bf16, fp16 or fp32.
        offs: (G,) int32 end rows, or None for uniform groups.
        columnwise: the copy is the columnwise one.

    Returns:
        (T, K), zeros in the tail, or (G, N, K). Each value is rounded to ``dtype`` once.
    """

    codes: Tensor
    scales: list[Tensor]
    format: str
    rows: int
    dtype: torch.dtype
    offs: Tensor | None = None
    columnwise: bool = False

    name: ClassVar[str] = "grouped_dequantize"
    fills_fresh: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def record(self) -> Format:
        """The format."""
        return parse(self.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        if self.columnwise and self.record.columnwise == "transposed":
            cols = self.codes.shape[-2]
        else:
            cols = self.record.element.count(self.codes.shape[-1])
        batch = () if self.offs is not None else (self.codes.shape[0],)
        return (*batch, self.rows, cols)

    @property
    def num_groups(self) -> int | None:
        """G of a ragged tensor; None if uniform."""
        return None if self.offs is None else self.offs.shape[0]

    def check(self) -> None:
        fmt = self.record
        if self.offs is not None:
            check_offs(self.offs)
        check_dtype("dtype", self.dtype, INPUT_DTYPES)
        check_tensor(
            "codes",
            self.codes,
            dtypes=(fmt.element.dtype,),
            ndim=(3,) if self.offs is None else (2,),
        )
        if self.offs is None and self.codes.shape[0] < 1:
            raise ValueError(
                f"codes must have at least one group, got shape {tuple(self.codes.shape)}"
            )
        multiple = fmt.k_multiple
        check_multiple("K", self.shape[-1], multiple, f"codes are of {self.format}")
        if self.rows < 0:
            raise ValueError(f"rows must be >= 0, got {self.rows}")
        copy = (self.codes, self.scales)
        check_copy("codes", "scales", copy, fmt, self.shape, self.num_groups, self.columnwise)
        same_device("codes", self.device, **self.tensors())

    def outputs(self) -> list[BufferSpec]:
        return [BufferSpec(self.shape, self.dtype, zeroed=self.offs is not None)]

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_dequantize", self.record

    @property
    def uses_columnwise(self) -> bool:
        return self.columnwise

    def kernels(self, launch: Launcher) -> Runner:
        return launch_quantize.dequantize(self, launch)

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        (out,) = outputs
        groups = Groups.of(self.shape, self.offs, self.device)
        copy = (self.codes, *self.scales)
        reference.dequantize(groups, self.record, copy, self.columnwise, out)
