"""The op that quantizes the groups of a plain tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.layout.buffers import BufferSpec, buffers, member_spans
from cute_kernels.layout.slots import TILE_ROWS, uniform_tiles
from cute_kernels.reference.groups import Groups
from cute_kernels.reference.random_numbers import BLOCK as RANDOM_BLOCK

from ..activation_prologue import (
    check_prologue,
    elements_of,
    input_columns,
    result_columns,
    result_shape,
)
from ..checks import (
    check_input,
    check_inverse,
    check_multiple,
    check_rows,
    check_seed,
    check_tensor,
    same_device,
)
from ..member_shapes import check_shapes, member_views, pairs
from ..op import FormatOp
from ..registration import register


@register
@dataclasses.dataclass
class GroupedQuantize(FormatOp):
    """Quantize the groups of ``x``.

    Args:
        x: (T, K) with ``offs``, (capacity,) with ``shapes``, else (G, N, K); bf16, fp16 or fp32. K
            is a multiple of the format's ``k_multiple``. A gated activation needs (..., 2K).
        format: Text of the format, such as ``"nvfp4:row_scaled"`` (``Format.text``).
        offs: (G,) int32. End rows. Rows past the last one do not affect the result.
        amax: (G,) fp32. Amax of each group, to use instead of computing it. The sign is dropped.
            Elements above it saturate. (2, G), for the rowwise and the columnwise copy, if both are
            requested and the format transforms its columnwise copy (``Format.is_transformed``).
        rowwise: Write the rowwise copy, with blocks along K.
        columnwise: Write the columnwise copy, with blocks along the rows of a group. If the format
            transforms this copy, ``x`` must be bf16.
        scale: (G,) fp32. Finite: scales that multiply the elements of each group, for a format that
            takes them from the caller (FP8 with delayed scaling). It needs ``scale`` and takes no
            ``amax``. If a scale is not finite, zeros and the padding of slots may be NaN. Products
            above the format's largest number saturate. The returned amax is the amax of ``x``,
            whatever the scale.
        seed: (2,) int64. Required by stochastic formats and rejected by others. Codes depend only
            on the seed, the element and the direction (``cute_kernels.reference.random_numbers``).
        activation: Text of an activation that is applied to ``x`` first (``Activation.text``),
            such as ``"swiglu"``. Its result is quantized in fp32, or rounded to the dtype of
            ``x`` if the format's ``rounds_activation`` is True.
            ``cute_kernels.reference.activations`` states the bits.
        shapes: [m0, n0, m1, n1, ...]: rows and columns of each group, if the last dimension varies.
            Each n is a positive multiple of ``k_multiple``. The groups are consecutive and
            contiguous in ``x``. The rest of ``x`` is never read. Each group has the codes and
            scales of a uniform tensor of one group. With an activation these are the shapes of its
            result: a gated activation reads (m, 2n) of ``x`` per group.
        rows: (R,) int32, with ``offs``: gather index. Row r of the quantized tensor of R rows is
            computed from row ``rows[r]`` of ``x``. Rows of an invalid index are unspecified.
        inverse: (T, k) int32: inverse of ``rows``, the rows that each row of ``x`` becomes, with
            invalid numbers for none; ``compute_routing`` returns it as ``row``. The bits do not
            depend on it. With it and k > 1, kernels read each row of ``x`` once instead of k
            times if rows do not share scales.

    Returns:
        The buffers of the requested directions, in the order of ``Format.buffer_names`` and with
        the shapes of ``cute_kernels.layout.buffers``; for NVFP4: codes, scales, amax, codes_t,
        scales_t, amax_t. Slots and padded rows without a group are unspecified.
    """

    x: Tensor
    format: str
    offs: Tensor | None = None
    amax: Tensor | None = None
    rowwise: bool = True
    columnwise: bool = False
    scale: Tensor | None = None
    seed: Tensor | None = None
    activation: str | None = None
    shapes: list[int] | None = None
    rows: Tensor | None = None
    inverse: Tensor | None = None

    name: ClassVar[str] = "grouped_quantize"
    returns_list: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        return (self.x if self.rows is None else self.rows).shape[0]

    @property
    def num_groups(self) -> int:
        """G, the number of groups."""
        if self.shapes is not None:
            return len(self.shapes) // 2
        return self.x.shape[0] if self.offs is None else self.offs.shape[0]

    def check(self, name: str = "scale") -> None:
        """Check all arguments; ``name`` is the name of the argument ``scale``."""
        fmt = self.record
        check_input("x", self.x, self.offs, self.shapes)
        if self.rows is not None:
            check_rows(self.rows, "x", self.x)
            if self.offs is None:
                raise ValueError("rows needs a ragged x, with offs")
        check_inverse(self.inverse, self.rows, "x", self.x)
        multiple = fmt.k_multiple
        check_prologue("x", self.x, self.activation)
        columns = result_columns(self.x.shape[-1], self.activation)
        if self.shapes is not None:
            check_shapes(pairs(self.shapes), columns, multiple, self.format)
        else:
            width = "K" if columns == self.x.shape[-1] else "2K"
            check_multiple("K", columns, multiple, f"{self.format}, x is (..., {width})")
        if not (self.rowwise or self.columnwise):
            raise ValueError("rowwise and columnwise are both False: nothing to quantize")
        if self.columnwise and fmt.is_transformed and self.x.dtype != torch.bfloat16:
            raise TypeError(
                f"x must be bfloat16, since {fmt.without_nan_scales} transforms the columnwise "
                "copy, got "
                f"{str(self.x.dtype).removeprefix('torch.')}: cast it, as x.bfloat16() and "
                "autocast do, or use a format without that transform"
            )
        check_seed(self.seed, fmt, "x", self.device)
        self._check_given(name)

    def _check_given(self, name: str) -> None:
        """Check ``scale`` and ``amax``."""
        needs_scale = self.record.has_given_scale
        if needs_scale and self.scale is None:
            raise ValueError(f"{name} is missing: {self.format} takes (G,) fp32 scales")
        if self.scale is not None:
            if not needs_scale:
                raise ValueError(
                    f"{name} is for formats that take one, {self.format} computes it: omit it, "
                    "or use FP8(scaling='delayed')"
                )
            check_tensor(name, self.scale, dtypes=(torch.float32,), shape=(self.num_groups,))
            same_device("x", self.device, **{name: self.scale})
        if self.amax is None:
            return
        if needs_scale:
            raise ValueError(f"amax must be None: {self.format} takes scales, not amaxes")
        has_two = self.rowwise and self.columnwise and self.record.is_transformed
        shape = (2, self.num_groups) if has_two else (self.num_groups,)
        check_tensor("amax", self.amax, dtypes=(torch.float32,), shape=shape)
        same_device("x", self.device, amax=self.amax)
        directions = [
            direction for direction, on in ((False, self.rowwise), (True, self.columnwise)) if on
        ]
        global_scales = [self.record.global_scale_for(columnwise) for columnwise in directions]
        if not any(
            global_scale is not None and global_scale.per == "group"
            for global_scale in global_scales
        ):
            raise ValueError(
                f"amax is the global scale of groups, which {self.format} does not use "
                "in the requested directions"
            )

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the quantized tensor without its last dimension."""
        return tuple(self.x.shape[:-1] if self.rows is None else self.rows.shape)

    def specs(self) -> dict[str, BufferSpec]:
        """Return the requested buffers by name."""
        return buffers(
            self.record,
            result_shape((*self.lead, self.x.shape[-1]), self.activation),
            None if self.offs is None else self.num_groups,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            shapes=None if self.shapes is None else pairs(self.shapes),
        )

    def outputs(self) -> list[BufferSpec]:
        return list(self.specs().values())

    def members(self, outputs: Sequence[Tensor]) -> Iterator[tuple[GroupedQuantize, list[Tensor]]]:
        """Yield each group with a shape of its own as a call, with views of its outputs."""
        shapes = pairs(self.shapes or ())
        spans = member_spans(self.record, shapes, rowwise=self.rowwise, columnwise=self.columnwise)
        input_shapes = [(m, input_columns(n, self.activation)) for m, n in shapes]
        for i, x in enumerate(member_views(self.x, input_shapes)):
            amax, scale = (v if v is None else v[..., i : i + 1] for v in (self.amax, self.scale))
            op = dataclasses.replace(self, x=x, shapes=None, amax=amax, scale=scale)
            yield (
                op,
                [
                    member_spans_of[i].view_of(buffer)
                    for member_spans_of, buffer in zip(spans.values(), outputs, strict=True)
                ],
            )

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        if self.shapes is None:
            self._quantize(outputs, (0, 0))
            return
        for (op, buffers_of_member), before in zip(
            self.members(outputs), self.blocks_before(), strict=True
        ):
            op._quantize(buffers_of_member, before)

    def blocks_before(self) -> list[tuple[int, int]]:
        """Return the number of blocks of 16 elements before each member.

        Each entry has the rowwise and the columnwise count.
        """
        counts = [(0, 0)]
        for rows, cols in pairs(self.shapes or ()):
            rowwise, columnwise = counts[-1]
            columnwise += uniform_tiles(rows) * TILE_ROWS // RANDOM_BLOCK * cols
            counts.append((rowwise + rows * cols // RANDOM_BLOCK, columnwise))
        return counts[:-1]

    def _quantize(self, outputs: Sequence[Tensor], blocks_before: tuple[int, int]) -> None:
        """Quantize ragged or uniform groups.

        Args:
            outputs: Outputs of the op.
            blocks_before: Number of blocks, rowwise and columnwise, of earlier groups that share
                the seed.
        """
        out = dict(zip(self.specs(), outputs, strict=True))
        x = self.x
        if self.rows is not None and len(x):
            x = x[self.rows.long().clamp(0, len(x) - 1)]
        groups = Groups.from_shape(x.shape, self.offs, self.device)
        elements = elements_of(x, self.activation, rounds_activation=self.record.rounds_activation)
        random = None
        if self.seed is not None:
            random = reference.SeededRandomNumbers(self.seed, elements.cols, blocks_before)
        reference.quantize(
            elements,
            groups,
            self.record,
            out,
            reference.QuantizeInputs(self.amax, self.scale, random),
        )
