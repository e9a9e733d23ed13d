"""The tensors of a file that make a weight: what their headers must say, which numbers scales may
have.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.layout.shapes import ceil_div

from .files import PLAIN_DTYPES, Header, Reader
from .layouts import LAYOUTS, Layout
from .plain_tensors import WeightTensors

#: Dtypes by their names in safetensors; of those that it does not have no tensor is read.
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
#: Bits of a byte that are not signs, by the number of codes in it.
_MAGNITUDES = {1: 0x7F, 2: 0x77}


class Stored(NamedTuple):
    """Tensors of a file that make a plain or a quantized weight.

    Attributes:
        files: the folder.
        layout: how it is quantized; None for a plain tensor.
        names: the tensor; or codes, scales and the second level, as the layout has them.
        shape: shape of the weight, (N, K) or, if one tensor has all experts, (G, N, K); of a
            plain tensor its own.
    """

    files: Reader
    layout: Layout | None
    names: list[str]
    shape: tuple[int, ...]

    # ---- headers

    def check_headers(self, target: torch.dtype, note: str = "") -> None:
        """Check shapes and dtypes, without reading a number.

        Args:
            target: dtype of the parameter.
            note: further text of an error of the first tensor's shape.

        Raises:
            ValueError: a shape or dtype that the layout does not have, or a plain tensor that
                does not fit ``target``.
        """
        if self.layout is None:
            (name,) = self.names
            header = self.files.header(name)
            self._check_plain_dtype(name, header, target)
            self._check_shape(name, header.shape, self.shape, note)
            return
        if target not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"{self.names[0]} is quantized, its parameter must be bf16, fp16 or fp32, got {target}"
            )
        multiple = self.layout.fmt.k_multiple
        if self.shape[-1] % multiple:
            raise ValueError(
                f"{self.names[0]} is of the layout {self.layout.name}, whose weights have a multiple of {multiple} columns; "
                f"the module's weight has the shape {self.shape}"
            )
        codes, scales, *level = self.names
        shapes = self._shapes()
        if self._is_turned:
            shapes = self.files.shape(codes), self.files.shape(scales)
        self._check_dtype(codes, (_NAMES[self.layout.fmt.element.dtype],))
        self._check_shape(codes, self.files.shape(codes), shapes[0], note)
        self._check_dtype(scales, _scale_dtypes(self._scale))
        self._check_shape(scales, self.files.shape(scales), shapes[1])
        for name in level:
            self._check_dtype(name, _scale_dtypes(torch.float32))
            count, groups = (
                torch.Size(self.files.shape(name)).numel(),
                len(self._lead) and self._lead[0],
            )
            if count != 1 and count != groups:
                raise ValueError(
                    f"{self._at(name)} must have one number{f', or {groups}' * bool(self._lead)}, got {self.files.header(name)}"
                )

    @property
    def _lead(self) -> tuple[int, ...]:
        """(G,) if one tensor has all experts, else ()."""
        return self.shape[:-2]

    @property
    def _scale(self) -> torch.dtype:
        """Dtype of block scales, once they are read."""
        assert self.layout is not None and self.layout.fmt.scale is not None
        return self.layout.scale or self.layout.fmt.scale.element.dtype

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes that codes and scales have in the layout."""
        layout, (rows, columns) = self.layout, self.shape[-2:]
        assert layout is not None and layout.fmt.scale is not None
        if layout.shapes is not None:
            codes, scales = layout.shapes(rows, columns)
        else:
            fmt, block = layout.fmt, layout.fmt.scale.vec_size
            codes = (rows, fmt.element.width(columns))
            scales = (ceil_div(rows, block) if fmt.has_squares else rows, ceil_div(columns, block))
        return (*self._lead, *codes), (*self._lead, *scales)

    @property
    def _is_turned(self) -> bool:
        """True if codes and scales of all experts are (G, K, N), as ModelOpt writes those of models
        with such weights.

        Shapes show it of codes that share bytes only, not of square matrices of others.
        """
        if self.layout is None or self.layout.fmt.element.per_byte == 1:
            return False
        shapes = self._shapes()
        found = [self.files.shape(name) for name in self.names[:2]]
        return (
            bool(self._lead)
            and found != [*shapes]
            and found == [(s[0], *s[:0:-1]) for s in shapes if len(s) == 3]
        )

    def _check_plain_dtype(self, name: str, header: Header, target: torch.dtype) -> None:
        dtype = _DTYPES.get(header.dtype)
        is_known = dtype is not None and (
            header.dtype in PLAIN_DTYPES or not dtype.is_floating_point
        )
        if not is_known or dtype.is_floating_point != target.is_floating_point:  # type: ignore[union-attr]
            raise ValueError(
                f"{name} is {dtype or header.dtype} without the scales of a layout ({', '.join(LAYOUTS)}), for {target} "
                f"(in {self.files.path(name)})"
            )

    def _check_dtype(self, name: str, dtypes: tuple[str, ...]) -> None:
        header = self.files.header(name)
        if header.dtype not in dtypes:
            raise ValueError(
                f"{self._at(name)} must be {' or '.join(dtypes)} in the layout {self.layout and self.layout.name}, got {header}"
            )

    def _check_shape(
        self, name: str, found: tuple[int, ...], shape: tuple[int, ...], note: str = ""
    ) -> None:
        if found != shape:
            raise ValueError(
                f"{self._at(name)} must have the shape {shape}, the checkpoint has {found}{note}"
            )

    def _at(self, name: str) -> str:
        return self.files.where(name)

    # ---- numbers

    def check_values(self, groups: range | None = None) -> bool:
        """Check the numbers of scales and second levels; plain tensors are not read.

        Args:
            groups: the experts that are read of a tensor of all.

        Returns:
            True if a scale that nothing else multiplies is zero; all codes under it are zeros
            then.

        Raises:
            ValueError: a NaN, infinite or negative scale, a zero one over codes that are not
                zeros, or scales that the layout cannot read.
        """
        if self.layout is None:
            return False
        has_zero = False
        for rows in self._chunks(groups):
            scales, level = self._scales(rows), self._level(rows)
            self._check_numbers(
                self.names[1], scales.float(), "block scales must be finite and not negative"
            )
            top, name = scales.float(), self.names[1]
            if level is not None:
                top, name = self.layout.amax(level), self.names[2]
                is_wrong = ~(level >= 0) | ~top.isfinite()
                self._check_numbers(
                    name, level, "a second level must be a positive, finite number", is_wrong
                )
            elif self.layout.scale is None:
                is_wrong = ~(top * self.layout.fmt.element.max).isfinite()
                self._check_numbers(
                    name, top, "codes times block scales must be within the range of fp32", is_wrong
                )
            if bool((top == 0).any()):
                has_zero = True
                if not bool(
                    ((top != 0) | self._zeros(self._read(self.names[0], rows), level is None)).all()
                ):
                    raise ValueError(
                        f"{self._at(name)} has a scale of zero over codes that are not zeros: the file is damaged"
                    )
            if self.layout.check is not None:
                try:
                    self.layout.check(lambda rows=rows: self._read(self.names[0], rows), scales)  # type: ignore[misc]
                except ValueError as error:
                    raise ValueError(f"{self._at(self.names[0])}: {error}") from None
        return has_zero

    def _chunks(self, groups: range | None) -> Iterator[slice | None]:
        """One expert after the other, so that little is in memory at once;

        None for tensors of one expert.
        """
        if not self._lead:
            return iter([None])
        return (slice(g, g + 1) for g in (range(self._lead[0]) if groups is None else groups))

    def _check_numbers(
        self, name: str, numbers: Tensor, rule: str, is_wrong: Tensor | None = None
    ) -> None:
        if is_wrong is None:
            is_wrong = ~(numbers >= 0) | ~numbers.isfinite()
        if bool(is_wrong.any()):
            raise ValueError(
                f"{self._at(name)} has {numbers[is_wrong].flatten()[0].item():g}: {rule}"
            )

    def _zeros(self, codes: Tensor, by_block: bool) -> Tensor:
        """Tell whether all codes of one expert decode to zero, or all of each of its blocks."""
        assert self.layout is not None and self.layout.fmt.scale is not None
        fmt, block = self.layout.fmt, self.layout.fmt.scale.vec_size
        zeros = codes.view(torch.uint8) & _MAGNITUDES[fmt.element.per_byte] == 0
        if not by_block:
            return zeros.all()
        for dim, size in ((-2, block if fmt.has_squares else 1), (-1, fmt.element.width(block))):
            zeros = torch.cat([part.all(dim, keepdim=True) for part in zeros.split(size, dim)], dim)
        return zeros

    def _read(self, name: str, rows: slice | None) -> Tensor:
        t = self.files[name] if rows is None else self.files.rows(name, rows)
        return t.mT.contiguous() if t.dim() == 3 and self._is_turned else t

    def _scales(self, rows: slice | None) -> Tensor:
        name = self.names[1]
        scales = self._read(name, rows)
        return (
            scales.view(self._scale)
            if scales.dtype == torch.uint8
            else self._exact(name, scales, self._scale)
        )

    def _exact(self, name: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert ``t`` to ``dtype``; raise ValueError if that rounds a number."""
        if t.dtype == dtype:
            return t
        converted = t.to(dtype)
        if not torch.equal(converted.double().nan_to_num(), t.double().nan_to_num()):
            raise ValueError(
                f"{self._at(name)} has numbers of {t.dtype} that {dtype} does not hold exactly"
            )
        return converted

    def _level(self, rows: slice | None) -> Tensor | None:
        """The second level, () or (G,) fp32."""
        if len(self.names) < 3:
            return None
        name = self.names[2]
        is_shared = torch.Size(self.files.shape(name)).numel() == 1
        level = self._exact(
            name, self._read(name, None if is_shared else rows).flatten(), torch.float32
        )
        if rows is None:
            return level.reshape(self._lead)
        return level.expand(rows.stop - rows.start) if is_shared else level

    def parts(self, groups: range | None, device: torch.device) -> WeightTensors:
        """Read a quantized weight, or those experts of it."""
        assert self.layout is not None
        rows = slice(groups.start, groups.stop) if self._lead and groups is not None else None
        tensors = [self._read(self.names[0], rows), self._scales(rows)]
        if (level := self._level(rows)) is not None:
            tensors.append(level)
        return self.layout.parts(*(t.to(device) for t in tensors))

    def plain(self, rows: range | None = None) -> Tensor:
        """Read a weight as plain values, all of it or rows of its first dimension; a quantized one
        is decoded whole.
        """
        if self.layout is not None:
            whole = self.parts(None, torch.device("cpu")).decoded(self.layout.fmt)
            return whole if rows is None else whole[rows.start : rows.stop]
        return self._read(self.names[0], None if rows is None else slice(rows.start, rows.stop))


def _scale_dtypes(dtype: torch.dtype) -> tuple[str, ...]:
    """Dtypes in which a file may have scales that are held in ``dtype``."""
    bytes_too = ("U8",) if dtype.itemsize == 1 else ("F8_E8M0",)
    return tuple(dict.fromkeys((_NAMES[dtype], *bytes_too, *PLAIN_DTYPES)))
