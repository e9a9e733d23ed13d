"""Grouped GEMM ops.

``m_grouped``: rows of ragged groups times one matrix a group (fprop and dgrad). ``k_grouped``: two
ragged operands multiplied over their common rows (wgrad). Names follow DeepGEMM. An operand is a
plain tensor, or the codes of one direction of a quantized one with the rest of that direction in a
list beside it; the text of its format says how to read them.
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
from .operand_tensors import OperandTensors

_FP32 = (torch.float32,)


def parse_given(text: str | None) -> Format | None:
    """The format of a text; None for none."""
    return None if text is None else parse(text)


def check_vectors(num_groups: int, cols: int, bias: Tensor | None, alpha: Tensor | None) -> None:
    """Check the vectors of each group that an epilogue takes."""
    if bias is not None:
        check_tensor("bias", bias, dtypes=INPUT_DTYPES, shape=(num_groups, cols))
    if alpha is not None:
        check_tensor("alpha", alpha, dtypes=_FP32, shape=(num_groups,))


def _places(scales: list[Tensor] | None, fmt: Format | None) -> tuple[int | None, int | None]:
    """Where the block scales and the second level are in an operand's list, None if nowhere."""
    if fmt is None or scales is None:
        return None, None
    names = fmt.operand_names(columnwise=False)[1:]
    return 0 if fmt.scale is not None else None, len(names) - 1 if fmt.global_scale else None


def _read(
    a_at: tuple[int | None, int | None], b_at: tuple[int | None, int | None], op: GroupedGemm
) -> tuple[OperandTensors, OperandTensors]:
    return _parts(op.a, op.a_scales, *a_at), _parts(op.b, op.b_scales, *b_at)


def _parts(
    codes: Tensor, scales: list[Tensor] | None, scale_at: int | None, level_at: int | None
) -> OperandTensors:
    if scales is None:
        return codes, None, None
    return (
        codes,
        None if scale_at is None else scales[scale_at],
        None if level_at is None else scales[level_at],
    )


def _reference_operand(
    codes: Tensor,
    scales: list[Tensor] | None,
    fmt: Format | None,
    columnwise: bool,
    index: Tensor | None = None,
) -> reference.Operand:
    if fmt is None:
        return reference.Operand(codes, row_index=index)
    _, block_scales, vector = _parts(codes, scales, *_places(scales, fmt))
    return reference.Operand(codes, fmt, block_scales, vector, columnwise, index)


def _check_own_scales(fmt: Format | None) -> None:
    """Rows of a tensor of this format must have scales of their own, or none."""
    level = None if fmt is None else fmt.global_scale_for(columnwise=False)
    if fmt is not None and (fmt.is_2d or level is not None and level.per != "row"):
        raise ValueError(
            f"rows needs an a_format whose scales are those of single rows, got {fmt.text!r}"
        )


def _sum_at(rows: Tensor, terms: Tensor, like: Tensor) -> Tensor:
    """The sums in fp32 of the terms (T, K) of each row of ``like``, in the order of T."""
    place = torch.where((rows >= 0) & (rows < len(like)), rows, len(like)).long()
    sums = terms.new_zeros(len(like) + 1, terms.shape[1], dtype=torch.float32)
    return sums.index_put_((place,), terms.float(), accumulate=True)[:-1].to(like.dtype)


def _saved(
    ctx: Any, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What ``setup_context`` saved; nothing of quantized operands."""
    if not ctx.saved_tensors:
        not_differentiable(f"{name} of quantized operands")(ctx)
    return ctx.saved_tensors


class GroupedGemm(Op):
    """What the GEMMs share."""

    accumulates: ClassVar[bool] = True
    #: Operands that come as codes where they have a format.
    quantized_sides: ClassVar[str] = "ab"
    #: Whether the result goes through an activation.
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
        """Which rows of an operand the product reads, where that is not all in their order."""
        return None if self.quantizes_a else self.rows

    @property
    def a_record(self) -> Format | None:
        """The format of A; None if plain."""
        return parse_given(self.a_format)

    @property
    def b_record(self) -> Format | None:
        """The format of B; None if plain."""
        return parse_given(self.b_format)

    @property
    def result_record(self) -> Format | None:
        """The format that the result is quantized to; None if it is not."""
        return None

    @property
    def quantizes_a(self) -> bool:
        """Whether A is plain and quantized on the way."""
        return "a" not in self.quantized_sides

    @property
    @abc.abstractmethod
    def uses_columnwise(self) -> bool:
        """Whether B is a columnwise copy."""

    @property
    @abc.abstractmethod
    def is_split(self) -> bool:
        """Whether sums of codes without block scales move to fp32 every 128 of K."""

    @property
    def result_dtype(self) -> torch.dtype:
        """``out_dtype``, or for None the dtype of a plain A; codes have none: then it is bf16."""
        if self.out_dtype is not None:
            return self.out_dtype
        return self.a.dtype if self.a_format is None else torch.bfloat16

    def capability(self) -> tuple[str, Format | None]:
        if self.a_format is None and self.b_format is not None:
            return "grouped_gemm_w4a16", self.b_record
        return "grouped_gemm_w4a8" if is_w4a8(
            self.a_record, self.b_record
        ) else "grouped_gemm", self.a_record

    def require(self, backend: Backend) -> None:
        name, fmt = self.capability()
        arch = backend.listed
        dtype = self.a.dtype if fmt is None or name == "grouped_gemm_w4a16" else None
        facts = {
            "prepacked": self.prepacked,
            "gathered": self.index is not None,
            "result": self.result_record,
        }
        require(name, fmt, arch, dtype=dtype, **facts)
        if self.b_record not in (None, fmt):
            name = "grouped_gemm_w4a16" if name == "grouped_gemm_w4a8" else name
            require(name, self.b_record, arch, **facts)

    def operands(self) -> tuple[OperandTensors, OperandTensors]:
        """Codes, block scales and second level of A and of B, None where there are none."""
        return self.reader()(self)

    def reader(self) -> Callable[[GroupedGemm], tuple[OperandTensors, OperandTensors]]:
        """``operands`` of calls with this one's metadata, which is looked at once."""
        a_at, b_at = _places(self.a_scales, self.a_record), _places(self.b_scales, self.b_record)
        return functools.partial(_read, a_at, b_at)

    def _check_formats(self) -> None:
        """Whether the formats can be multiplied at all."""
        for side in self.quantized_sides:
            text, scales = getattr(self, f"{side}_format"), getattr(self, f"{side}_scales")
            if (text is None) != (scales is None):
                raise ValueError(f"{side}_scales and {side}_format go together: give both or none")
        a, b = self.a_record, self.b_record
        if a is not None and b is None:
            raise ValueError(f"b must be quantized if a is, got a_format={self.a_format!r} alone")
        if a is not None and b is not None:
            check_pair(a, b, weights=isinstance(self, MGrouped))
        check_accumulation(self.accumulation, a, b)


class MGrouped(GroupedGemm):
    """What the GEMMs of ragged rows by one matrix a group share."""

    bias: Tensor | None
    transpose_b: bool

    fills_fresh: ClassVar[bool] = True

    @property
    def of_activation(self) -> tuple[Any, ...]:
        """The arguments of ops with an activation in the epilogue that others lack."""
        return ()

    @property
    def num_rows(self) -> int:
        """T, the rows of the result."""
        return (self.a if self.rows is None else self.rows).shape[0]

    @property
    def depth(self) -> int:
        """K."""
        fmt, width = self.a_record, self.a.shape[1]
        return width if fmt is None or self.quantizes_a else fmt.element.count(width)

    @property
    def row_scaled(self) -> bool:
        """Whether the second level of A is one number a row."""
        level = None if self.a_record is None else self.a_record.global_scale
        return level is not None and level.per == "row"

    @property
    def is_b_mn_major(self) -> bool:
        """Whether B is contiguous along N, not along K."""
        fmt = self.b_record
        return self.transpose_b and (fmt is None or fmt.columnwise == "untransposed")

    @property
    def cols(self) -> int:
        """N."""
        return self.b.shape[2 if self.is_b_mn_major else 1]

    @property
    def is_split(self) -> bool:
        return (self.accumulation or ("split" if self.transpose_b else "fast")) == "split"

    def _check_formats(self) -> None:
        super()._check_formats()
        check_transforms(None, self.b_record if self.transpose_b else None)

    def check(self) -> None:
        check_tensor("a", self.a, ndim=(2,))
        check_tensor("b", self.b, ndim=(3,))
        self._check_formats()
        groups, depth = self.b.shape[0], self.depth
        check_offs(self.offs, groups)
        if self.index is not None:
            check_tensor("rows", self.index, dtypes=(torch.int32,), ndim=(1,))
            _check_own_scales(self.a_record)
        check_inverse(self.inverse, self.rows, "a", self.a)
        a, b = self.a_record, self.b_record
        if a is None or self.quantizes_a:
            check_dtype("a", self.a.dtype, self.plain_dtypes)
            if a is not None:
                check_seed(getattr(self, "seed", None), a, "a", self.device)
            if a is not None and a.has_given_scale:
                raise ValueError(
                    f"a_format {a.text!r} takes a scale of each group, which {self.name} has no argument for: quantize a first"
                )
        else:
            copy, cut = (self.a, self.a_scales or []), groups if self.index is None else 1
            check_copy("a", "a_scales", copy, a, (self.a.shape[0], depth), cut, columnwise=False)
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
            raise ValueError(f"prepacked is of weights of packed codes, got {self.b_format!r}")
        check_vectors(groups, self.cols, self.bias, self.alpha)
        check_dtype("out_dtype", self.result_dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

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
    """Rows of each group of A times its matrix of B.

    Plain operands are differentiable in a, b and bias. A plain ``a`` beside a quantized ``b`` is
    multiplied by the values that b stands for (W4A16), and so are codes of a byte beside those of
    four bits (W4A8).

    Args:
        a: (T, K) bf16, fp16 or fp32; or the codes of a ragged tensor's rowwise copy.
        b: (G, N, K) of the dtype of ``a``, or (G, K, N) with ``transpose_b``; or the codes of a
            uniform tensor's rowwise copy (fprop), or with ``transpose_b`` of its columnwise
            one (dgrad), whose rows are padded to whole tiles: that ``a`` has as many
            columns as the groups have rows cannot be seen here.
        offs: (G,) int32 end rows.
        bias: (G, N), added in fp32.
        alpha: (G,) fp32 factors.
        transpose_b: contract over the rows of the groups of ``b`` (dgrad).
        out_dtype: bf16, fp16 or fp32; the dtype of a plain ``a`` by default. Codes have no
            dtype that it could follow: then it is bf16.
        a_scales: what else the copy of ``a`` needs to be read (``Format.operand_names``), such
            as its block scales and second level; None if plain.
        b_scales: likewise of ``b``.
        a_format: the text of the format of ``a``; None if plain.
        b_format: likewise of ``b``.
        prepacked: ``b`` has the order of bits of ``cute_kernels.prepack``, which kernels for
            sm_90a and the reference take.
        accumulation: how a tensor core adds the products of operands without block scales
            (FP8): "fast", all of K in one accumulator, or "split", a fresh one every 128 of
            K, each added to an fp32 sum. By default "fast" for fprop and "split" for dgrad.
            On sm_90a, whose accumulators keep 13 fraction bits of FP8 sums, the bits
            differ; elsewhere "split" is met by what the accumulator is anyway. Raises for
            other operands.
        rows: (T,) int32, the row of ``a`` that is each row of the product, such as ``token`` of
            ``compute_routing``: ``a`` (S, K) then has any number of rows, and one group if
            it is quantized, to a format whose scales are those of single rows. The bits are
            those of the product of ``moe_gather(a, rows)``: an index that is none of the
            rows stands for zeros. Kernels of two plain operands read rows of ``a`` where
            they are, on sm_90a if that is faster (``launch.gathered``); others gather them
            into memory first.
        inverse: (S, k) int32, as for ``grouped_quantize``, of rows that are gathered into
            memory.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form leaves them alone.
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
        a, b, offs, bias, alpha, transpose_b, _, a_scales, b_scales, *_, rows, inverse = inputs
        if a_scales is not None or b_scales is not None:
            return
        ctx.save_for_backward(a, b, offs, alpha, rows, inverse)
        ctx.transpose_b = transpose_b
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offs, alpha, rows, inverse = _saved(ctx, "m_grouped_gemm")
        if alpha is not None and ctx.needs_input_grad[4]:
            raise RuntimeError("alpha of m_grouped_gemm has no derivative; detach it")
        ops = torch.ops.cute_kernels
        dy_a = dy.to(a.dtype)
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = ops.m_grouped_gemm(dy_a, b, offs, None, alpha, not ctx.transpose_b, a.dtype)
            if rows is not None:
                da = _sum_at(rows, da, a)
        if ctx.needs_input_grad[1]:
            if ctx.transpose_b:
                left = a if rows is None else ops.moe_gather(a, rows, inverse)
                db = ops.k_grouped_gemm(left, dy_a, offs, alpha, b.dtype)
            else:
                db = ops.k_grouped_gemm(dy_a, a, offs, alpha, b.dtype, rows=rows, inverse=inverse)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
            dbias = ops.grouped_dbias(dy, offs).to(ctx.bias_dtype)
        return da, db, None, dbias, *(None,) * 11


@register
@dataclasses.dataclass
class KGroupedGemm(GroupedGemm):
    """Rows of each group of A, transposed, times those of B.

    Plain operands are differentiable in a and b.

    Args:
        a: (T, N) bf16, fp16 or fp32; or the codes of a ragged tensor's columnwise copy.
        b: (T, K) of the dtype of ``a``; or the codes of the columnwise copy of a tensor with
            the same offs.
        offs: (G,) int32 end rows.
        alpha: (G,) fp32 factors.
        out_dtype: as for ``m_grouped_gemm``, and so all up to ``b_format``.
        accumulation: as for ``m_grouped_gemm``; "split" by default.
        rows: (T,) int32, the row of ``b`` (S, K) that is beside each row of ``a``, as for
            ``m_grouped_gemm``; of plain operands.
        inverse: likewise.

    Returns:
        (G, N, K); zeros for an empty group. The ``_out`` form leaves those alone when
        accumulating.
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
        return self.a_format is not None

    @property
    def is_split(self) -> bool:
        return self.accumulation != "fast"

    def _slots(self) -> int:
        """Slot rows of a quantized A."""
        fmt = self.a_record
        assert fmt is not None
        return (
            fmt.element.count(self.a.shape[1])
            if fmt.columnwise == "transposed"
            else self.a.shape[0]
        )

    @property
    def num_rows(self) -> int:
        """T; of slots the most rows that they hold, for T itself is not known there."""
        if self.a_format is None:
            return self.a.shape[0]
        return most_rows(self._slots() // TILE_ROWS, self.offs.shape[0])

    def width(self, side: str) -> int:
        """N or K."""
        fmt, codes = getattr(self, f"{side}_record"), getattr(self, side)
        transposed = fmt is not None and fmt.columnwise == "transposed"
        return codes.shape[0 if transposed else 1]

    def check(self) -> None:
        check_tensor("a", self.a, ndim=(2,))
        check_offs(self.offs)
        self._check_formats()
        groups = self.offs.shape[0]
        if self.a_format is None:
            check_dtype("a", self.a.dtype, INPUT_DTYPES)
            rows = self.num_rows
            check_tensor(
                "b",
                self.b,
                dtypes=(self.a.dtype,),
                shape=(rows if self.rows is None else None, None),
            )
            if self.rows is not None:
                check_tensor("rows", self.rows, dtypes=(torch.int32,), shape=(rows,))
            check_inverse(self.inverse, self.rows, "b", self.b)
        else:
            if self.rows is not None or self.inverse is not None:
                raise ValueError(
                    f"rows is of plain operands: blocks of {self.a_format} run along the rows of a group"
                )
            check_multiple("slot rows", self._slots(), TILE_ROWS, "a is a columnwise copy")
            if self._slots() // TILE_ROWS < groups:
                raise ValueError(
                    f"a must have at least one tile for each of the {groups} groups of offs, got shape {tuple(self.a.shape)}"
                )
            check_tensor("b", self.b, ndim=(2,))
            for side in "ab":
                fmt, shape = getattr(self, f"{side}_record"), (self.num_rows, self.width(side))
                copy = (getattr(self, side), getattr(self, f"{side}_scales"))
                check_copy(side, f"{side}_scales", copy, fmt, shape, groups, columnwise=True)
        check_vectors(groups, 0, None, self.alpha)
        check_dtype("out_dtype", self.result_dtype, INPUT_DTYPES)
        same_device("a", self.device, **self.tensors())

    def _check_formats(self) -> None:
        super()._check_formats()
        if self.a_format is None and self.b_format is not None:
            raise ValueError(f"a must be quantized if b is, got b_format={self.b_format!r} alone")
        check_transforms(self.a_record, self.b_record)

    def outputs(self) -> list[BufferSpec]:
        return [
            BufferSpec((self.offs.shape[0], self.width("a"), self.width("b")), self.result_dtype)
        ]

    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
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
        a, b, offs, alpha, _, a_scales, *_, rows, inverse = inputs
        if a_scales is not None:
            return
        ctx.save_for_backward(a, b, offs, alpha, rows, inverse)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offs, alpha, rows, inverse = _saved(ctx, "k_grouped_gemm")
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
                db = _sum_at(rows, db, b)
        return da, db, *(None,) * 10
