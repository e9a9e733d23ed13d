"""Ops on high-precision input: offsets, amax, dbias, quantization; and dequantization."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.formats import NVFP4, Format
from cute_kernels.layout.shapes import (
    SF_TILE_BYTES,
    SF_TILE_ROWS,
    TILE_ROWS,
    ceil_div,
    code_pitch,
    num_slot_tiles,
    scale_tiles,
    uniform_tiles,
)
from cute_kernels.ops import quantize_kernels
from cute_kernels.ops.checks import (
    INPUT_DTYPES,
    check_dtype,
    check_multiple,
    check_offs,
    check_tensor,
    same_device,
)
from cute_kernels.ops.registry import Op, OutputSpec, register, sole
from cute_kernels.reference.groups import Groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.ops.registry import Runner
    from cute_kernels.runtime.launch import Launcher

__all__ = [
    "ComputeOffsets",
    "GroupedAmax",
    "GroupedDbias",
    "GroupedDequantizeNVFP4",
    "GroupedQuantizeNVFP4",
]

_BLOCK = NVFP4.sf_vec_size


def _check_input(name: str, x: Tensor, offs: Tensor | None) -> None:
    check_tensor(name, x, dtypes=INPUT_DTYPES, ndim=(3,) if offs is None else (2,))
    if offs is not None:
        check_offs(offs)
        same_device(name, x.device, offs=offs)
    elif x.shape[0] < 1:
        raise ValueError(f"{name} must have at least one group, got shape {tuple(x.shape)}")


def _groups(shape: Sequence[int], offs: Tensor | None, device: torch.device) -> Groups:
    if offs is None:
        return Groups.uniform(shape[0], shape[1], device)
    return Groups.ragged(offs, shape[0])


def _rows_first(x: Tensor) -> Tensor:
    """(G, N, K) as (G * N, K)."""
    return x.flatten(0, -2)


@register
@dataclasses.dataclass
class ComputeOffsets(Op):
    """End offset of each group: the inclusive sum of ``splits`` times ``multiplier``.

    Args:
        splits: (G,) int32 or int64 sizes.
        multiplier: elements counted for each unit of ``splits``, at least 1 and in ``dtype``.
        dtype: int32 or int64.

    Returns:
        (G,) offsets. Those that ``dtype`` cannot hold saturate: they are its largest number.
    """

    splits: Tensor
    multiplier: int = 1
    dtype: torch.dtype | None = None

    name: ClassVar[str] = "compute_offsets"
    output_names: ClassVar[tuple[str, ...]] = ("offs",)

    @property
    def device(self) -> torch.device:
        return self.splits.device

    def check(self) -> None:
        integers = (torch.int32, torch.int64)
        check_tensor("splits", self.splits, dtypes=integers, ndim=(1,))
        check_dtype("dtype", self.dtype or torch.int32, integers)
        if not isinstance(self.multiplier, (int, torch.SymInt)):
            raise TypeError(f"multiplier must be an integer, got {self.multiplier!r}")
        largest = torch.iinfo(self.dtype or torch.int32).max
        if not 1 <= self.multiplier <= largest:
            raise ValueError(
                f"multiplier must be in [1, {largest}], the offsets' dtype, got {self.multiplier}"
            )

    def outputs(self) -> list[OutputSpec | None]:
        return [OutputSpec(tuple(self.splits.shape), self.dtype or torch.int32)]

    def capability(self) -> tuple[str, Format | None]:
        return "compute_offsets", None

    def kernels(self, launch: Launcher) -> Runner:
        return quantize_kernels.compute_offsets(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        offs = sole(outputs)
        reference.compute_offsets(self.splits, self.multiplier, offs)


@register
@dataclasses.dataclass
class GroupedAmax(Op):
    """Largest magnitude of each group; NaN is passed over.

    Args:
        x: (T, K) with ``offs``, or (G, N, K) without; bf16, fp16 or fp32.
        offs: (G,) int32 end rows.

    Returns:
        (G,) fp32, 0 for an empty group.
    """

    x: Tensor
    offs: Tensor | None = None

    name: ClassVar[str] = "grouped_amax"
    output_names: ClassVar[tuple[str, ...]] = ("amax",)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def check(self) -> None:
        _check_input("x", self.x, self.offs)

    def outputs(self) -> list[OutputSpec | None]:
        groups = self.x.shape[0] if self.offs is None else self.offs.shape[0]
        return [OutputSpec((groups,), torch.float32)]

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_amax", None

    def kernels(self, launch: Launcher) -> Runner:
        return quantize_kernels.grouped_amax(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        amax = sole(outputs)
        groups = _groups(self.x.shape, self.offs, self.device)
        reference.grouped_amax(_rows_first(self.x), groups, amax)


@register
@dataclasses.dataclass
class GroupedDbias(Op):
    """Column sums of each group in fp32, in a fixed order.

    Args:
        dy: (T, N) bf16, fp16 or fp32.
        offs: (G,) int32 end rows.

    Returns:
        (G, N) fp32, the dtype of the sums, zeros for an empty group. Callers cast to that of the
        bias, once, after adding what else belongs to the gradient.
    """

    dy: Tensor
    offs: Tensor

    name: ClassVar[str] = "grouped_dbias"
    output_names: ClassVar[tuple[str, ...]] = ("dbias",)

    @property
    def device(self) -> torch.device:
        return self.dy.device

    def check(self) -> None:
        _check_input("dy", self.dy, self.offs)

    def outputs(self) -> list[OutputSpec | None]:
        return [OutputSpec((self.offs.shape[0], self.dy.shape[1]), torch.float32)]

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_dbias", None

    def kernels(self, launch: Launcher) -> Runner:
        return quantize_kernels.grouped_dbias(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        dbias = sole(outputs)
        groups = Groups.ragged(self.offs, self.dy.shape[0])
        reference.grouped_dbias(self.dy, groups, dbias)


def _nvfp4_specs(
    shape: Sequence[int], num_groups: int | None, row_scaled: bool
) -> tuple[list[OutputSpec], list[OutputSpec]]:
    """Codes, scales and amax of the rowwise and of the columnwise copy.

    ``shape`` is (T, K), ragged in ``num_groups`` groups, or (G, N, K) if ``num_groups`` is None.
    """
    *rows, cols = shape
    if num_groups is None:
        num_groups = rows[0]
        batch, tiles = [num_groups], uniform_tiles(rows[1])
    else:
        batch, tiles = [], num_slot_tiles(rows[0], num_groups)
    wide = tiles * scale_tiles(TILE_ROWS, _BLOCK)
    byte, per_group = torch.uint8, OutputSpec((num_groups,), torch.float32)
    return [
        OutputSpec((*rows, cols // 2), byte, code_pitch(cols // 2)),
        OutputSpec((*batch, tiles, scale_tiles(cols, _BLOCK), SF_TILE_BYTES), byte),
        OutputSpec(tuple(rows), torch.float32) if row_scaled else per_group,
    ], [
        OutputSpec((*batch, cols, tiles * TILE_ROWS // 2), byte),
        OutputSpec((*batch, ceil_div(cols, SF_TILE_ROWS), wide, SF_TILE_BYTES), byte),
        per_group,
    ]


@register
@dataclasses.dataclass
class GroupedQuantizeNVFP4(Op):
    """Quantize the groups of ``x`` to NVFP4; an output that is not asked for has shape (0,).

    With P = 128 * (T // 128 + G) slot rows (``cute_kernels.layout.shapes``):

    Args:
        x: (T, K) with ``offs``, or (G, N, K) without; bf16, fp16 or fp32; K % 16 == 0.
        offs: (G,) int32 end rows. Rows from the last on are neither read nor written.
        amax: (G,) fp32, the second level of each group, instead of computing it. It is a magnitude:
            its sign is dropped. Elements beyond it saturate.
        row_scaled: the second level of the rowwise copy is per row.
        block_2d: 16x16 blocks instead of 1x16.
        rowwise: write the rowwise copy, blocks along K.
        columnwise: write the columnwise copy, blocks along the rows of a group.

    Returns:
        codes (T, K / 2) uint8, rows a multiple of 16 bytes apart; scales (P / 128, ceil(K / 64),
        512) uint8 tiles; amax fp32 (G,), or (T,) or
        (G, N) when row-scaled; codes_t (K, P / 2) uint8;
        scales_t (ceil(K / 128), P / 64, 512) uint8 tiles; amax_t (G,) fp32.

        For uniform input codes (G, N, K / 2), scales (G, ceil(N / 128), ceil(K / 64), 512), codes_t
        (G, K, 64 * ceil(N / 128)), scales_t (G, ceil(K / 128), 2 * ceil(N / 128), 512).
    """

    x: Tensor
    offs: Tensor | None = None
    amax: Tensor | None = None
    row_scaled: bool = False
    block_2d: bool = False
    rowwise: bool = True
    columnwise: bool = False

    name: ClassVar[str] = "grouped_quantize_nvfp4"
    output_names: ClassVar[tuple[str, ...]] = (
        "out_codes",
        "out_scales",
        "out_amax",
        "out_codes_t",
        "out_scales_t",
        "out_amax_t",
    )

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def format(self) -> NVFP4:
        """The format record of the flags."""
        return NVFP4(row_scaled=self.row_scaled, block=NVFP4.blocks[int(self.block_2d)])

    @property
    def num_groups(self) -> int:
        """G."""
        return self.x.shape[0] if self.offs is None else self.offs.shape[0]

    def check(self) -> None:
        _check_input("x", self.x, self.offs)
        check_multiple("K", self.x.shape[-1], _BLOCK, f"blocks of {_BLOCK}, x is (..., K)")
        _ = self.format
        if not (self.rowwise or self.columnwise):
            raise ValueError("rowwise and columnwise are both False: nothing to quantize")
        if self.amax is not None:
            check_tensor("amax", self.amax, dtypes=(torch.float32,), shape=(self.num_groups,))
            same_device("x", self.device, amax=self.amax)
            if self.row_scaled and not self.columnwise:
                raise ValueError(
                    "amax is the second level of groups, which a row_scaled tensor without a "
                    "columnwise copy does not use"
                )

    def outputs(self) -> list[OutputSpec | None]:
        rowwise, columnwise = _nvfp4_specs(
            self.x.shape, None if self.offs is None else self.num_groups, self.row_scaled
        )
        absent = [None] * 3
        return [
            *(rowwise if self.rowwise else absent),
            *(columnwise if self.columnwise else absent),
        ]

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_quantize", self.format

    def kernels(self, launch: Launcher) -> Runner:
        return quantize_kernels.quantize_nvfp4(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        codes, scales, amax, codes_t, scales_t, amax_t = outputs
        if codes is not None and scales is not None and amax is not None and self.offs is None:
            # The rows of all groups are equally far apart, so this is a view.
            codes, scales = codes.flatten(0, 1), scales.flatten(0, 1)
            amax = amax.view(-1)
        reference.quantize_nvfp4(
            _rows_first(self.x),
            _groups(self.x.shape, self.offs, self.device),
            self.format,
            given_amax=self.amax,
            codes=codes,
            scales=scales,
            amax=amax,
            codes_t=codes_t,
            scales_t=scales_t,
            amax_t=amax_t,
        )


@register
@dataclasses.dataclass
class GroupedDequantizeNVFP4(Op):
    """Decode one direction of an NVFP4 tensor.

    Args:
        codes: as ``grouped_quantize_nvfp4`` returns them, rowwise or columnwise.
        scales: likewise.
        amax: likewise.
        offs: (G,) int32 end rows, or None for uniform groups.
        rows: T, or N when uniform.
        dtype: dtype of the result.
        row_scaled: ``amax`` is per row.
        columnwise: the copy is the columnwise one.

    Returns:
        (T, K), zeros in the tail, or (G, N, K). Each value is rounded to ``dtype`` once.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor
    offs: Tensor | None
    rows: int
    dtype: torch.dtype
    row_scaled: bool = False
    columnwise: bool = False

    name: ClassVar[str] = "grouped_dequantize_nvfp4"
    fills_fresh: ClassVar[bool] = True
    output_names: ClassVar[tuple[str, ...]] = ("out",)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        cols = self.codes.shape[-2] if self.columnwise else self.codes.shape[-1] * 2
        batch = () if self.offs is not None else (self.codes.shape[0],)
        return (*batch, self.rows, cols)

    def check(self) -> None:
        byte = (torch.uint8,)
        if self.offs is not None:
            check_offs(self.offs)
        check_dtype("dtype", self.dtype, INPUT_DTYPES)
        check_tensor("codes", self.codes, dtypes=byte, ndim=(3,) if self.offs is None else (2,))
        if self.offs is None and self.codes.shape[0] < 1:
            raise ValueError(
                f"codes must have at least one group, got shape {tuple(self.codes.shape)}"
            )
        layout = "(..., K, slots / 2)" if self.columnwise else "(..., K / 2)"
        check_multiple("K", self.shape[-1], _BLOCK, f"blocks of {_BLOCK}, codes are {layout}")
        if self.rows < 0:
            raise ValueError(f"rows must be >= 0, got {self.rows}")
        if self.row_scaled and self.columnwise:
            raise ValueError("row_scaled belongs to the rowwise copy: columnwise amax is per group")
        num_groups = None if self.offs is None else self.offs.shape[0]
        wanted = _nvfp4_specs(self.shape, num_groups, self.row_scaled)[int(self.columnwise)]
        for name, want in zip(("codes", "scales", "amax"), wanted, strict=True):
            check_tensor(name, getattr(self, name), dtypes=(want.dtype,), shape=want.shape)
        same_device("codes", self.device, **self.tensors())

    def outputs(self) -> list[OutputSpec | None]:
        return [OutputSpec(self.shape, self.dtype, zeroed=self.offs is not None)]

    def capability(self) -> tuple[str, Format | None]:
        return "grouped_dequantize", NVFP4(row_scaled=self.row_scaled)

    def kernels(self, launch: Launcher) -> Runner:
        return quantize_kernels.dequantize_nvfp4(self, launch)

    def run_reference(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        out = sole(outputs)
        codes, scales = self.codes, self.scales
        if self.offs is None and not self.columnwise:
            codes, scales = codes.flatten(0, 1), scales.flatten(0, 1)
        groups = _groups(self.shape, self.offs, self.device)
        fmt = NVFP4(row_scaled=self.row_scaled)
        reference.dequantize_nvfp4(
            groups, fmt, codes, scales, self.amax.flatten(), self.columnwise, _rows_first(out)
        )
