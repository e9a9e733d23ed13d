"""Tensors of a checkpoint that form a weight: checks of their headers and numbers, and reading."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.layout.shapes import ceil_div

from .files import PLAIN_DTYPES, Header, Reader
from .layouts import LAYOUTS, Layout
from .plain_tensors import WeightTensors

#: Dtypes by their names in safetensors. Tensors of other dtypes are not read.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Masks of the bits of a byte that are not signs, by the number of codes in the byte.
_MAGNITUDES = {1: 0x7F, 2: 0x77}


class Stored(NamedTuple):
    """Tensors of a checkpoint that form a plain or a quantized weight.

    Attributes:
        files: The folder.
        layout: Layout of a quantized weight. None for a plain tensor.
        names: Names of the tensors. They are one plain tensor, or codes, scales and a global scale
            as in the layout.
        shape: Shape of the weight. It is (N, K), or (G, N, K) if one tensor has all experts. A
            plain tensor may have any shape.
    """

    files: Reader
    layout: Layout | None
    names: list[str]
    shape: tuple[int, ...]

    # ---- headers

    def check_headers(self, target: torch.dtype, note: str = "") -> None:
        """Check shapes and dtypes without reading a number.

        Args:
            target: Dtype of the parameter.
            note: Further text of errors about the shape of the codes, or of the plain tensor.

        Raises:
            ValueError: A shape or dtype differs from the layout, or a plain tensor cannot be cast
                to ``target``.
        """
        if self.layout is None:
            (name,) = self.names
            header = self.files.header(name)
            self._check_plain_dtype(name, header, target)
            self._check_shape(name, header.shape, self.shape, note)
            return
        if target not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"{self.names[0]} is quantized, its parameter must be bf16, fp16 or fp32, got "
                f"{target}"
            )
        multiple = self.layout.fmt.k_multiple
        if self.shape[-1] % multiple:
            raise ValueError(
                f"{self.names[0]} is of the layout {self.layout.name}, whose weights have a "
                f"multiple of {multiple} columns; the module's weight has the shape {self.shape}"
            )
        codes, scales, *global_scales = self.names
        shapes = self._shapes()
        if self._is_transposed:
            shapes = self.files.shape(codes), self.files.shape(scales)
        self._check_dtype(codes, (_NAMES[self.layout.fmt.element.dtype],))
        self._check_shape(codes, self.files.shape(codes), shapes[0], note)
        self._check_dtype(scales, _scale_dtypes(self._scale_dtype))
        self._check_shape(scales, self.files.shape(scales), shapes[1])
        for name in global_scales:
            self._check_dtype(name, _scale_dtypes(torch.float32))
            count = torch.Size(self.files.shape(name)).numel()
            groups = self._group_shape[0] if self._group_shape else 0
            if count not in (1, groups):
                choices = f"one number, or {groups}" if self._group_shape else "one number"
                raise ValueError(
                    f"{self._describe(name)} must have {choices}, got {self.files.header(name)}"
                )

    @property
    def _group_shape(self) -> tuple[int, ...]:
        """(G,) if one tensor has all experts, else ()."""
        return self.shape[:-2]

    @property
    def _scale_dtype(self) -> torch.dtype:
        """Dtype of the block scales in memory."""
        assert self.layout is not None and self.layout.fmt.scale is not None
        return self.layout.scale or self.layout.fmt.scale.element.dtype

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of codes and scales in the layout."""
        layout, (rows, columns) = self.layout, self.shape[-2:]
        assert layout is not None and layout.fmt.scale is not None
        if layout.shapes is not None:
            codes, scales = layout.shapes(rows, columns)
        else:
            fmt, block = layout.fmt, layout.fmt.scale.vec_size
            codes = (rows, fmt.element.width(columns))
            scales = (ceil_div(rows, block) if fmt.has_squares else rows, ceil_div(columns, block))
        return (*self._group_shape, *codes), (*self._group_shape, *scales)

    @property
    def _is_transposed(self) -> bool:
        """True if codes and scales of all experts are (G, K, N).

        ModelOpt writes them like this for models whose weights are (G, K, N). Only codes that share
        bytes can be detected by their shape: a square matrix of bytes has the same shape in both
        orders.
        """
        if self.layout is None or self.layout.fmt.element.per_byte == 1:
            return False
        shapes = self._shapes()
        actual = [self.files.shape(name) for name in self.names[:2]]
        return (
            bool(self._group_shape)
            and actual != [*shapes]
            and actual == [(s[0], *s[:0:-1]) for s in shapes if len(s) == 3]
        )

    def _check_plain_dtype(self, name: str, header: Header, target: torch.dtype) -> None:
        """Raise ValueError if a plain tensor cannot be cast to ``target``."""
        dtype = _DTYPES.get(header.dtype)
        is_known = dtype is not None and (
            header.dtype in PLAIN_DTYPES or not dtype.is_floating_point
        )
        if not is_known or dtype.is_floating_point != target.is_floating_point:  # type: ignore[union-attr]
            raise ValueError(
                f"{name} is {dtype or header.dtype} without the scales of a layout "
                f"({', '.join(LAYOUTS)}), for {target} (in {self.files.path(name)})"
            )

    def _check_dtype(self, name: str, dtypes: tuple[str, ...]) -> None:
        header = self.files.header(name)
        if header.dtype not in dtypes:
            raise ValueError(
                f"{self._describe(name)} must be {' or '.join(dtypes)} in the layout "
                f"{self.layout and self.layout.name}, got {header}"
            )

    def _check_shape(
        self, name: str, actual: tuple[int, ...], shape: tuple[int, ...], note: str = ""
    ) -> None:
        if actual != shape:
            raise ValueError(
                f"{self._describe(name)} must have the shape {shape}, the checkpoint has "
                f"{actual}{note}"
            )

    def _describe(self, name: str) -> str:
        return self.files.describe(name)

    # ---- numbers

    def check_values(self, groups: range | None = None) -> bool:
        """Check the numbers of block scales and global scales. Plain tensors are not read.

        Args:
            groups: Experts to check in a tensor of all experts. None checks all.

        Returns:
            True if a top-level scale (the global scale, or else a block scale) is zero. All codes
            under it are zeros then.

        Raises:
            ValueError: A scale is NaN, infinite or negative, or it is zero over codes that are not
                zeros. Or the layout cannot convert the scales.
        """
        if self.layout is None:
            return False
        has_zero = False
        for rows in self._chunks(groups):
            scales, global_scale = self._scales(rows), self._global_scale(rows)
            self._check_numbers(
                self.names[1], scales.float(), "block scales must be finite and not negative"
            )
            top, name = scales.float(), self.names[1]
            if global_scale is not None:
                top, name = self.layout.amax(global_scale), self.names[2]
                is_wrong = ~(global_scale >= 0) | ~top.isfinite()
                rule = "a global scale must be a positive, finite number"
                self._check_numbers(name, global_scale, rule, is_wrong)
            elif self.layout.scale is None:
                is_wrong = ~(top * self.layout.fmt.element.max).isfinite()
                self._check_numbers(
                    name, top, "codes times block scales must be within the range of fp32", is_wrong
                )
            if bool((top == 0).any()):
                has_zero = True
                codes = self._read(self.names[0], rows)
                if not bool(((top != 0) | self._zeros(codes, global_scale is None)).all()):
                    raise ValueError(
                        f"{self._describe(name)} has a scale of zero over codes that are not "
                        "zeros: the file is damaged"
                    )
                del codes
            if self.layout.check is not None:
                try:
                    self.layout.check(lambda rows=rows: self._read(self.names[0], rows), scales)  # type: ignore[misc]
                except ValueError as error:
                    raise ValueError(f"{self._describe(self.names[0])}: {error}") from None
        return has_zero

    def _chunks(self, groups: range | None) -> Iterator[slice | None]:
        """Iterate over the experts, so that one is in memory at a time.

        Tensors of one expert give None.
        """
        if not self._group_shape:
            return iter([None])
        return (
            slice(g, g + 1) for g in (range(self._group_shape[0]) if groups is None else groups)
        )

    def _check_numbers(
        self, name: str, numbers: Tensor, rule: str, is_wrong: Tensor | None = None
    ) -> None:
        """Raise ValueError with ``rule`` if a number is wrong; by default, if not in [0, inf)."""
        if is_wrong is None:
            is_wrong = ~(numbers >= 0) | ~numbers.isfinite()
        if bool(is_wrong.any()):
            raise ValueError(
                f"{self._describe(name)} has {numbers[is_wrong].flatten()[0].item():g}: {rule}"
            )

    def _zeros(self, codes: Tensor, by_block: bool) -> Tensor:
        """Return True, (), if all codes of an expert are zeros; or this for each of its blocks."""
        assert self.layout is not None and self.layout.fmt.scale is not None
        fmt, block = self.layout.fmt, self.layout.fmt.scale.vec_size
        zeros = codes.view(torch.uint8) & _MAGNITUDES[fmt.element.per_byte] == 0
        if not by_block:
            return zeros.all()
        for dim, size in ((-2, block if fmt.has_squares else 1), (-1, fmt.element.width(block))):
            blocks = zeros.split(size, dim)
            zeros = torch.cat([codes.all(dim, keepdim=True) for codes in blocks], dim)
        return zeros

    def _read(self, name: str, rows: slice | None) -> Tensor:
        t = self.files[name] if rows is None else self.files.rows(name, rows)
        return t.mT.contiguous() if t.dim() == 3 and self._is_transposed else t

    def _scales(self, rows: slice | None) -> Tensor:
        """Read block scales."""
        name = self.names[1]
        scales = self._read(name, rows)
        return (
            scales.view(self._scale_dtype)
            if scales.dtype == torch.uint8
            else self._exact(name, scales, self._scale_dtype)
        )

    def _exact(self, name: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert ``t`` to ``dtype``. Raise ValueError if that rounds a number."""
        if t.dtype == dtype:
            return t
        converted = t.to(dtype)
        if not torch.equal(converted.double().nan_to_num(), t.double().nan_to_num()):
            raise ValueError(
                f"{self._describe(name)} has numbers of {t.dtype} that {dtype} cannot represent "
                "exactly"
            )
        return converted

    def _global_scale(self, rows: slice | None) -> Tensor | None:
        """Read the global scale, () or (G,), fp32, or None if there is none."""
        if len(self.names) < 3:
            return None
        name = self.names[2]
        is_shared = torch.Size(self.files.shape(name)).numel() == 1
        stored = self._read(name, None if is_shared else rows).flatten()
        global_scale = self._exact(name, stored, torch.float32)
        if rows is None:
            return global_scale.reshape(self._group_shape)
        return global_scale.expand(rows.stop - rows.start) if is_shared else global_scale

    def read_quantized(self, groups: range | None, device: torch.device) -> WeightTensors:
        """Read a quantized weight. ``groups`` selects experts in a tensor of all experts."""
        assert self.layout is not None
        rows = (
            slice(groups.start, groups.stop) if self._group_shape and groups is not None else None
        )
        tensors = [self._read(self.names[0], rows), self._scales(rows)]
        if (global_scale := self._global_scale(rows)) is not None:
            tensors.append(global_scale)
        return self.layout.weight_tensors(*(t.to(device) for t in tensors))

    def read_plain(self, rows: range | None = None) -> Tensor:
        """Read a weight as plain values, or ``rows`` along its leading dimension.

        A quantized weight is decoded completely before its rows are selected.
        """
        if self.layout is not None:
            decoded = self.read_quantized(None, torch.device("cpu")).decoded(self.layout.fmt)
            return decoded if rows is None else decoded[rows.start : rows.stop]
        return self._read(self.names[0], None if rows is None else slice(rows.start, rows.stop))


def _scale_dtypes(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the stored dtypes that are accepted for scales of ``dtype``."""
    alternative = "U8" if dtype.itemsize == 1 else "F8_E8M0"
    return tuple(dict.fromkeys((_NAMES[dtype], alternative, *PLAIN_DTYPES)))
