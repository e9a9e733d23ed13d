"""The plain tensors of a quantized tensor as files have them, to and from the buffers of kernels."""

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

from .members import QuantizedCopy, numbers_of
from .validation import check_format

#: How block scales lie: a matrix, as in checkpoints, or what ``layout.buffers`` has.
Layout = Literal["linear", "tiles"]
_LAYOUTS = ("linear", "tiles")


def join_parts(
    fmt: Format,
    codes: Tensor,
    scales: Tensor | None,
    second: Mapping[str, Tensor | None],
    offs: Tensor | None,
    layout: Layout,
) -> tuple[tuple[int, ...], QuantizedCopy]:
    """The shape and the rowwise copy that parts make: see ``GroupedTensor.from_parts``.

    ``second`` has ``amax``, ``global_scale`` and ``scale``, None where not given.
    """
    check_format("fmt", fmt)
    check_choice("layout", layout, _LAYOUTS)
    check_tensor("codes", codes, ndim=(3,) if offs is None else (2,))
    element = fmt.element.dtype
    codes = _stored(
        "codes", codes, element, element if fmt.element.has_nan else torch.float4_e2m1fn_x2
    )
    shape = (*codes.shape[:-1], fmt.element.count(codes.shape[-1]))
    check_multiple("K", shape[-1], fmt.k_multiple, f"the last dimension of {fmt.text}")
    same_device("codes", codes.device, scales=scales, **second)
    specs = buffers(fmt, shape, None if offs is None else offs.shape[0])
    parts = [_laid(codes, specs["codes"])]
    if (scales is None) != (fmt.scale is None):
        raise ValueError(
            f"scales {'are missing: ' if scales is None else 'are given, but there are none in '}{fmt.text}"
        )
    if scales is not None and fmt.scale is not None:
        scales = _stored("scales", scales, fmt.scale.dtype, fmt.scale.element.dtype)
        parts.append(
            scales
            if layout == "tiles"
            else _tiled(fmt, fmt.scale, scales, shape, offs, specs["scales"])
        )
    groups = shape[0] if offs is None else offs.shape[0]
    return shape, QuantizedCopy(fmt, parts + _second_level(fmt, codes, second, offs, groups))


def split_parts(
    fmt: Format,
    shape: Sequence[int],
    offs: Tensor | None,
    copy: QuantizedCopy,
    layout: Layout,
    global_scale: bool,
) -> dict[str, Tensor]:
    """Undo ``join_parts``: see ``GroupedTensor.to_parts``."""
    check_choice("layout", layout, _LAYOUTS)
    found = copy._asdict()
    if fmt.scale is not None and layout == "linear":
        found["scales"] = _linear(fmt, fmt.scale, found["scales"], shape, offs)
    if "scale_inv" in found:
        found["global_scale"] = found.pop("scale_inv")
    elif fmt.global_scale is not None and global_scale:
        found["global_scale"] = found.pop("amax") * fmt.global_scale.factor
    return found if offs is None else {**found, "offs": offs}


def _stored(name: str, x: Tensor, dtype: torch.dtype, numbers: torch.dtype) -> Tensor:
    """``x`` as buffers hold it: the numbers of one byte as bytes."""
    check_tensor(name, x, dtypes=(dtype,) if dtype == numbers else (numbers, dtype))
    return x.view(dtype)


def _laid(x: Tensor, spec: BufferSpec) -> Tensor:
    """``x`` where kernels can read it: in rows of the pitch of ``spec``."""
    if x.stride() == spec.strides and x.storage_offset() == 0:
        return x
    out = spec.allocate(x.device, True)
    out.view(torch.uint8).copy_(x.view(torch.uint8))
    return out


def _slots(shape: Sequence[int], offs: Tensor | None, device: torch.device) -> tuple[Tensor, int]:
    """The slot row of each row, the row past all slots for rows of the tail; and how many slots
    there are.
    """
    groups = Groups.from_shape(shape, offs, device)
    group, end = groups.group_of_row(), groups.num_tiles * TILE_ROWS
    first = torch.cat([groups.first_tile * TILE_ROWS - groups.starts, torch.zeros_like(group[:1])])
    return torch.where(
        group < len(groups), torch.arange(len(group), device=device) + first[group], end
    ), end


def _is_matrix(fmt: Format, offs: Tensor | None) -> bool:
    """Whether buffers hold the matrix of scales itself, one for each square block."""
    if not fmt.has_squares:
        return False
    if offs is not None:
        raise ValueError(
            f"{fmt.text} with offs has no linear scales, for blocks start where groups do: use layout='tiles'"
        )
    return True


def _tiled(
    fmt: Format,
    scale: BlockScale,
    linear: Tensor,
    shape: Sequence[int],
    offs: Tensor | None,
    spec: BufferSpec,
) -> Tensor:
    is_matrix, width = _is_matrix(fmt, offs), ceil_div(shape[-1], scale.vec_size)
    check_tensor("scales", linear, shape=spec.shape if is_matrix else (*shape[:-1], width))
    if is_matrix:
        return linear.contiguous()
    slot, count = _slots(shape, offs, linear.device)
    by_slot = linear.new_zeros(count + 1, width)
    by_slot[slot] = linear.flatten(0, -2)
    out = spec.allocate(linear.device, True)
    view = tile_view(fmt, out, columnwise=False)
    view.copy_(lay_scales(fmt, by_slot[:count].view(-1, TILE_ROWS, width), False).view(view.shape))
    return out


def _linear(
    fmt: Format, scale: BlockScale, scales: Tensor, shape: Sequence[int], offs: Tensor | None
) -> Tensor:
    """Scales of a buffer as a matrix, of zeros in the tail."""
    if _is_matrix(fmt, offs):
        return scales
    tiles = tile_view(fmt, scales, columnwise=False)
    by_slot = linear_scales(
        fmt, tiles if offs is not None else tiles.flatten(0, 1), False, shape[-1]
    ).flatten(0, 1)
    slot, _ = _slots(shape, offs, scales.device)
    rows = torch.cat([by_slot, by_slot.new_zeros(1, by_slot.shape[1])])[slot].view(
        *shape[:-1], by_slot.shape[1]
    )
    return numbers_of(scale, rows)


def _second_level(
    fmt: Format, codes: Tensor, given: Mapping[str, Tensor | None], offs: Tensor | None, groups: int
) -> list[Tensor]:
    level, vectors = fmt.global_scale, {name: t for name, t in given.items() if t is not None}
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
    amax, decodes = vectors.get("amax"), vectors.get("global_scale")
    if level.buffers == ("amax",):
        if "scale" in vectors or len(vectors) != 1:
            raise ValueError(
                f"{fmt.text} takes either amax or global_scale, got {' and '.join(vectors) or 'none'}"
            )
        # In fp64, so that it is the amax whose product with the factor is nearest to the scale.
        factor = float(torch.tensor(level.factor, dtype=torch.float32))
        return [(decodes.double() / factor).float() if decodes is not None else vectors["amax"]]
    if decodes is None:
        raise ValueError(f"global_scale is missing: a value of {fmt.text} is code * global_scale")
    amax = ops.grouped_amax(codes.float(), offs) * decodes if amax is None else amax
    return [decodes, vectors.get("scale", decodes.reciprocal()), amax]
