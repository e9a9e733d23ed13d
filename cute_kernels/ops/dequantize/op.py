"""The op that decodes one direction of a quantized tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.layout.buffers import BufferSpec, member_spans
from cute_kernels.reference.groups import Groups

from ..checks import (
    INPUT_DTYPES,
    check_copy,
    check_dtype,
    check_multiple,
    check_offs,
    check_tensor,
    same_device,
)
from ..member_shapes import check_shapes, member_views, pairs
from ..op import FormatOp
from ..registration import register


@register
@dataclasses.dataclass
class GroupedDequantize(FormatOp):
    """Decode one direction of a quantized tensor.

    Args:
        codes: Rowwise or columnwise codes, as ``grouped_quantize`` returns them.
        scales: Other buffers of that direction that decode (``Format.operand_names``): block
            scales, and the first vector of the global scale.
        format: Text of the format.
        rows: T; N if uniform. Or the capacity with ``shapes``.
        dtype: Dtype of the result: bf16, fp16 or fp32.
        offs: (G,) int32. End rows, or None for uniform groups.
        columnwise: True for the columnwise copy.
        shapes: [m0, n0, m1, n1, ...]: rows and columns of groups that have shapes of their own;
            ``codes`` and ``scales`` are then flat.

    Returns:
        (T, K) or (capacity,) with zeros in the tail, or (G, N, K). Each value is rounded to
        ``dtype`` once.
    """

    codes: Tensor
    scales: list[Tensor]
    format: str
    rows: int
    dtype: torch.dtype
    offs: Tensor | None = None
    columnwise: bool = False
    shapes: list[int] | None = None

    name: ClassVar[str] = "grouped_dequantize"
    fills_fresh: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        if self.shapes is not None:
            return (self.rows,)
        if self.columnwise and self.record.columnwise == "transposed":
            cols = self.codes.shape[-2]
        else:
            cols = self.record.element.count(self.codes.shape[-1])
        batch = () if self.offs is not None else (self.codes.shape[0],)
        return (*batch, self.rows, cols)

    @property
    def num_rows(self) -> int:
        return self.rows

    @property
    def num_groups(self) -> int | None:
        """G of a ragged tensor, or None if uniform, or with ``shapes``."""
        return None if self.offs is None else self.offs.shape[0]

    def check(self) -> None:
        """Check the arguments."""
        check_dtype("dtype", self.dtype, INPUT_DTYPES)
        if self.rows < 0:
            raise ValueError(f"rows must be >= 0, got {self.rows}")
        shapes = None
        if self.shapes is not None:
            if self.offs is not None:
                raise ValueError("offs and shapes are both given: pass only one of them")
            shapes = pairs(self.shapes)
            check_shapes(shapes, self.rows, self.record.k_multiple, self.format)
        else:
            self._check_matrices()
        args = (self.codes, self.scales), self.record, self.shape, self.num_groups
        check_copy("codes", "scales", *args, self.columnwise, shapes)
        same_device("codes", self.device, **self.tensors())

    def _check_matrices(self) -> None:
        """Check ``codes`` of ragged or uniform groups."""
        fmt = self.record
        if self.offs is not None:
            check_offs(self.offs)
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
        check_multiple("K", self.shape[-1], fmt.k_multiple, f"codes are of {self.format}")

    def outputs(self) -> list[BufferSpec]:
        return [
            BufferSpec(
                self.shape, self.dtype, zeroed=self.offs is not None or self.shapes is not None
            )
        ]

    def members(
        self, outputs: Sequence[Tensor]
    ) -> Iterator[tuple[GroupedDequantize, list[Tensor]]]:
        """Yield each group with a shape of its own as a call, with a view of its output."""
        shapes, columnwise = pairs(self.shapes or ()), self.columnwise
        spans = member_spans(self.record, shapes, rowwise=not columnwise, columnwise=columnwise)
        spans_of_buffers = [spans[name] for name in self.record.operand_names(columnwise)]
        for i, view in enumerate(member_views(outputs[0], shapes)):
            buffers = zip(spans_of_buffers, (self.codes, *self.scales), strict=True)
            codes, *scales = (buffer_spans[i].view_of(buffer) for buffer_spans, buffer in buffers)
            yield (
                dataclasses.replace(
                    self, codes=codes, scales=scales, rows=shapes[i][0], shapes=None
                ),
                [view],
            )

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Decode with the reference backend."""
        if self.shapes is not None:
            for op, view in self.members(outputs):
                op.run_reference(view, **options)
            return
        (out,) = outputs
        groups = Groups.from_shape(self.shape, self.offs, self.device)
        reference.dequantize(groups, self.record, (self.codes, *self.scales), self.columnwise, out)
