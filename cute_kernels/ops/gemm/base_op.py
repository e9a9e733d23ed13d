"""Base classes of the grouped GEMM ops: formats, operands, checks and outputs."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.capability import require
from cute_kernels.formats import Format, parse
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.layout.prepack import unpack
from cute_kernels.layout.shapes import PITCH_ALIGNMENT
from cute_kernels.reference.groups import Groups
from cute_kernels.runtime.backend import Backend

from ..checks import (
    INPUT_DTYPES,
    check_copy,
    check_dtype,
    check_inverse,
    check_multiple,
    check_offs,
    check_seed,
    check_tensor,
    same_device,
)
from ..format_pairs import check_accumulation, check_pair, check_transforms, is_w4a8
from ..op import Op
from .operand_tensors import OperandFields, Operands, OperandTensors

_FP32 = (torch.float32,)


def parse_given(text: str | None) -> Format | None:
    """Return the format of a text, or None for None."""
    return None if text is None else parse(text)


def check_vectors(num_groups: int, cols: int, bias: Tensor | None, alpha: Tensor | None) -> None:
    """Check the vectors of an epilogue.

    Args:
        num_groups: G.
        cols: N.
        bias: (G, N), bf16, fp16 or fp32, or None.
        alpha: (G,), fp32, or None.
    """
    if bias is not None:
        check_tensor("bias", bias, dtypes=INPUT_DTYPES, shape=(num_groups, cols))
    if alpha is not None:
        check_tensor("alpha", alpha, dtypes=_FP32, shape=(num_groups,))


def _scale_positions(
    scales: list[Tensor] | None, fmt: Format | None
) -> tuple[int | None, int | None]:
    """Return the indices of the block scales and of the global scale in a list of scales.

    An index is None if the operand has no such scales.
    """
    if fmt is None or scales is None:
        return None, None
    names = fmt.operand_names(columnwise=False)[1:]
    return 0 if fmt.scale is not None else None, len(names) - 1 if fmt.global_scale else None


def _operand_fields(
    codes: Tensor,
    scales: list[Tensor] | None,
    block_position: int | None,
    global_position: int | None,
) -> OperandFields:
    """Return the fields of one operand, given its list of scales and the positions in it."""
    if scales is None:
        return codes, None, None
    return (
        codes,
        None if block_position is None else scales[block_position],
        None if global_position is None else scales[global_position],
    )


def _read_operands(
    a_positions: tuple[int | None, int | None],
    b_positions: tuple[int | None, int | None],
    op: GroupedGemm,
) -> tuple[OperandFields, OperandFields]:
    """Return the fields of both operands of ``op``, given the positions of their scales."""
    return (
        _operand_fields(op.a, op.a_scales, *a_positions),
        _operand_fields(op.b, op.b_scales, *b_positions),
    )


def reference_operand(
    codes: Tensor,
    scales: list[Tensor] | None,
    fmt: Format | None,
    columnwise: bool,
    index: Tensor | None = None,
) -> reference.Operand:
    """Return an operand as the reference backend reads it."""
    if fmt is None:
        return reference.Operand(codes, row_index=index)
    fields = _operand_fields(codes, scales, *_scale_positions(scales, fmt))
    _, block_scales, global_scale = fields
    return reference.Operand(codes, fmt, block_scales, global_scale, columnwise, index)


def _check_row_scales(fmt: Format | None) -> None:
    """Raise ValueError unless rows of this format have scales of their own, or none."""
    global_scale = None if fmt is None else fmt.global_scale_for(columnwise=False)
    if fmt is not None and (fmt.is_2d or global_scale is not None and global_scale.per != "row"):
        raise ValueError(
            f"rows needs an a_format whose scales belong to single rows, got {fmt.text!r}"
        )


class GroupedGemm(Op):
    """Base class of the grouped GEMM ops."""

    accumulates: ClassVar[bool] = True
    #: Operands that are codes if they have a format.
    quantized_sides: ClassVar[str] = "ab"
    #: True if an activation is applied to the result.
    has_activation: ClassVar[bool] = False
    alignment: ClassVar[int] = PITCH_ALIGNMENT

    a: Tensor
    b: Tensor
    offs: Tensor
    alpha: Tensor | None
    a_scales: list[Tensor] | None
    b_scales: list[Tensor] | None
    a_format: str | None
    b_format: str | None
    out_dtype: torch.dtype | None
    prepacked: bool = False
    accumulation: str | None = None
    rows: Tensor | None = None
    inverse: Tensor | None = None

    @property
    def index(self) -> Tensor | None:
        """Row index of an operand, (T,) int32, or None if rows are read in their order."""
        return None if self.quantizes_a else self.rows

    @property
    def a_record(self) -> Format | None:
        """Format of A, or None if A is plain."""
        return parse_given(self.a_format)

    @property
    def b_record(self) -> Format | None:
        """Format of B, or None if B is plain."""
        return parse_given(self.b_format)

    @property
    def result_record(self) -> Format | None:
        """Format to which the result is quantized, or None if it is not quantized."""
        return None

    @property
    def quantizes_a(self) -> bool:
        """True if A is plain and the op quantizes it."""
        return "a" not in self.quantized_sides

    @property
    @abc.abstractmethod
    def uses_columnwise(self) -> bool:
        """True if B is a columnwise copy."""

    @property
    @abc.abstractmethod
    def is_split(self) -> bool:
        """True if sums of codes without block scales move to fp32 registers every 128 of K."""

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype of the result.

        It is ``out_dtype``, or by default the dtype of a plain A, or bf16 if A is codes.
        """
        if self.out_dtype is not None:
            return self.out_dtype
        return self.a.dtype if self.a_format is None else torch.bfloat16

    def capability(self) -> tuple[str, Format | None]:
        """Return the name and format under which the capability table lists this product."""
        if self.a_format is None and self.b_format is not None:
            return "grouped_gemm_w4a16", self.b_record
        return "grouped_gemm_w4a8" if is_w4a8(
            self.a_record, self.b_record
        ) else "grouped_gemm", self.a_record

    def require(self, backend: Backend) -> None:
        """Raise UnsupportedError if the backend cannot multiply the formats of both operands."""
        name, fmt = self.capability()
        arch = backend.listed
        dtype = self.a.dtype if fmt is None or name == "grouped_gemm_w4a16" else None
        options = {
            "prepacked": self.prepacked,
            "gathered": self.index is not None,
            "result": self.result_record,
        }
        require(name, fmt, arch, dtype=dtype, **options)
        if self.b_record not in (None, fmt):
            name = "grouped_gemm_w4a16" if name == "grouped_gemm_w4a8" else name
            require(name, self.b_record, arch, **options)

    def operands(self) -> Operands:
        """Return the tensors of A and of B."""
        a, b = self.reader()(self)
        return OperandTensors(*a), OperandTensors(*b)

    def reader(self) -> Callable[[GroupedGemm], tuple[OperandFields, OperandFields]]:
        """Return a function that reads the operands of any call with this call's metadata.

        The metadata is examined once, here.
        """
        a_positions = _scale_positions(self.a_scales, self.a_record)
        b_positions = _scale_positions(self.b_scales, self.b_record)
        return functools.partial(_read_operands, a_positions, b_positions)

    def _check_formats(self) -> None:
        """Raise ValueError unless the formats of A and B can be multiplied."""
        for side in self.quantized_sides:
            text, scales = getattr(self, f"{side}_format"), getattr(self, f"{side}_scales")
            if (text is None) != (scales is None):
                raise ValueError(
                    f"{side}_scales and {side}_format go together: pass both or neither"
                )
        a, b = self.a_record, self.b_record
        if a is not None and b is None:
            raise ValueError(f"b must be quantized if a is, got a_format={self.a_format!r} alone")
        if a is not None and b is not None:
            check_pair(a, b, weights=isinstance(self, MGrouped))
        check_accumulation(self.accumulation, a, b)


class MGrouped(GroupedGemm):
    """Base class of the GEMMs that multiply ragged rows by one matrix per group."""

    bias: Tensor | None
    transpose_b: bool

    fills_fresh: ClassVar[bool] = True

    @property
    def epilogue_fields(self) -> tuple[Any, ...]:
        """Arguments that only ops with an activation in the epilogue have."""
        return ()

    @property
    def num_rows(self) -> int:
        """T, the number of rows of the result."""
        return (self.a if self.rows is None else self.rows).shape[0]

    @property
    def depth(self) -> int:
        """K, the contracted extent in elements."""
        fmt, width = self.a_record, self.a.shape[1]
        return width if fmt is None or self.quantizes_a else fmt.element.count(width)

    @property
    def row_scaled(self) -> bool:
        """True if A has one global scale per row."""
        global_scale = None if self.a_record is None else self.a_record.global_scale
        return global_scale is not None and global_scale.per == "row"

    @property
    def is_b_mn_major(self) -> bool:
        """True if B is contiguous along N instead of along K."""
        fmt = self.b_record
        return self.transpose_b and (fmt is None or fmt.columnwise == "untransposed")

    @property
    def cols(self) -> int:
        """N, the number of columns of the product."""
        return self.b.shape[2 if self.is_b_mn_major else 1]

    @property
    def is_split(self) -> bool:
        return (self.accumulation or ("split" if self.transpose_b else "fast")) == "split"

    def _check_formats(self) -> None:
        """Raise ValueError unless the formats can be multiplied in this orientation."""
        super()._check_formats()
        check_transforms(None, self.b_record if self.transpose_b else None)

    def check(self) -> None:
        """Check the operands, their scales and the vectors.

        Raises:
            ValueError: An argument is invalid.
            TypeError: An argument has the wrong type.
        """
        check_tensor("a", self.a, ndim=(2,))
        check_tensor("b", self.b, ndim=(3,))
        self._check_formats()
        groups, depth = self.b.shape[0], self.depth
        check_offs(self.offs, groups)
        if self.index is not None:
            check_tensor("rows", self.index, dtypes=(torch.int32,), ndim=(1,))
            _check_row_scales(self.a_record)
        check_inverse(self.inverse, self.rows, "a", self.a)
        self._check_a(groups, depth)
        self._check_b(groups, depth)
        check_vectors(groups, self.cols, self.bias, self.alpha)
        check_dtype("out_dtype", self.result_dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def _check_a(self, groups: int, depth: int) -> None:
        """Check A, and its scales if it is quantized."""
        a = self.a_record
        if a is None or self.quantizes_a:
            check_dtype("a", self.a.dtype, self.plain_dtypes)
            if a is not None:
                check_seed(getattr(self, "seed", None), a, "a", self.device)
            if a is not None and a.has_given_scale:
                raise ValueError(
                    f"a_format {a.text!r} needs a given scale per group, for which {self.name} has "
                    "no argument: quantize a first"
                )
            return
        copy, num_groups = (self.a, self.a_scales or []), groups if self.index is None else 1
        shape = (self.a.shape[0], depth)
        check_copy("a", "a_scales", copy, a, shape, num_groups, columnwise=False)

    def _check_b(self, groups: int, depth: int) -> None:
        """Check B, and its scales if it is quantized."""
        b = self.b_record
        if b is None:
            plain = (None, depth, None) if self.transpose_b else (None, None, depth)
            check_tensor("b", self.b, dtypes=(self.a.dtype,), shape=plain)
        else:
            check_multiple("K", depth, b.k_multiple, f"the columns of a, beside {b.text}")
            global_scale = b.global_scale_for(columnwise=self.transpose_b)
            if global_scale is not None and global_scale.per == "row":
                raise ValueError(
                    f"b_format must have one global scale per group, got {self.b_format!r}"
                )
            shape = (depth, self.cols) if self.transpose_b else (self.cols, depth)
            copy = (self.b, self.b_scales or [])
            check_copy("b", "b_scales", copy, b, (groups, *shape), None, self.transpose_b)
        if self.prepacked and (b is None or b.element.per_byte == 1):
            raise ValueError(
                "prepacked needs weights with several codes per byte, "
                f"got b_format={self.b_format!r}"
            )

    @property
    def uses_columnwise(self) -> bool:
        return self.transpose_b and self.b_format is not None

    @property
    def plain_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that a plain A may have."""
        return (
            INPUT_DTYPES[:2] if self.b_format is not None and not self.quantizes_a else INPUT_DTYPES
        )

    def outputs(self) -> list[BufferSpec]:
        return [BufferSpec((self.num_rows, self.cols), self.result_dtype, zeroed=True)]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Compute the product with the reference backend into ``outputs[0]``."""
        out = outputs[0]
        b = unpack(self.b) if self.prepacked else self.b
        reference.m_grouped_gemm(
            reference_operand(self.a, self.a_scales, self.a_record, False, self.rows),
            reference_operand(b, self.b_scales, self.b_record, columnwise=self.transpose_b),
            Groups.ragged(self.offs, self.num_rows),
            out,
            transpose_b=self.transpose_b,
            alpha=self.alpha,
            bias=self.bias,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
            split=self.is_split,
        )
