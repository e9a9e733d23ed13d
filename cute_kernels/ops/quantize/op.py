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
from cute_kernels.reference.random_numbers import BLOCK as DRAWN

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
        x: (T, K) with ``offs``, (capacity,) with ``shapes``, or (G, N, K) without; bf16, fp16
            or fp32; K a multiple of what the format asks for. (..., 2K) of a gated
            activation.
        format: the text of the format, such as ``"nvfp4:row_scaled"`` (``Format.text``).
        offs: (G,) int32 end rows. Rows from the last on change nothing that is written.
        amax: (G,) fp32, the amax of each group, instead of computing it. It is a magnitude: its
            sign is dropped. Elements beyond it saturate. Where both directions of a format
            are asked for whose columnwise copy is transformed (``Format.is_transformed``),
            (2, G): that of the rowwise and that of the columnwise copy.
        rowwise: write the rowwise copy, blocks along K.
        columnwise: write the columnwise copy, blocks along the rows of a group. Of a format
            that transforms it, ``x`` must be bf16.
        scale: (G,) fp32, finite, what the elements of each group are multiplied by, of a format
            that takes its scales from the caller: FP8 with delayed scaling, which needs it
            and takes no ``amax``. Of one that is not finite, zeros and the padding of slots
            may be NaN. Products beyond the format's largest number saturate. The amax that
            is returned is that of ``x``, whatever the scale.
        seed: (2,) int64, which stochastic formats need and others refuse. Codes depend on it,
            on the element and on the direction alone (``cute_kernels.reference.random_numbers``).
        activation: the text of what is done to ``x`` first (``Activation.text``), such as
            ``"swiglu"``: its result is quantized, in fp32 or, where the format truncates,
            rounded to the dtype of ``x``. ``cute_kernels.reference.activations`` states it
            to the bit.
        shapes: [m0, n0, m1, n1, ...], rows and columns of each group, where the last dimension
            varies or both do; each n a positive multiple of what the format asks for. The
            groups lie in ``x`` one after the other, contiguous; what is left of it is never
            read. Each has the codes and scales of a uniform tensor of this one group. With
            an activation these are the shapes of what is quantized: a gated one reads (m,
            2n) of ``x`` for each.
        rows: (R,) int32 with ``offs``: row r of what is quantized, of R rows, is
            row ``rows[r]`` of ``x``, or made of it. What is none of them is unspecified.
        inverse: (T, k) int32, which of these R rows each row of ``x`` is, others than those for
            none: what ``compute_routing`` gives as ``row``. The bits do not depend on it.
            With it and k > 1 rows that share no scale with others are read once, not k
            times (``launch.rows.by_token``).

    Returns:
        The buffers of the directions that are asked for, in the order of
        ``Format.buffer_names`` and of the shapes of ``cute_kernels.layout.buffers``; of NVFP4:
        codes, scales, amax, codes_t, scales_t, amax_t. What a slot or a padded row holds that
        no group has is unspecified.
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
        """G."""
        if self.shapes is not None:
            return len(self.shapes) // 2
        return self.x.shape[0] if self.offs is None else self.offs.shape[0]

    def check(self, name: str = "scale") -> None:
        fmt = self.record
        check_input("x", self.x, self.offs, self.shapes)
        if self.rows is not None:
            check_rows(self.rows, "x", self.x)
            if self.offs is None:
                raise ValueError("rows is for a ragged x: with offs")
        check_inverse(self.inverse, self.rows, "x", self.x)
        multiple = fmt.k_multiple
        check_prologue("x", self.x, self.activation)
        columns = result_columns(self.x.shape[-1], self.activation)
        if self.shapes is not None:
            check_shapes(pairs(self.shapes), columns, multiple, self.format)
        else:
            what = "K" if columns == self.x.shape[-1] else "2K"
            check_multiple("K", columns, multiple, f"{self.format}, x is (..., {what})")
        if not (self.rowwise or self.columnwise):
            raise ValueError("rowwise and columnwise are both False: nothing to quantize")
        if self.columnwise and fmt.is_transformed and self.x.dtype != torch.bfloat16:
            raise TypeError(
                f"x must be bfloat16, of which {fmt.without_nan_scales} transforms the columnwise copy, got "
                f"{str(self.x.dtype).removeprefix('torch.')}: cast it, as x.bfloat16() and "
                "autocast do, or use a format without that transform"
            )
        check_seed(self.seed, fmt, "x", self.device)
        self._check_given(name)

    def _check_given(self, name: str) -> None:
        takes = self.record.has_given_scale
        if takes and self.scale is None:
            raise ValueError(f"{name} is missing: {self.format} takes (G,) fp32 scales")
        if self.scale is not None:
            if not takes:
                raise ValueError(
                    f"{name} is for formats that take one, {self.format} computes it: leave it "
                    "away, or take FP8(scaling='delayed')"
                )
            check_tensor(name, self.scale, dtypes=(torch.float32,), shape=(self.num_groups,))
            same_device("x", self.device, **{name: self.scale})
        if self.amax is None:
            return
        if takes:
            raise ValueError(f"amax decides nothing: {self.format} takes its scale, not its amax")
        has_two = self.rowwise and self.columnwise and self.record.is_transformed
        shape = (2, self.num_groups) if has_two else (self.num_groups,)
        check_tensor("amax", self.amax, dtypes=(torch.float32,), shape=shape)
        same_device("x", self.device, amax=self.amax)
        asked = [way for way, on in ((False, self.rowwise), (True, self.columnwise)) if on]
        levels = [self.record.global_scale_for(columnwise) for columnwise in asked]
        if not any(level is not None and level.per == "group" for level in levels):
            raise ValueError(
                f"amax is the second level of groups, which {self.format} does not use in the directions that are asked for"
            )

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of what is quantized but for its columns."""
        return tuple(self.x.shape[:-1] if self.rows is None else self.rows.shape)

    def specs(self) -> dict[str, BufferSpec]:
        """The buffers that are asked for, by name."""
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
        """Each group that has a shape of its own as a call for itself, with its outputs: views."""
        shapes = pairs(self.shapes or ())
        parts = member_spans(self.record, shapes, rowwise=self.rowwise, columnwise=self.columnwise)
        of_x = [(m, input_columns(n, self.activation)) for m, n in shapes]
        for i, x in enumerate(member_views(self.x, of_x)):
            amax, scale = (v if v is None else v[..., i : i + 1] for v in (self.amax, self.scale))
            op = dataclasses.replace(self, x=x, shapes=None, amax=amax, scale=scale)
            yield (
                op,
                [
                    of_members[i].view_of(buffer)
                    for of_members, buffer in zip(parts.values(), outputs, strict=True)
                ],
            )

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        if self.shapes is None:
            self._quantize(outputs, (0, 0))
            return
        for (op, of_member), before in zip(self.members(outputs), self.drawn_before(), strict=True):
            op._quantize(of_member, before)

    def drawn_before(self) -> list[tuple[int, int]]:
        """How many blocks of 16 elements there are, rowwise and columnwise, before those of each
        member.
        """
        found = [(0, 0)]
        for rows, cols in pairs(self.shapes or ()):
            by_row, by_column = found[-1]
            by_column += uniform_tiles(rows) * TILE_ROWS // DRAWN * cols
            found.append((by_row + rows * cols // DRAWN, by_column))
        return found[:-1]

    def _quantize(self, outputs: Sequence[Tensor], drawn_before: tuple[int, int]) -> None:
        """Quantize ragged or uniform groups.

        Args:
            outputs: what the op returns.
            drawn_before: how many blocks others that share the seed have rowwise and
                columnwise.
        """
        out = dict(zip(self.specs(), outputs, strict=True))
        x = self.x
        if self.rows is not None and len(x):
            x = x[self.rows.long().clamp(0, len(x) - 1)]
        groups = Groups.from_shape(x.shape, self.offs, self.device)
        elements = elements_of(x, self.activation, rounds_activation=self.record.rounds_activation)
        draws = None
        if self.seed is not None:
            draws = reference.SeededRandomNumbers(self.seed, elements.cols, drawn_before)
        reference.quantize(
            elements,
            groups,
            self.record,
            out,
            reference.QuantizeInputs(self.amax, self.scale, draws),
        )
