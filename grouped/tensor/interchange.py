"""Conversion of a quantized tensor between kernel buffers and plain tensors, as files have them."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.formats import BlockScale, Format
from cute_kernels.layout.buffers import BufferSpec, buffers
from cute_kernels.layout.shapes import ceil_div
from cute_kernels.layout.slots import TILE_ROWS
from cute_kernels.ops.checks import check_multiple, check_tensor, same_device
from cute_kernels.records import check_choice
from cute_kernels.reference.groups import Groups
from cute_kernels.reference.scales import lay_scales, linear_scales, tile_view

from .members import QuantizedCopy, scale_numbers
from .validation import check_format

#: Layout of block scales: a matrix, as in checkpoints, or the tiles of ``layout.buffers``.
Layout = Literal["linear", "tiles"]
_LAYOUTS = ("linear", "tiles")


def join_parts(
    fmt: Format,
    codes: Tensor,
    scales: Tensor | None,
    level_tensors: Mapping[str, Tensor | None],
    offs: Tensor | None,
    layout: Layout,
) -> tuple[tuple[int, ...], QuantizedCopy]:
    """Return the shape and the rowwise copy of plain tensors.

    The arguments are those of ``GroupedTensor.from_parts``; ``level_tensors`` has ``amax``,
    ``global_scale`` and ``scale``.
    """
    check_format("fmt", fmt)
    check_choice("layout", layout, _LAYOUTS)
    check_tensor("codes", codes, ndim=(3,) if offs is None else (2,))
    element = fmt.element.dtype
    numbers = element if fmt.element.has_nan else torch.float4_e2m1fn_x2
    codes = _stored_bytes("codes", codes, element, numbers)
    shape = (*codes.shape[:-1], fmt.element.count(codes.shape[-1]))
    check_multiple("K", shape[-1], fmt.k_multiple, f"the last dimension of {fmt.text}")
    same_device("codes", codes.device, scales=scales, **level_tensors)
    groups = shape[0] if offs is None else offs.shape[0]
    specs = buffers(fmt, shape, None if offs is None else groups)
    tensors = [_with_strides(codes, specs["codes"])]
    if (scales is None) != (fmt.scale is None):
        reason = "are missing: " if scales is None else "are given, but there are none in "
        raise ValueError(f"scales {reason}{fmt.text}")
    if scales is not None and fmt.scale is not None:
        scales = _stored_bytes("scales", scales, fmt.scale.dtype, fmt.scale.element.dtype)
        if layout == "linear":
            scales = _tile_scales(fmt, fmt.scale, scales, shape, offs, specs["scales"])
        tensors.append(scales)
    level = _level_buffers(fmt, codes, level_tensors, offs, groups)
    return shape, QuantizedCopy(fmt, tensors + level)


def split_parts(
    fmt: Format,
    shape: Sequence[int],
    offs: Tensor | None,
    copy: QuantizedCopy,
    layout: Layout,
    global_scale: bool,
) -> dict[str, Tensor]:
    """Undo ``join_parts``. See ``GroupedTensor.to_parts``."""
    check_choice("layout", layout, _LAYOUTS)
    tensors = copy._asdict()
    if fmt.scale is not None and layout == "linear":
        tensors["scales"] = _linear_matrix(fmt, fmt.scale, tensors["scales"], shape, offs)
    if "scale_inv" in tensors:
        tensors["global_scale"] = tensors.pop("scale_inv")
    elif fmt.global_scale is not None and global_scale:
        tensors["global_scale"] = tensors.pop("amax") * fmt.global_scale.factor
    return tensors if offs is None else {**tensors, "offs": offs}


def _stored_bytes(name: str, x: Tensor, dtype: torch.dtype, numbers: torch.dtype) -> Tensor:
    """Return ``x`` in the dtype of the buffers, which store numbers of one byte as bytes."""
    check_tensor(name, x, dtypes=(dtype,) if dtype == numbers else (numbers, dtype))
    return x.view(dtype)


def _with_strides(x: Tensor, spec: BufferSpec) -> Tensor:
    """Return ``x`` with the strides of ``spec``, copied if it has others."""
    if x.stride() == spec.strides and x.storage_offset() == 0:
        return x
    out = spec.allocate(x.device, True)
    out.view(torch.uint8).copy_(x.view(torch.uint8))
    return out


def _slot_rows(
    shape: Sequence[int], offs: Tensor | None, device: torch.device
) -> tuple[Tensor, int]:
    """Return the slot row of each row, and the number of slot rows.

    Rows of the tail get the row after all slots.
    """
    groups = Groups.from_shape(shape, offs, device)
    group, end = groups.group_of_row(), groups.num_tiles * TILE_ROWS
    shift = torch.cat([groups.first_tile * TILE_ROWS - groups.starts, torch.zeros_like(group[:1])])
    slot = torch.arange(len(group), device=device) + shift[group]
    return torch.where(group < len(groups), slot, end), end


def _stores_matrix(fmt: Format, offs: Tensor | None) -> bool:
    """Return True if buffers store the matrix of scales itself, one for each square block."""
    if not fmt.has_squares:
        return False
    if offs is not None:
        raise ValueError(
            f"{fmt.text} with offs has no linear scales, since blocks start where groups do: "
            "use layout='tiles'"
        )
    return True


def _tile_scales(
    fmt: Format,
    scale: BlockScale,
    linear: Tensor,
    shape: Sequence[int],
    offs: Tensor | None,
    spec: BufferSpec,
) -> Tensor:
    """Convert a matrix of scales to the layout of the buffer ``spec``."""
    stores_matrix, width = _stores_matrix(fmt, offs), ceil_div(shape[-1], scale.vec_size)
    check_tensor("scales", linear, shape=spec.shape if stores_matrix else (*shape[:-1], width))
    if stores_matrix:
        return linear.contiguous()
    slot, count = _slot_rows(shape, offs, linear.device)
    slot_scales = linear.new_zeros(count + 1, width)
    slot_scales[slot] = linear.flatten(0, -2)
    out = spec.allocate(linear.device, True)
    tiles = tile_view(fmt, out, columnwise=False)
    laid = lay_scales(fmt, slot_scales[:count].view(-1, TILE_ROWS, width), False)
    tiles.copy_(laid.view(tiles.shape))
    return out


def _linear_matrix(
    fmt: Format, scale: BlockScale, scales: Tensor, shape: Sequence[int], offs: Tensor | None
) -> Tensor:
    """Convert the scales of a buffer to a matrix, with zeros in the tail."""
    if _stores_matrix(fmt, offs):
        return scales
    tiles = tile_view(fmt, scales, columnwise=False)
    tiles = tiles if offs is not None else tiles.flatten(0, 1)
    slot_scales = linear_scales(fmt, tiles, False, shape[-1]).flatten(0, 1)
    width = slot_scales.shape[1]
    slot, _ = _slot_rows(shape, offs, scales.device)
    rows = torch.cat([slot_scales, slot_scales.new_zeros(1, width)])[slot]
    return scale_numbers(scale, rows.view(*shape[:-1], width))


def _level_buffers(
    fmt: Format,
    codes: Tensor,
    level_tensors: Mapping[str, Tensor | None],
    offs: Tensor | None,
    groups: int,
) -> list[Tensor]:
    """Return the buffers of the global scale, from the tensors that the caller gave."""
    level = fmt.global_scale
    vectors = {name: t for name, t in level_tensors.items() if t is not None}
    if level is None:
        if vectors:
            raise ValueError(
                f"{', '.join(vectors)} given, but {fmt.text} has no scales above its blocks"
            )
        return []
    count = tuple(codes.shape[:-1]) if level.per == "row" else (groups,)
    for name, t in vectors.items():
        vectors[name] = t.expand(count).contiguous() if t.numel() == 1 else t
        check_tensor(name, vectors[name], dtypes=(torch.float32,), shape=count)
    amax, global_scale = vectors.get("amax"), vectors.get("global_scale")
    if level.buffers == ("amax",):
        if "scale" in vectors or len(vectors) != 1:
            names = " and ".join(vectors) or "none"
            raise ValueError(f"{fmt.text} takes either amax or global_scale, got {names}")
        if global_scale is None:
            return [vectors["amax"]]
        # In fp64, so that the product of this amax and the factor is nearest to the scale.
        factor = float(torch.tensor(level.factor, dtype=torch.float32, device="cpu"))
        return [(global_scale.double() / factor).float()]
    if global_scale is None:
        raise ValueError(f"global_scale is missing: a value of {fmt.text} is code * global_scale")
    amax = ops.grouped_amax(codes.float(), offs) * global_scale if amax is None else amax
    return [global_scale, vectors.get("scale", global_scale.reciprocal()), amax]
