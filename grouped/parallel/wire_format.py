"""Quantized rows as bytes, a row with its scales: what travels between processes."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_kernels import ops
from cute_kernels.formats import Format
from cute_kernels.layout.buffers import buffers
from cute_kernels.layout.shapes import SF_TILE_BYTES
from cute_kernels.layout.slots import TILE_ROWS

from ..tensor.validation import check_format

#: Words, so that rows of codes lie as kernels take them where they arrive.
_ALIGNMENT = 4


def check_wire(name: str, fmt: Format | None) -> None:
    """Raise unless rows of ``fmt`` can travel by themselves: they share no scale with other rows."""
    if fmt is None:
        return
    check_format(name, fmt)
    if not _is_by_rows(fmt):
        similar = _by_rows(fmt)
        advice = (
            "FP8Block(), MXFP8() and NVFP4(row_scaled=True) do"
            if similar is None
            else f"use {similar} instead"
        )
        raise ValueError(f"{name} must quantize each row by itself, which {fmt} does not: {advice}")


def _is_by_rows(fmt: Format) -> bool:
    level = fmt.global_scale
    return not (
        fmt.is_2d
        or fmt.is_stochastic
        or fmt.has_given_scale
        or (level is not None and level.per != "row")
    )


def _by_rows(fmt: Format) -> str | None:
    """Constructor of the format of the same class that quantizes each row by itself, if there is
    one.
    """
    default: Any = type(fmt)()
    wanted = {
        "row_scaled": True,
        "stochastic_rounding": False,
        "block": getattr(default, "block", None),
    }
    names = [field.name for field in dataclasses.fields(default)]
    similar = dataclasses.replace(
        default, **{name: wanted[name] for name in names if name in wanted}
    )
    if not _is_by_rows(similar):
        return None
    changed = (name for name in names if getattr(similar, name) != getattr(default, name))
    return f"{type(fmt).__name__}({', '.join(f'{name}={getattr(similar, name)!r}' for name in changed)})"


def pack(x: Tensor, fmt: Format) -> Tensor:
    """(T, H) rows quantized to ``fmt``, as (T, W) int32: codes, block scales, second level,
    padding.

    What is not finite in a row is not finite where it arrives (``Format.nan_scales``).
    """
    rows, fmt = len(x), dataclasses.replace(fmt, nan_scales=True)  # type: ignore[type-var]
    quantized = ops.grouped_quantize(x, fmt.text, _one_group(x), None, True, False, None, None)
    parts = []
    for name, part in zip(fmt.buffer_names(columnwise=False), quantized, strict=True):
        if name == "scales" and fmt.has_scale_tiles:
            # Bytes (r % 32) * 16 + r // 32 * 4 and three more of a tile are the scales of its row
            # r.
            tiles = part.view(torch.int32).view(-1, part.shape[1], TILE_ROWS // 4, 4)
            parts.append(tiles.permute(0, 3, 2, 1).reshape(-1, part.shape[1])[:rows])
        else:
            part = (
                part.T[:rows]
                if name == "scales"
                else part
                if name == "codes"
                else part.unsqueeze(1)
            )
            parts.append(
                (
                    part if name == "codes" else part.clone(memory_format=torch.contiguous_format)
                ).view(torch.int32)
            )
    width = sum(part.shape[1] for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(rows, -width % _ALIGNMENT)], dim=1)


def unpack(flat: Tensor, columns: int, fmt: Format, dtype: torch.dtype) -> Tensor:
    """(N, H) of ``dtype``: what (N, W) int32 of ``pack`` decode to."""
    rows, start = len(flat), 0
    found: dict[str, Tensor] = {}
    for name, spec in buffers(fmt, (rows, columns), 1).items():
        if name == "scales":
            width = spec.shape[1] if fmt.has_scale_tiles else spec.shape[0]
        else:
            width = spec.shape[-1] * spec.dtype.itemsize // 4 if name == "codes" else 1
        part, start = flat[:, start : start + width], start + width
        if name == "scales" and fmt.has_scale_tiles:
            part = pad(part, (0, 0, 0, spec.shape[0] * TILE_ROWS - rows)).view(
                -1, 4, TILE_ROWS // 4, width
            )
            part = part.permute(0, 3, 2, 1).reshape(-1, width, SF_TILE_BYTES // 4)
        elif name == "scales":
            part = pad(part.T, (0, spec.shape[1] - rows)).contiguous()
        elif name != "codes":
            part = part.flatten()
        found[name] = part.view(spec.dtype)
    codes, *rest = (found[name] for name in fmt.operand_names(columnwise=False))
    return ops.grouped_dequantize(codes, rest, fmt.text, rows, dtype, _one_group(flat), False, None)


def _one_group(x: Tensor) -> Tensor:
    return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
