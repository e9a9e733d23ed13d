"""Quantized rows as bytes, a row with its scales: what travels between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_kernels import ops
from cute_kernels.layout.buffers import buffers
from cute_kernels.layout.shapes import SF_TILE_BYTES
from cute_kernels.layout.slots import TILE_ROWS
from grouped.validation import check_format

if TYPE_CHECKING:
  from cute_kernels.formats import Format

#: So that rows of codes lie as kernels take them where they arrive.
_ALIGNMENT = 16


def check_wire(name: str, fmt: Format | None) -> None:
  """Raise unless rows of ``fmt`` can travel by themselves: they share no scale with other rows."""
  if fmt is None:
    return
  check_format(name, fmt)
  level = fmt.second_level
  if fmt.is_2d or fmt.is_stochastic or fmt.takes_scale or (level is not None and level.per != "row"):
    raise ValueError(
      f"{name} must quantize each row by itself, such as FP8Block(), MXFP8() or NVFP4(row_scaled=True), got {fmt}"
    )


def pack(x: Tensor, fmt: Format) -> Tensor:
  """(T, H) rows quantized to ``fmt``, as (T, W) bytes: codes, block scales, second level, padding."""
  rows, columns = x.shape
  quantized = ops.grouped_quantize(x, fmt.text, _one_group(x), None, True, False, None, None)
  named = dict(zip(fmt.buffer_names(columnwise=False), quantized, strict=True))
  parts = [named.pop("codes")]
  if fmt.scale is not None:
    scales = named.pop("scales")
    if fmt.scale.layout == "tiles_128x4":
      # Byte (r % 32) * 16 + r // 32 * 4 + c % 4 of a tile is the scale of row r and block c.
      tiles = scales.view(-1, scales.shape[1], TILE_ROWS // 4, 4, 4)
      scales = tiles.permute(0, 3, 2, 1, 4).reshape(-1, scales.shape[1] * 4)
      parts.append(scales[:rows, : columns // fmt.scale.vec_size])
    else:
      parts.append(scales.T[:rows].clone(memory_format=torch.contiguous_format))
  parts += [vector.unsqueeze(1) for vector in named.values()]
  flat = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
  return pad(flat, (0, -flat.shape[1] % _ALIGNMENT))


def unpack(flat: Tensor, columns: int, fmt: Format, dtype: torch.dtype) -> Tensor:
  """(N, H) of ``dtype``: what (N, W) bytes of ``pack`` decode to."""
  rows, start = len(flat), 0
  found: dict[str, Tensor] = {}
  for name, spec in buffers(fmt, (rows, columns), 1).items():
    tiled = name == "scales" and fmt.scale is not None and fmt.scale.layout == "tiles_128x4"
    width = spec.shape[-1] if name == "codes" else 1
    if name == "scales" and fmt.scale is not None:
      width = columns // fmt.scale.vec_size if tiled else spec.shape[0]
    end = start + width * spec.dtype.itemsize
    part = (
      flat[:, start:end].view(spec.dtype)
      if name == "codes"
      else flat[:, start:end].clone(memory_format=torch.contiguous_format).view(spec.dtype)
    )
    start = end
    if tiled:
      across = spec.shape[1]
      part = pad(part, (0, across * 4 - width, 0, spec.shape[0] * TILE_ROWS - rows))
      part = part.view(-1, 4, TILE_ROWS // 4, across, 4).permute(0, 3, 2, 1, 4).reshape(-1, across, SF_TILE_BYTES)
    elif name == "scales":
      part = pad(part.T, (0, spec.shape[1] - rows)).contiguous()
    elif name != "codes":
      part = part.flatten()
    found[name] = part
  codes, *rest = (found[name] for name in fmt.operand_names(columnwise=False))
  out: Tensor = ops.grouped_dequantize(codes, rest, fmt.text, rows, dtype, _one_group(flat), False, None)
  return out


def _one_group(x: Tensor) -> Tensor:
  return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
