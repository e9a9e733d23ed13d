"""Grouped GEMM ops.

An ``m_grouped`` product multiplies the rows of each ragged group by one matrix per group (fprop and
dgrad). A ``k_grouped`` product multiplies two ragged operands over their common rows (wgrad). The
names follow DeepGEMM. An operand is a plain tensor, or the codes of one direction of a quantized
tensor. The other tensors of that direction are in a list beside the codes, and the text of the
format says how to read them.
"""

from __future__ import annotations

import abc
import dataclasses
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
from cute_kernels.layout.slots import TILE_ROWS, most_rows
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
from ..derivatives import not_differentiable
from ..format_pairs import check_accumulation, check_pair, check_transforms, is_w4a8
from ..op import Op
from ..registration import register
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


def _reference_operand(
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
    level = None if fmt is None else fmt.global_scale_for(columnwise=False)
    if fmt is not None and (fmt.is_2d or level is not None and level.per != "row"):
        raise ValueError(
            f"rows needs an a_format whose scales belong to single rows, got {fmt.text!r}"
        )


def _sum_of_rows(rows: Tensor, terms: Tensor, like: Tensor) -> Tensor:
    """Return fp32 sums of the terms of each row of ``like``, added in the order of T.

    Args:
        rows: (T,) int32, the row of ``like`` to which each term is added. Indices out of range
            count for nothing.
        terms: (T, K).
        like: (S, K), gives the shape and dtype of the result.
    """
    target = torch.where((rows >= 0) & (rows < len(like)), rows, len(like)).long()
    sums = terms.new_zeros(len(like) + 1, terms.shape[1], dtype=torch.float32)
    return sums.index_put_((target,), terms.float(), accumulate=True)[:-1].to(like.dtype)


def _saved_tensors(
    ctx: Any, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the tensors that ``setup_context`` saved.

    Raises:
        RuntimeError: The operands were quantized, so that nothing was saved.
    """
    if not ctx.saved_tensors:
        not_differentiable(f"{name} of quantized operands")(ctx)
    return ctx.saved_tensors


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
        level = None if self.a_record is None else self.a_record.global_scale
        return level is not None and level.per == "row"

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
            level = b.global_scale_for(columnwise=self.transpose_b)
            if level is not None and level.per == "row":
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
            _reference_operand(self.a, self.a_scales, self.a_record, False, self.rows),
            _reference_operand(b, self.b_scales, self.b_record, columnwise=self.transpose_b),
            Groups.ragged(self.offs, self.num_rows),
            out,
            transpose_b=self.transpose_b,
            alpha=self.alpha,
            bias=self.bias,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
            split=self.is_split,
        )


@register
@dataclasses.dataclass
class MGroupedGemm(MGrouped):
    """Multiply the rows of each group of A by the group's matrix of B.

    The op is differentiable in a, b and bias if both operands are plain. A plain ``a`` with a
    quantized ``b`` is multiplied by the decoded values of ``b`` (W4A16). Codes of 8 bits with codes
    of 4 bits are multiplied as decoded values, too (W4A8).

    Args:
        a: (T, K), bf16, fp16 or fp32. Or the codes of the rowwise copy of a ragged tensor.
        b: (G, N, K) of the dtype of ``a``, or (G, K, N) with ``transpose_b``. Or the codes of a
            uniform tensor: of its rowwise copy (fprop), or with ``transpose_b`` of its columnwise
            copy (dgrad). The rows of a columnwise copy are padded to whole tiles, so that K of
            ``b`` cannot be checked against ``a``.
        offs: (G,) int32. End rows.
        bias: (G, N). Added in fp32.
        alpha: (G,) fp32. Factors.
        transpose_b: Contract over the rows of the groups of ``b`` (dgrad).
        out_dtype: bf16, fp16 or fp32. By default the dtype of a plain ``a``, or bf16 for codes,
            which have no dtype to follow.
        a_scales: The other tensors of the copy of ``a`` (``Format.operand_names``), such as its
            block scales and global scale. None if ``a`` is plain.
        b_scales: The other tensors of the copy of ``b``, as for ``a``.
        a_format: Text of the format of ``a``. None if it is plain.
        b_format: Text of the format of ``b``. None if it is plain.
        prepacked: True if ``b`` has the bit order of ``cute_kernels.prepack``. Kernels for sm_90a
            and the reference support that.
        accumulation: How a tensor core adds products of operands without block scales (FP8). "fast"
            adds all of K in one accumulator. "split" uses a fresh accumulator every 128 of K, and
            adds each to an fp32 sum. The default is "fast" for fprop and "split" for dgrad. The
            bits differ on sm_90a, whose accumulators keep 13 fraction bits of FP8 sums. Elsewhere
            the accumulator is as exact as "split" anyway. Other operands raise ValueError.
        rows: (T,) int32. The row of ``a`` for each row of the product, such as ``token`` of
            ``compute_routing``. Then ``a`` (S, K) has any number of rows, and one group if it is
            quantized, to a format with scales of single rows. The result has the bits of the
            product of ``moe_gather(a, rows)``: an index out of range stands for zeros. Kernels of
            two plain operands read rows of ``a`` by the index, on sm_90a if that is faster
            (``ops.gemm.gathered``). Other kernels gather the rows into memory first.
        inverse: (S, k) int32, as for ``grouped_quantize``, for rows that are gathered into memory.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form does not write rows of the tail.
    """

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None = None
    alpha: Tensor | None = None
    transpose_b: bool = False
    out_dtype: torch.dtype | None = None
    a_scales: list[Tensor] | None = None
    b_scales: list[Tensor] | None = None
    a_format: str | None = None
    b_format: str | None = None
    prepacked: bool = False
    accumulation: str | None = None
    rows: Tensor | None = None
    inverse: Tensor | None = None

    name: ClassVar[str] = "m_grouped_gemm"

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save plain operands for the backward pass."""
        a, b, offs, bias, alpha, transpose_b, _, a_scales, b_scales, *_, rows, inverse = inputs
        if a_scales is not None or b_scales is not None:
            return
        ctx.save_for_backward(a, b, offs, alpha, rows, inverse)
        ctx.transpose_b = transpose_b
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``a``, ``b`` and ``bias``."""
        a, b, offs, alpha, rows, inverse = _saved_tensors(ctx, "m_grouped_gemm")
        if alpha is not None and ctx.needs_input_grad[4]:
            raise RuntimeError("alpha of m_grouped_gemm has no derivative; detach it")
        ops = torch.ops.cute_kernels
        dy_a = dy.to(a.dtype)
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = ops.m_grouped_gemm(dy_a, b, offs, None, alpha, not ctx.transpose_b, a.dtype)
            if rows is not None:
                da = _sum_of_rows(rows, da, a)
        if ctx.needs_input_grad[1]:
            if ctx.transpose_b:
                gathered = a if rows is None else ops.moe_gather(a, rows, inverse)
                db = ops.k_grouped_gemm(gathered, dy_a, offs, alpha, b.dtype)
            else:
                db = ops.k_grouped_gemm(dy_a, a, offs, alpha, b.dtype, rows=rows, inverse=inverse)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
            dbias = ops.grouped_dbias(dy, offs).to(ctx.bias_dtype)
        return da, db, None, dbias, *(None,) * 11


@register
@dataclasses.dataclass
class KGroupedGemm(GroupedGemm):
    """Multiply the transposed rows of each group of A by the rows of the group of B.

    The op is differentiable in a and b if both operands are plain.

    Args:
        a: (T, N), bf16, fp16 or fp32. Or the codes of the columnwise copy of a ragged tensor.
        b: (T, K) of the dtype of ``a``. Or the codes of the columnwise copy of a tensor with the
            same offs.
        offs: (G,) int32. End rows.
        alpha: (G,) fp32. Factors.
        out_dtype: As for ``m_grouped_gemm``.
        a_scales: As for ``m_grouped_gemm``.
        b_scales: As for ``m_grouped_gemm``.
        a_format: As for ``m_grouped_gemm``.
        b_format: As for ``m_grouped_gemm``.
        accumulation: As for ``m_grouped_gemm``; "split" by default.
        rows: (T,) int32. The row of ``b`` (S, K) for each row of ``a``, as for ``m_grouped_gemm``.
            Only for plain operands.
        inverse: (S, k) int32, as for ``m_grouped_gemm``.

    Returns:
        (G, N, K); zeros for an empty group. The ``_out`` form does not write empty groups when it
        accumulates.
    """

    a: Tensor
    b: Tensor
    offs: Tensor
    alpha: Tensor | None = None
    out_dtype: torch.dtype | None = None
    a_scales: list[Tensor] | None = None
    b_scales: list[Tensor] | None = None
    a_format: str | None = None
    b_format: str | None = None
    accumulation: str | None = None
    rows: Tensor | None = None
    inverse: Tensor | None = None

    name: ClassVar[str] = "k_grouped_gemm"

    @property
    def uses_columnwise(self) -> bool:
        """True if B is a columnwise copy, as A is."""
        return self.a_format is not None

    @property
    def is_split(self) -> bool:
        return self.accumulation != "fast"

    def _slots(self) -> int:
        """Return the number of slot rows of a quantized A."""
        fmt = self.a_record
        assert fmt is not None
        return (
            fmt.element.count(self.a.shape[1])
            if fmt.columnwise == "transposed"
            else self.a.shape[0]
        )

    @property
    def num_rows(self) -> int:
        """Number of rows, T. For slots, whose shapes do not determine T, it is their capacity."""
        if self.a_format is None:
            return self.a.shape[0]
        return most_rows(self._slots() // TILE_ROWS, self.offs.shape[0])

    def width(self, side: str) -> int:
        """Return N for ``side="a"`` or K for ``side="b"``."""
        fmt, codes = getattr(self, f"{side}_record"), getattr(self, side)
        transposed = fmt is not None and fmt.columnwise == "transposed"
        return codes.shape[0 if transposed else 1]

    def check(self) -> None:
        """Check the operands, their scales and the factors."""
        check_tensor("a", self.a, ndim=(2,))
        check_offs(self.offs)
        self._check_formats()
        if self.a_format is None:
            self._check_plain()
        else:
            self._check_quantized()
        check_vectors(self.offs.shape[0], 0, None, self.alpha)
        check_dtype("out_dtype", self.result_dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def _check_plain(self) -> None:
        """Check plain operands and the row index."""
        check_dtype("a", self.a.dtype, INPUT_DTYPES)
        rows = self.num_rows
        shape = (rows if self.rows is None else None, None)
        check_tensor("b", self.b, dtypes=(self.a.dtype,), shape=shape)
        if self.rows is not None:
            check_tensor("rows", self.rows, dtypes=(torch.int32,), shape=(rows,))
        check_inverse(self.inverse, self.rows, "b", self.b)

    def _check_quantized(self) -> None:
        """Check quantized operands and their slots."""
        groups = self.offs.shape[0]
        if self.rows is not None or self.inverse is not None:
            raise ValueError(
                "rows and inverse need plain operands: blocks of "
                f"a_format={self.a_format!r} run along the rows of a group"
            )
        check_multiple("slot rows", self._slots(), TILE_ROWS, "a is a columnwise copy")
        if self._slots() // TILE_ROWS < groups:
            raise ValueError(
                f"a must have at least one tile for each of the {groups} groups of offs, "
                f"got shape {tuple(self.a.shape)}"
            )
        check_tensor("b", self.b, ndim=(2,))
        for side in "ab":
            fmt, shape = getattr(self, f"{side}_record"), (self.num_rows, self.width(side))
            copy = (getattr(self, side), getattr(self, f"{side}_scales"))
            check_copy(side, f"{side}_scales", copy, fmt, shape, groups, columnwise=True)

    def _check_formats(self) -> None:
        """Raise ValueError unless the formats can be multiplied over rows."""
        super()._check_formats()
        if self.a_format is None and self.b_format is not None:
            raise ValueError(f"a must be quantized if b is, got b_format={self.b_format!r} alone")
        check_transforms(self.a_record, self.b_record)

    def outputs(self) -> list[BufferSpec]:
        return [
            BufferSpec((self.offs.shape[0], self.width("a"), self.width("b")), self.result_dtype)
        ]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Compute the product with the reference backend into ``outputs[0]``."""
        (out,) = outputs
        reference.k_grouped_gemm(
            _reference_operand(self.a, self.a_scales, self.a_record, columnwise=True),
            _reference_operand(self.b, self.b_scales, self.b_record, True, self.rows),
            Groups.ragged(self.offs, self.num_rows),
            out,
            alpha=self.alpha,
            accumulate=options.get("accumulate", False),
            tensor_core=options.get("tensor_core"),
            split=self.is_split,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save plain operands for the backward pass."""
        a, b, offs, alpha, _, a_scales, *_, rows, inverse = inputs
        if a_scales is not None:
            return
        ctx.save_for_backward(a, b, offs, alpha, rows, inverse)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``a`` and ``b``."""
        a, b, offs, alpha, rows, inverse = _saved_tensors(ctx, "k_grouped_gemm")
        if alpha is not None and ctx.needs_input_grad[3]:
            raise RuntimeError("alpha of k_grouped_gemm has no derivative; detach it")
        ops = torch.ops.cute_kernels
        dw = dw.to(a.dtype)
        da = db = None
        if ctx.needs_input_grad[0]:
            da = ops.m_grouped_gemm(
                b, dw, offs, None, alpha, False, a.dtype, rows=rows, inverse=inverse
            )
        if ctx.needs_input_grad[1]:
            db = ops.m_grouped_gemm(a, dw, offs, None, alpha, True, b.dtype)
            if rows is not None:
                db = _sum_of_rows(rows, db, b)
        return da, db, *(None,) * 10
