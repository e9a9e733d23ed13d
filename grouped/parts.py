"""The plain tensors of a quantized tensor as files have them, to and from the buffers of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.layout.buffers import BufferSpec, buffers
from cute_kernels.layout.shapes import ceil_div
from cute_kernels.layout.slots import TILE_ROWS
from cute_kernels.ops.checks import check_multiple, check_tensor, same_device
from cute_kernels.records import check_choice
from cute_kernels.reference.groups import Groups
from cute_kernels.reference.scales import lay_scales, linear_scales, tile_view
from grouped.members import QuantizedCopy
from grouped.validation import check_format

if TYPE_CHECKING:
  from collections.abc import Mapping, Sequence

  from cute_kernels.formats import BlockScale, Format

#: How block scales lie: a matrix, as in checkpoints, or what ``layout.buffers`` has.
Layout = Literal["linear", "tiles"]
_LAYOUTS = ("linear", "tiles")


def joined_parts(
  fmt: Format,
  codes: Tensor,
  scales: Tensor | None,
  second: Mapping[str, Tensor | None],
  offs: Tensor | None,
  layout: Layout,
) -> tuple[tuple[int, ...], QuantizedCopy]:
  """The shape and the rowwise copy that parts make: see ``GroupedTensor.from_parts``.

  Args:
    fmt: the format.
    codes: (T, K) with ``offs``, (G, N, K) without, packed.
    scales: block scales, or None.
    second: ``amax``, ``global_scale`` and ``scale``, None where not given.
    offs: (G,) int32, or None.
    layout: of the scales.
  """
  check_format("fmt", fmt)
  check_choice("layout", layout, _LAYOUTS)
  check_tensor("codes", codes, ndim=(3,) if offs is None else (2,))
  element = fmt.element.dtype
  codes = _stored("codes", codes, element, element if fmt.element.holds_nan else torch.float4_e2m1fn_x2)
  shape = (*codes.shape[:-1], fmt.element.count(codes.shape[-1]))
  check_multiple("K", shape[-1], fmt.k_multiple, f"the last dimension of {fmt.text}")
  same_device("codes", codes.device, scales=scales, **second)
  specs = buffers(fmt, shape, None if offs is None else offs.shape[0])
  parts = [_laid(codes, specs["codes"])]
  if (scales is None) != (fmt.scale is None):
    raise ValueError(f"scales {'are missing: ' if scales is None else 'are given, but there are none in '}{fmt.text}")
  if scales is not None and fmt.scale is not None:
    scales = _stored("scales", scales, fmt.scale.dtype, fmt.scale.element.dtype)
    if layout == "linear":
      scales = _tiled(fmt, fmt.scale, scales, shape, offs, specs["scales"])
    parts.append(scales)
  groups = shape[0] if offs is None else offs.shape[0]
  parts += _second_level(fmt, codes, second, offs, groups)
  return shape, QuantizedCopy(fmt, parts)


def split_parts(
  fmt: Format, shape: Sequence[int], offs: Tensor | None, copy: QuantizedCopy, layout: Layout, global_scale: bool
) -> dict[str, Tensor]:
  """Undo ``joined_parts``: see ``GroupedTensor.to_parts``."""
  check_choice("layout", layout, _LAYOUTS)
  found = copy._asdict()
  scale, level = fmt.scale, fmt.second_level
  if scale is not None and layout == "linear":
    found["scales"] = _linear(fmt, scale, found["scales"], shape, offs)
  if "scale_inv" in found:
    found["global_scale"] = found.pop("scale_inv")
  elif level is not None and global_scale:
    found["global_scale"] = found.pop("amax") * level.factor
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
  """The slot row of each row, the row past all slots for rows of the tail; and how many slots there are."""
  groups = Groups.of(shape, offs, device)
  group, end = groups.group_of_row(), groups.num_tiles * TILE_ROWS
  first = torch.cat([groups.first_tile * TILE_ROWS - groups.starts, torch.zeros_like(group[:1])])
  row = torch.arange(len(group), device=device)
  return torch.where(group < len(groups), row + first[group], end), end


def _is_stored_once(fmt: Format, scale: BlockScale) -> bool:
  """Whether a square block has one scale, not one in each of its rows."""
  return fmt.is_2d and scale.layout == "mn_major"


def _tiled(
  fmt: Format, scale: BlockScale, linear: Tensor, shape: Sequence[int], offs: Tensor | None, spec: BufferSpec
) -> Tensor:
  """A matrix of scales in the layout of buffers."""
  wanted = (*shape[:-1], ceil_div(shape[-1], scale.vec_size))
  if _is_stored_once(fmt, scale):
    _refuse_ragged(fmt, offs)
    wanted = spec.shape
  check_tensor("scales", linear, shape=wanted)
  if _is_stored_once(fmt, scale):
    return linear.contiguous()
  slot, count = _slots(shape, offs, linear.device)
  by_slot = linear.new_zeros(count + 1, wanted[-1])
  by_slot[slot] = linear.flatten(0, -2)
  out = spec.allocate(linear.device, True)
  view = tile_view(fmt, out, columnwise=False)
  view.copy_(lay_scales(fmt, by_slot[:count].view(-1, TILE_ROWS, wanted[-1]), False).view(view.shape))
  return out


def _linear(fmt: Format, scale: BlockScale, scales: Tensor, shape: Sequence[int], offs: Tensor | None) -> Tensor:
  """Scales of a buffer as a matrix, of zeros in the tail."""
  if _is_stored_once(fmt, scale):
    _refuse_ragged(fmt, offs)
    return scales
  tiles = tile_view(fmt, scales, columnwise=False)
  by_slot = linear_scales(fmt, tiles if offs is not None else tiles.flatten(0, 1), False, shape[-1]).flatten(0, 1)
  slot, _ = _slots(shape, offs, scales.device)
  rows = torch.cat([by_slot, by_slot.new_zeros(1, by_slot.shape[1])])[slot].view(*shape[:-1], -1)
  return rows.view(scale.element.dtype) if scale.element.dtype.is_signed else rows


def _refuse_ragged(fmt: Format, offs: Tensor | None) -> None:
  if offs is not None:
    raise ValueError(f"{fmt.text} with offs has no linear scales, for blocks start where groups do: use layout='tiles'")


def _second_level(
  fmt: Format, codes: Tensor, given: Mapping[str, Tensor | None], offs: Tensor | None, groups: int
) -> list[Tensor]:
  """The vectors of the second level, from those that are given."""
  level = fmt.second_level
  names = [name for name, t in given.items() if t is not None]
  if level is None:
    if names:
      raise ValueError(f"{', '.join(names)} given, but {fmt.text} has no scales above its blocks")
    return []
  count = codes.shape[:-1] if level.per == "row" else (groups,)
  vectors: dict[str, Tensor] = {}
  for name, t in given.items():
    if t is not None:
      check_tensor(name, t, dtypes=(torch.float32,))
      vectors[name] = t.expand(count).contiguous() if t.numel() == 1 else t
      check_tensor(name, vectors[name], shape=tuple(count))
  if level.buffers == ("amax",):
    if len(names) != 1 or names == ["scale"]:
      raise ValueError(f"{fmt.text} takes either amax or global_scale, got {' and '.join(names) or 'none'}")
    if "amax" in vectors:
      return [vectors["amax"]]
    # The amax whose product with the factor, rounded, is nearest to the scale.
    factor = torch.tensor(level.factor, dtype=torch.float32).double()
    return [(vectors["global_scale"].double() / factor.to(codes.device)).float()]
  if "global_scale" not in vectors:
    raise ValueError(f"global_scale is missing: a value of {fmt.text} is code * global_scale")
  inverse = vectors["global_scale"]
  scale = vectors.get("scale", inverse.reciprocal())
  amax = vectors.get("amax")
  if amax is None:
    numbers = codes.to(torch.float32)
    amax = ops.grouped_amax(numbers, offs) * inverse
  return [inverse, scale, amax]
