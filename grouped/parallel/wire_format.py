"""Quantized rows as bytes: each row travels between ranks together with its scales."""

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

#: Words to which rows are padded, so that received codes are aligned as kernels require.
_ALIGNMENT = 4


def check_wire(name: str, fmt: Format | None) -> None:
    """Raise ValueError unless rows of ``fmt`` can travel alone: they share no scale."""
    if fmt is None:
        return
    check_format(name, fmt)
    if not _has_independent_rows(fmt):
        similar = _similar_with_independent_rows(fmt)
        advice = (
            "FP8Block(), MXFP8() and NVFP4(row_scaled=True) do"
            if similar is None
            else f"use {similar} instead"
        )
        raise ValueError(f"{name} must quantize each row by itself, which {fmt} does not: {advice}")


def _has_independent_rows(fmt: Format) -> bool:
    """Return True if the codes and scales of a row depend on that row alone."""
    level = fmt.global_scale
    return not (
        fmt.is_2d
        or fmt.is_stochastic
        or fmt.has_given_scale
        or (level is not None and level.per != "row")
    )


def _similar_with_independent_rows(fmt: Format) -> str | None:
    """Return the constructor call of a format of the same class with independent rows, or None."""
    default: Any = type(fmt)()
    options = {
        "row_scaled": True,
        "stochastic_rounding": False,
        "block": getattr(default, "block", None),
    }
    names = [field.name for field in dataclasses.fields(default)]
    changes = {name: options[name] for name in names if name in options}
    similar = dataclasses.replace(default, **changes)
    if not _has_independent_rows(similar):
        return None
    arguments = [
        f"{name}={getattr(similar, name)!r}"
        for name in names
        if getattr(similar, name) != getattr(default, name)
    ]
    return f"{type(fmt).__name__}({', '.join(arguments)})"


def pack(x: Tensor, fmt: Format) -> Tensor:
    """Quantize rows and join the codes and scales of each row.

    A row with a value that is not finite stays so after ``unpack`` (``Format.nan_scales``).

    Args:
        x: (T, H), bf16, fp16 or fp32.
        fmt: A format with independent rows, see ``check_wire``.

    Returns:
        (T, W) int32: codes, block scales and global scale of each row, padded to 16 bytes.
    """
    num_rows, fmt = len(x), dataclasses.replace(fmt, nan_scales=True)  # type: ignore[type-var]
    quantized = ops.grouped_quantize(x, fmt.text, offs=_one_group(x))
    words = []
    for name, buffer in zip(fmt.buffer_names(columnwise=False), quantized, strict=True):
        if name == "scales" and fmt.has_scale_tiles:
            # The scales of row r of a tile are the 4 bytes from (r % 32) * 16 + r // 32 * 4 on.
            tiles = buffer.view(torch.int32).view(-1, buffer.shape[1], TILE_ROWS // 4, 4)
            row_scales = tiles.permute(0, 3, 2, 1).reshape(-1, buffer.shape[1])[:num_rows]
            words.append(row_scales)
        elif name == "codes":
            words.append(buffer.view(torch.int32))
        else:
            row_scales = buffer.T[:num_rows] if name == "scales" else buffer.unsqueeze(1)
            words.append(row_scales.clone(memory_format=torch.contiguous_format).view(torch.int32))
    width = sum(w.shape[1] for w in words)
    return torch.cat([*words, words[0].new_zeros(num_rows, -width % _ALIGNMENT)], dim=1)


def unpack(flat: Tensor, columns: int, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Decode rows that ``pack`` made.

    Args:
        flat: (T, W) int32.
        columns: H.
        fmt: The format of the rows.
        dtype: Dtype of the result.

    Returns:
        (T, H) of ``dtype``.
    """
    num_rows, start = len(flat), 0
    buffers_by_name: dict[str, Tensor] = {}
    for name, spec in buffers(fmt, (num_rows, columns), 1).items():
        if name == "scales":
            width = spec.shape[1] if fmt.has_scale_tiles else spec.shape[0]
        else:
            width = spec.shape[-1] * spec.dtype.itemsize // 4 if name == "codes" else 1
        words, start = flat[:, start : start + width], start + width
        if name == "scales" and fmt.has_scale_tiles:
            padded = pad(words, (0, 0, 0, spec.shape[0] * TILE_ROWS - num_rows))
            tiles = padded.view(-1, 4, TILE_ROWS // 4, width).permute(0, 3, 2, 1)
            words = tiles.reshape(-1, width, SF_TILE_BYTES // 4)
        elif name == "scales":
            words = pad(words.T, (0, spec.shape[1] - num_rows)).contiguous()
        elif name != "codes":
            words = words.flatten()
        buffers_by_name[name] = words.view(spec.dtype)
    codes, *scales = (buffers_by_name[name] for name in fmt.operand_names(columnwise=False))
    return ops.grouped_dequantize(
        codes, scales, fmt.text, num_rows, dtype, offs=_one_group(flat), columnwise=False
    )


def _one_group(x: Tensor) -> Tensor:
    """Return the offs of one group with all rows of ``x``."""
    return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
